"""The runs of the experiment, and the order in which they are worth having.

A case is one run. What two cases share besides the plan is identical in both: initial weights,
order of the samples, dropout. Cases that differ in their plan alone are therefore compared seed by
seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

LR = 5e-4  # the default of thinwire train
SEEDS = (0, 1, 2)
TEXTS = ("reference", "persuasion")  # the Python language reference, which is the default

FP32 = ("raw", "raw")
BF16 = ("bf16", "bf16")
#: What is compared: the width of activations and of gradients, coded directly.
DIRECT = {
    "4/8": ("int4", "int8"),
    "4/4": ("int4", "int4"),
    "2/4": ("int2", "int4"),
    "3/6": ("int3", "int6"),
    "tile/6": ("tile", "int6"),
}


@dataclass(frozen=True)
class Case:
    """One run; two runs of equal cases give the same losses, bit for bit, on one machine."""

    text: str = "reference"
    stages: int = 2
    epochs: int = 3
    lr: float = LR
    layers: int = 4
    seed: int = 0
    forward: str = "raw"
    backward: str = "raw"
    ulp: bool = False  # each initial weight is the next larger float: what chance alone does

    @property
    def plan(self) -> str:
        """The plan as tables name it."""
        if (self.forward, self.backward) == FP32:
            return "fp32, weights + 1 ulp" if self.ulp else "fp32"
        return (
            self.forward if self.forward == self.backward else f"{self.forward} / {self.backward}"
        )

    def settings(self) -> dict[str, str | int | float]:
        """The options of ``thinwire train``, without the path of the text."""
        return {
            "link.transport": "memory",
            "link.rate": "none",
            "threads": 1,
            "pipeline.stages": self.stages,
            "model.layers": self.layers,
            "train.epochs": self.epochs,
            "train.lr": self.lr,
            "train.seed": self.seed,
            "plan.forward": self.forward,
            "plan.backward": self.backward,
        }


def delta(widths: tuple[str, str], options: str = "") -> tuple[str, str]:
    """The plan that sends changes where ``widths`` sends values: ``delta(int4)`` for ``int4``."""
    return f"delta({widths[0]}{options})", widths[1]


def grid() -> Iterator[Case]:
    """All cases, the most telling first, each once."""
    yield from dict.fromkeys(_blocks())


def _blocks() -> Iterator[Case]:
    first = Case()
    old = ",ref=fp32"
    yield from _plans(first, [FP32, DIRECT["4/8"]])
    yield dataclasses.replace(first, ulp=True)
    yield from _plans(first, [delta(DIRECT["4/8"], old), DIRECT["4/4"], DIRECT["2/4"]])
    yield from _plans(first, [delta(DIRECT["2/4"], old), DIRECT["3/6"], BF16, DIRECT["tile/6"]])
    for lr in (3e-3, 1e-3):
        other = dataclasses.replace(first, lr=lr)
        widths = (DIRECT["4/8"], DIRECT["2/4"])
        yield from _plans(other, [FP32, widths[0], delta(widths[0], old), delta(widths[1], old)])
        yield from _plans(other, [widths[1]])
        yield dataclasses.replace(other, ulp=True)
    yield from _plans(first, [delta(DIRECT["4/4"], old), delta(DIRECT["3/6"], old)])
    for seed in SEEDS:
        yield from _stateless(dataclasses.replace(first, seed=seed))


def _stateless(case: Case) -> Iterator[Case]:
    yield from _plans(case, [FP32, *DIRECT.values(), BF16])
    yield dataclasses.replace(case, ulp=True)


def _plans(case: Case, plans: list[tuple[str, str]]) -> Iterator[Case]:
    """``case`` under each plan."""
    for forward, backward in plans:
        yield dataclasses.replace(case, forward=forward, backward=backward)
