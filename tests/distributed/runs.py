"""Whole training runs inside the worker pool: begun, ended in any way, and resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

import thinwire as tw
from thinwire.train import check, disk, home, metrics, weights
from thinwire.train.arguments import read_train
from thinwire.train.build import Place, build, planned
from thinwire.train.config import Config, ConfigError
from thinwire.train.loop import train
from thinwire.train.resume import resume
from thinwire.train.stop import Stop, Stopped
from thinwire.train.task import Data
from thinwire.train.tasks import task_of

WORDS = [f"{a}{b}{c}" for a in "mnprt" for b in "aeiou" for c in ("k", "l", "sh")]
TEXT = " ".join(WORDS[(7 * i * i + 3 * i) % len(WORDS)] for i in range(120))

#: A few steps an epoch, so that samples are visited again, and the last batch is a short one.
TINY = [
    "--model.dim=16",
    "--model.heads=2",
    "--model.context=16",
    "--train.batch=8",
    "--train.epochs=3",
    "--pipeline.microbatches=4",
    "--link.rate=none",
    "--threads=1",
    "--data.validation=0.2",
]


class Crash(Exception):
    """What a test ends a run with."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run ends early: asked to stop before, or crashed after so many of its steps."""

    stop_at: int | None = None
    crash_after: int | None = None


class Ended(Stop):
    """A ``Stop`` that ends the run as a test wants, on rank ``world_size - 1``."""

    def __init__(self, ending: Ending, is_asked: bool) -> None:
        super().__init__()
        self.ending, self.is_asked = ending, is_asked

    @contextlib.contextmanager
    def training(self, pipeline: tw.Pipeline, folder: Path) -> Iterator[None]:
        step, count = pipeline.step, 0

        def counted(*args: Any, **kwargs: Any) -> tw.StepResult:
            nonlocal count
            count += 1
            if self.ending.crash_after is not None and count > self.ending.crash_after:
                raise Crash
            if count == self.ending.stop_at and self.is_asked:
                self.ask(2)
            return step(*args, **kwargs)

        pipeline.step = counted  # type: ignore[method-assign]
        with super().training(pipeline, folder):
            yield


@dataclasses.dataclass
class Outcome:
    """How a rank's run ended, and what rank 0 showed."""

    how: str  # "complete", "stopped", "crashed", or the text of a ConfigError
    step: int | None
    shown: str


def run(
    rank: int,
    world_size: int,
    options: list[str],
    folder: str | dict[int, str],
    resumed: bool = False,
    ending: Ending = Ending(),
) -> Outcome:
    """Do a run in ``folder``, as one worker of it.

    Where ``folder`` has one for each rank, each is on a machine of its own.
    """
    apart = isinstance(folder, dict)
    own = Path(folder if isinstance(folder, str) else folder[rank])
    shown = io.StringIO()
    screen = Console(file=shown, width=200, quiet=rank != 0)
    stop = Ended(ending, is_asked=rank == world_size - 1)
    try:
        with contextlib.chdir(own.parent):
            _run(rank, world_size, options, Path(own.name), apart, resumed, screen, stop)
    except Stopped as stopped:
        return Outcome("stopped", stopped.step, shown.getvalue())
    except Crash:
        return Outcome("crashed", None, shown.getvalue())
    except ConfigError as error:
        return Outcome(str(error), None, shown.getvalue())
    return Outcome("complete", None, shown.getvalue())


def _run(
    rank: int,
    world_size: int,
    options: list[str],
    folder: Path,
    apart: bool,
    resumed: bool,
    screen: Console,
    stop: Stop,
) -> None:
    torch.set_num_threads(1)
    config, data = _given(options, folder, world_size, resumed)
    local_rank = 0 if apart else rank
    if resumed:
        own = home.resume(config, folder, rank, local_rank)
    else:
        own = home.begin(config, home.create(config) if rank == 0 else None, rank, local_rank)
    train(config, data, Place(rank, world_size, torch.device("cpu")), own, screen, stop)


def _given(options: list[str], folder: Path, world_size: int, resumed: bool) -> tuple[Config, Data]:
    words = [*options, "--resume" if resumed else "--out", str(folder)]
    config = check.resolved(read_train(words)[0], world_size)
    data = task_of(config).load(config)
    return planned(config, data), data


def loaded(
    rank: int, world_size: int, options: list[str], folder: str | dict[int, str]
) -> tuple[dict[str, str], str]:
    """What a rank that resumes a run has before its first step, by name, and what it shows."""
    own = Path(folder if isinstance(folder, str) else folder[rank])
    config, data = _given(options, own, world_size, resumed=True)
    place = Place(rank, world_size, torch.device("cpu"))
    where = home.resume(config, own, rank, 0 if isinstance(folder, dict) else rank)
    shown = io.StringIO()
    made = build(config, data, place, disk.rank_folder(where.parts, rank))
    resume(made, where, Console(file=shown, width=200))
    tensors = made.model.named_tensors(made.stages)
    entries = weights.collect(tensors, made.optimizer)
    made.pipeline.close()
    return {name: entry_digest(entry) for name, entry in entries.items()}, shown.getvalue()


def saved(folder: Path) -> dict[str, str]:
    """What the newest parts in ``folder`` hold of weights and optimizer state, by name."""
    found = {}
    for ranks_own in disk.rank_folders(folder).values():
        for part in list(disk.parts(ranks_own))[-1:]:
            written = part.manifest["weights"]
            for name, entry in weights.read(part.folder, written, written["names"]).items():
                found[name] = entry_digest(entry)
    return found


def entry_digest(entry: weights.Entry) -> str:
    """A hash of a parameter and of all that its optimizer keeps of it."""
    return hashlib.sha256(weights.to_bytes(entry)).hexdigest()


def text_in(folder: Path) -> str:
    """A small text to train on; returns its path."""
    path = folder / "text.txt"
    path.write_text(TEXT)
    return str(path)


#: What depends on the clock.
TIMED = ("tokens_per_s", "images_per_s", "step_ms", "timers_ms", "checkpoint")


def records(folder: Path) -> list[dict[str, Any]]:
    """What ``metrics.jsonl`` says, times and checkpoints left out."""
    found = [
        {name: value for name, value in record.items() if name not in TIMED}
        for record in metrics.read_metrics(folder)
        if "checkpoint" not in record
    ]
    assert found
    return found


def results(folder: Path) -> dict[str, Any]:
    """What the summary says of losses and accuracies, and of traffic on the links."""
    summary = json.loads((folder / "summary.json").read_text())
    names = ("train_", "val_", "test_", "steps", "epochs", "tokens", "images", "links")
    found = {n: summary[n] for n in summary if n.startswith(names) and n != "train_s"}
    return {name: value for name, value in found.items() if name not in TIMED}


def digests(folder: Path, files: tuple[str, ...]) -> dict[str, str]:
    """The digests of files in the last checkpoint of every rank, by rank and name."""
    found = {}
    for ranks_own in disk.rank_folders(folder).values():
        last = list(disk.parts(ranks_own))[-1]
        disk.verify(last)
        for name, file in last.manifest["files"].items():
            if name.startswith(files):
                found[f"{ranks_own.name}/{name}"] = file["xxh3"]
    return found


def assert_equal_runs(one: Path, other: Path) -> None:
    """Two runs with the same losses, traffic, weights, optimizer state and references."""
    assert records(one) == records(other)
    assert results(one) == results(other)
    files = ("model", "optimizer")
    assert digests(one, files) == digests(other, files)
    assert references(one) == references(other)


def references(folder: Path) -> dict[str, Any]:
    """What the last checkpoint of every rank remembers: version, length, last visit, hash by key.

    Where the rows lie on disk depends on how often a run was begun; those that lie in the
    checkpoint are compared as they are.
    """
    found: dict[str, Any] = {}
    for ranks_own in disk.rank_folders(folder).values():
        last = list(disk.parts(ranks_own))[-1]
        for path in sorted(last.folder.glob("link-*")):
            table = load_file(path)
            columns = [table[name].tolist() for name in ("keys", "versions", "values", "last")]
            kept = _rows(table) if "rows" in table else table["hashes"].tolist()
            found[f"{ranks_own.name}/{path.name}"] = {
                row[0]: row[1:] for row in zip(*columns, kept, strict=True)
            }
    return found


def _rows(table: dict[str, torch.Tensor]) -> list[list[int]]:
    """Each key's row, which lie end to end: as many bytes a value in all of them."""
    total = max(int(table["values"].sum()), 1)
    sizes = (table["values"] * len(table["rows"]) // total).tolist()
    return [row.tolist() for row in table["rows"].split(sizes)] if sizes else []
