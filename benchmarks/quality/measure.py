"""One run in this process, with the schemes and frames of a real one: ``measure(case, texts)``.

All stages run in one process over the ``memory`` transport, which counts real bytes and gives the
losses that several processes would, bit for bit. It is `thinwire train` with the settings of the
case; some cases alter the initial weights first, which no setting of the product does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console

import thinwire as tw
from benchmarks.quality.cases import Case
from thinwire.train import build, check, config, data, home, loop, metrics, model
from thinwire.train.stop import Stop

_KEPT: tuple[str, ...] = (
    "val_loss",
    "val_loss_codec",
    "train_loss",
    "steps",
    "tokens",
    "train_s",
    "versions",
)
_LINK: tuple[str, ...] = (
    "edge",
    "direction",
    "codec",
    "messages",
    "payload_bytes",
    "header_bytes",
    "raw_bytes",
)
_LINK += ("values", "bits_per_value", "steady_bits_per_value", "kinds")


def main() -> None:
    """Print the result of one case as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", help="the fields of a case, as JSON")
    parser.add_argument("--texts", type=Path, help="folder with the other texts, by name")
    options = parser.parse_args()
    print(json.dumps(measure(Case(**json.loads(options.case)), options.texts)))


def measure(case: Case, texts: Path | None = None) -> dict[str, Any]:
    """What a run of ``case`` reached and sent, and where it ran.

    A run that ends early, as with a loss that is not finite, has its reason under ``failed`` and
    no losses.
    """
    settings = case.settings()
    if case.text != "reference":
        if texts is None:
            raise FileNotFoundError(f"the text '{case.text}' needs --texts")
        settings["data.path"] = str(texts / case.text)
    began = time.process_time()
    try:
        with altered_weights(case):
            found = _train(config.build(settings))
    except (tw.NonFiniteError, tw.LinkError) as error:
        found = {"failed": config.one_line(error)}
    return {
        "case": dataclasses.asdict(case),
        "settings": settings | ({"data.path": case.text} if "data.path" in settings else {}),
        **found,
        "cpu_s": round(time.process_time() - began, 1),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{os.cpu_count()} cores",
        "commit": _commit(),
    }


def _train(settings: config.Config) -> dict[str, Any]:
    settings = check.resolved(settings)
    check.check_plan(settings)
    torch.set_num_threads(settings.threads or 1)
    text = data.load(settings.data, settings.model.context)
    settings = build.planned(settings, text)
    place = build.Place(rank=0, world_size=1, device=torch.device("cpu"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        dist.init_process_group(
            "gloo", init_method=f"file://{scratch}/rendezvous", rank=0, world_size=1
        )
        try:
            home.create(dataclasses.replace(settings, out=str(folder)))
            own = home.begin(settings, folder, rank=0, local_rank=0)
            summary = loop.train(settings, text, place, own, Console(quiet=True), Stop())
        finally:
            dist.destroy_process_group()
        steps = metrics.read_metrics(folder)
    return {
        **{key: summary[key] for key in _KEPT},
        "epoch_val_loss_codec": [s["val_loss_codec"] for s in steps if "val_loss_codec" in s],
        "links": [{key: link[key] for key in _LINK} for link in summary["links"]],
        "control_bytes": sum(c["payload_bytes"] + c["header_bytes"] for c in summary["control"]),
        "codec_share": max(rank["codec_share"] for rank in summary["cpu"]),
        "data": {key: value for key, value in summary["data"].items() if key != "source"},
    }


@contextlib.contextmanager
def altered_weights(case: Case) -> Iterator[None]:
    """Within, stages start from weights altered as ``case`` says: as they are, if it says nothing.

    Embeddings are scaled from the product's standard deviation to that of the case; then, for
    ``ulp``, each weight is moved to the next larger float.
    """
    build_stage, scale = model.build_stage, case.embedding_std / Case.embedding_std

    def build_and_alter(*arguments: Any) -> model.Stage:
        stage = build_stage(*arguments)
        with torch.no_grad():
            for name, parameter in stage.named_parameters():
                if name.startswith("embedding.") and scale != 1:
                    parameter.mul_(scale)
                if case.ulp:
                    parameter.copy_(parameter.nextafter(torch.tensor(torch.inf)))
        return stage

    with mock.patch.object(model, "build_stage", build_and_alter):
        yield


def _commit() -> str | None:
    """The last commit that changed the package; ``+`` behind it: and what is not committed."""
    here = Path(__file__).parent
    source = here.parents[1] / "src"
    log = ["git", "log", "-1", "--format=%h", "--", str(source)]
    found = subprocess.run(log, cwd=here, capture_output=True, text=True, check=False)
    if found.returncode != 0 or not found.stdout:
        return None
    diff = ["git", "diff", "--quiet", "HEAD", "--", str(source)]
    differs = subprocess.run(diff, cwd=here, check=False).returncode != 0
    return found.stdout.strip() + "+" * differs


if __name__ == "__main__":
    main()
