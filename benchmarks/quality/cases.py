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
TELLING_LR = 1e-3  # where a first look found effects large, and activations settled
SEEDS = (0, 1, 2)
TEXTS = ("reference", "persuasion")  # the Python language reference, which is the default

FP32 = ("raw", "raw")
BF16 = ("bf16", "bf16")
#: What is compared: the widths of activations and of gradients, coded directly.
DIRECT = {
    "4/8": ("int4", "int8"),
    "4/4": ("int4", "int4"),
    "2/4": ("int2", "int4"),
    "3/6": ("int3", "int6"),
    "tile/6": ("tile", "int6"),
}
ALL = tuple(DIRECT)
MAIN = ("4/8", "2/4", "4/4")  # of these, for settings where all are too many


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
    embedding_std: float = 0.02  # of the initial embeddings; torch's own default is 1

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
    """Where the effects lie, then the claim, ablations, and whether the claim holds elsewhere."""
    default = Case()
    telling = dataclasses.replace(default, lr=TELLING_LR)
    yield from _first_look(default)
    for seed in SEEDS:
        yield from _plans(telling, MAIN[:2], seed)
    for seed in SEEDS:
        yield from _plans(default, MAIN, seed)
    yield from _causes(default)
    for case in (telling, default):
        for seed in SEEDS:
            yield from _plans(case, ALL, seed)
    yield dataclasses.replace(default, stages=4)  # fp32 there gives the same bits: once
    for seed in SEEDS:
        for elsewhere in _elsewhere(telling):
            yield from _plans(elsewhere, MAIN[:2], seed)
        if seed == 0:
            yield from _ablations(telling)
    for case in (telling, default):
        for widths in (MAIN, ALL):
            for seed in SEEDS:
                for elsewhere in _elsewhere(case):
                    yield from _plans(elsewhere, widths, seed)
    for text in TEXTS:
        for stages, epochs in ((4, 6), (4, 3), (2, 6)):
            for seed in SEEDS:
                combined = dataclasses.replace(default, text=text, stages=stages, epochs=epochs)
                yield from _plans(combined, ALL, seed)


def _causes(default: Case) -> Iterator[Case]:
    """Why direct coding costs little at the default, and delta much at a high learning rate."""
    wide, narrow, tile = DIRECT["4/8"], DIRECT["2/4"], DIRECT["tile/6"]
    loud = dataclasses.replace(default, embedding_std=1.0)
    yield from _with(loud, FP32, wide, delta(wide), narrow, delta(narrow))
    fast = dataclasses.replace(default, lr=3e-3)
    yield from _with(fast, ("int4", "raw"), ("raw", "int4"), ("int8", "int8"), ("raw", "int8"))
    yield from _with(fast, tile, delta(tile))


def _first_look(default: Case) -> Iterator[Case]:
    """One seed at three learning rates, the widest and the narrowest widths."""
    wide, narrow = DIRECT["4/8"], DIRECT["2/4"]
    for lr in (LR, 3e-3, TELLING_LR):
        case = dataclasses.replace(default, lr=lr)
        yield from _with(case, FP32)
        yield dataclasses.replace(case, ulp=True)
        yield from _with(case, delta(wide), wide, delta(narrow), narrow)


def _elsewhere(claim: Case) -> Iterator[Case]:
    """``claim`` with one thing changed."""
    yield dataclasses.replace(claim, stages=4)
    yield dataclasses.replace(claim, text="persuasion")
    yield dataclasses.replace(claim, epochs=6)


def _plans(case: Case, widths: tuple[str, ...], seed: int) -> Iterator[Case]:
    """fp32, chance, and each of ``widths`` with delta and without; bf16 where all widths are."""
    case = dataclasses.replace(case, seed=seed)
    base = dataclasses.replace(case, stages=2)  # fp32 gives the same bits in any number of stages
    yield base
    for name in widths:
        yield from _with(case, delta(DIRECT[name]), DIRECT[name])
    yield dataclasses.replace(base, ulp=True)
    if widths == ALL:
        yield from _with(case, BF16)


def _ablations(claim: Case) -> Iterator[Case]:
    """One seed each: first visits, references, one direction alone, widths at which direct coding
    sends what delta sends in three epochs, groups, rounding, and up to eight stages."""
    wide, narrow = DIRECT["4/8"], DIRECT["2/4"]
    for first in ("raw", "bf16", "int4"):
        yield from _with(claim, *(delta(widths, f",first={first}") for widths in (narrow, wide)))
    for ref in ("fp32", "int4", "bf16"):
        yield from _with(claim, *(delta(widths, f",ref={ref}") for widths in (narrow, wide)))
    yield from _with(claim, ("raw", "int4"), ("raw", "int8"), ("int2", "raw"), ("int4", "raw"))
    yield from _with(claim, ("int5", "int8"), ("int6", "int8"), ("int3", "int4"))
    for option in ("group=row", "group=32", "round=stochastic"):
        for widths in (wide, narrow):
            optioned = (f"{widths[0]}:{option}", f"{widths[1]}:{option}")
            yield from _with(claim, optioned, delta(optioned))
    for stages in (2, 4, 8):
        deep = dataclasses.replace(claim, layers=8, stages=stages)
        yield from _with(dataclasses.replace(deep, stages=2), FP32)
        yield from _with(deep, wide, delta(wide), narrow, delta(narrow))


def _with(case: Case, *plans: tuple[str, str]) -> Iterator[Case]:
    """``case`` under each plan."""
    for forward, backward in plans:
        yield dataclasses.replace(case, forward=forward, backward=backward)
