"""How far activations move between two visits, and what that leaves of a codec's error.

    python -m benchmarks.quality.drift --lr 5e-4 3e-3

An fp32 run of two stages, in which what the first stage gives is compared with what it gave of the
same sample an epoch before. Direct coding is off by the codec's share of the value's energy; delta
by the same share of the change's. A line of JSON for each run goes to `results/drift.jsonl`; where
it is there already it is printed only.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor, nn

import thinwire as tw
from benchmarks.quality.cases import LR, Case
from benchmarks.quality.measure import measure
from benchmarks.quality.results import RESULTS, append
from thinwire.train import build

CODECS = ("int8", "int4", "int3", "int2", "tile")
_FILE = RESULTS.parent / "drift.jsonl"


def main() -> None:
    """Measure what is missing, and print all as a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, help="folder with the other texts, by name")
    parser.add_argument("--lr", type=float, nargs="+", default=[LR])
    parser.add_argument("--text", default="reference")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--embedding-std", type=float, default=Case.embedding_std)
    options = parser.parse_args()
    done = [json.loads(line) for line in _FILE.open()] if _FILE.exists() else []
    for lr in options.lr:
        case = Case(options.text, epochs=options.epochs, lr=lr, embedding_std=options.embedding_std)
        if all(Case(**result["case"]) != case for result in done):
            watch = Watch()
            with watch.first_stage():
                result = measure(case, options.texts) | {"epochs": watch.epochs()}
            append(json.dumps(result), _FILE)
            done.append(result)
    columns = ("text", "learning rate", "embeddings", "epoch", "change", *CODECS)
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for result in done:
        case = Case(**result["case"])
        for epoch in result["epochs"]:
            cells = [case.text, f"{case.lr:g}", f"{case.embedding_std:g}", str(epoch["epoch"])]
            cells.append(f"{epoch['change_db']:.1f}" if "change_db" in epoch else "–")
            for name in CODECS:
                ratios = [epoch[kind][name] for kind in ("direct_db", "delta_db") if kind in epoch]
                cells.append(" / ".join(f"{ratio:.1f}" for ratio in ratios))
            print("| " + " | ".join(cells) + " |")


class Watch:
    """Energies of values, changes and errors, summed over each epoch."""

    def __init__(self) -> None:
        self.last: dict[bytes, Tensor] = {}  # by the sample's tokens
        self.visits: collections.Counter[bytes] = collections.Counter()
        self.sums: dict[int, dict[str, float]] = {}

    @contextlib.contextmanager
    def first_stage(self) -> Iterator[None]:
        """Within, the first stage of every run is watched while it trains."""
        build_stages = build.build_stages

        def build_and_watch(*arguments: Any) -> Any:
            stages = build_stages(*arguments)
            stages[0].register_forward_hook(self._see)
            return stages

        with mock.patch.object(build, "build_stages", build_and_watch):
            yield

    def _see(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return  # evaluation
        for tokens, x in zip(inputs[0], output.detach(), strict=True):
            key = tokens.numpy().tobytes()
            self.visits[key] += 1
            sums = self.sums.setdefault(self.visits[key], collections.defaultdict(float))
            sums["value"] += energy(x)
            self._errors(sums, "direct", x)
            if key in self.last:
                change = x - self.last[key]
                sums["change"] += energy(change)
                self._errors(sums, "delta", change)
            self.last[key] = x.clone()

    def _errors(self, sums: dict[str, float], kind: str, x: Tensor) -> None:
        for name in CODECS:
            codec = tw.codec(name)
            payload = codec.encode(x, rows=1)
            sums[f"{kind} {name}"] += energy(codec.decode(payload, x.shape, x.dtype, rows=1) - x)

    def epochs(self) -> list[dict[str, Any]]:
        """For each epoch: energies in dB relative to that of the values."""
        found = []
        for epoch, sums in sorted(self.sums.items()):
            relative = {name: 10 * math.log10(e / sums["value"]) for name, e in sums.items()}
            row: dict[str, Any] = {"epoch": epoch}
            row["direct_db"] = {n: round(relative[f"direct {n}"], 2) for n in CODECS}
            if "change" in sums:
                row["change_db"] = round(relative["change"], 2)
                row["delta_db"] = {n: round(relative[f"delta {n}"], 2) for n in CODECS}
            found.append(row)
        return found


def energy(x: Tensor) -> float:
    """The sum of squares."""
    return float(x.double().square().sum())


if __name__ == "__main__":
    main()
