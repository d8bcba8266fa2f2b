"""The runs of the experiment, and the order in which they are worth having.

A case is one run. What two cases share besides the plan is identical in both: initial weights,
order of the samples, dropout. Cases that differ in their plan alone are therefore compared seed by
seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

LR = 1e-3  # the default of thinwire train
OTHER_LRS = (5e-4, 3e-3)
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
#: First visits in fewer bits than 8. delta(int3,first=int6) sends in three epochs what delta(int2)
#: does, delta(int4,first=int4) what int4 does.
NARROW_FIRST = tuple(
    (f"delta({change},first={first})", "int4")
    for first, changes in {
        "int6": ("int3", "int4", "int2"),
        "int4": ("int4", "int3", "int2"),
        "int5": ("int3",),
    }.items()
    for change in changes
)
#: Second visits in more bits than later ones.
WIDE_SECOND = (("delta(int2,second=int4)", "int4"), ("delta(int2,first=int6,second=int4)", "int4"))
#: Why four stages lose more: one direction at a time.
APART = (("delta(int4)", "int4"), ("delta(int2)", "int8"), ("raw", "int4"))
#: Gradients of 4 bits that keep, on average, what a block adds to them.
UNBIASED = "int4:round=stochastic"
KEPT = (("delta(int4)", UNBIASED), ("delta(int2)", UNBIASED))
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
    """The claim, all widths at one seed, elsewhere, ablations; then more seeds of all that."""
    claim = Case()
    for seed in SEEDS:
        yield from _plans(claim, MAIN[:2], seed)
    yield from _plans(claim, ALL, seed=0)
    for seed in SEEDS:  # what decides the width of gradients
        yield from _with(dataclasses.replace(claim, seed=seed), delta(DIRECT["4/4"]))
    deep = dataclasses.replace(claim, stages=4)
    yield deep  # fp32 there gives the same bits: once
    yield from _with(claim, *NARROW_FIRST[:2])
    yield from _with(deep, delta(DIRECT["2/4"]), DIRECT["2/4"], delta(DIRECT["4/8"]), DIRECT["4/8"])
    other = dataclasses.replace(claim, text="persuasion")
    yield from _with(other, FP32, delta(DIRECT["4/8"]), DIRECT["4/8"])
    for seed in SEEDS:  # whether gradients of 4 bits can be the default
        for case in (deep, claim):
            yield from _with(dataclasses.replace(case, seed=seed), KEPT[0])
    for seed in SEEDS:
        yield from _with(dataclasses.replace(deep, seed=seed), delta(DIRECT["4/8"]), DIRECT["4/8"])
    for seed in SEEDS:  # small widths, better at equal bytes
        yield from _with(dataclasses.replace(claim, seed=seed), *reversed(WIDE_SECOND))
    yield from _with(deep, (WIDE_SECOND[1][0], UNBIASED))
    yield from _with(claim, KEPT[1])
    yield from _with(deep, KEPT[1], delta(DIRECT["3/6"]))
    yield from _with(other, delta(DIRECT["2/4"]), DIRECT["2/4"])
    longer = dataclasses.replace(claim, epochs=6)
    yield from _with(longer, FP32, delta(DIRECT["4/8"]), DIRECT["4/8"])
    yield from _with(longer, WIDE_SECOND[1], delta(DIRECT["2/4"]))
    yield from _ablations(claim)
    yield from _with(longer, DIRECT["2/4"], KEPT[0])
    yield from _with(deep, *WIDE_SECOND[:1], *APART)
    yield from _with(claim, *NARROW_FIRST, *WIDE_SECOND)
    for elsewhere in _elsewhere(claim):
        yield from (case for case in _plans(elsewhere, MAIN[:2], seed=0) if not case.ulp)
    yield from _ablations(claim)
    for seed in SEEDS:
        yield from _with(dataclasses.replace(claim, seed=seed), *NARROW_FIRST, *WIDE_SECOND)
    for seed in SEEDS:
        yield from _plans(claim, ALL, seed)
    yield from _learning_rates(claim)
    for widths in (MAIN[:2], MAIN, ALL):
        for seed in SEEDS:
            for elsewhere in _elsewhere(claim):
                yield from _plans(elsewhere, widths, seed)
    for text in TEXTS:
        for stages, epochs in ((4, 6), (4, 3), (2, 6)):
            for seed in SEEDS:
                combined = dataclasses.replace(claim, text=text, stages=stages, epochs=epochs)
                yield from _plans(combined, ALL, seed)


def _learning_rates(claim: Case) -> Iterator[Case]:
    """How the effects grow with the learning rate, and where from: one seed."""
    wide, narrow, tile = DIRECT["4/8"], DIRECT["2/4"], DIRECT["tile/6"]
    for lr in OTHER_LRS:
        case = dataclasses.replace(claim, lr=lr)
        yield from _with(case, FP32)
        yield dataclasses.replace(case, ulp=True)
        yield from _with(case, delta(wide), wide, delta(narrow), narrow)
    slow, fast = (dataclasses.replace(claim, lr=lr) for lr in OTHER_LRS)
    loud = dataclasses.replace(slow, embedding_std=1.0)
    yield from _with(loud, FP32, wide, delta(wide), narrow, delta(narrow))
    yield from _with(fast, ("int4", "raw"), ("raw", "int4"), ("int8", "int8"), ("raw", "int8"))
    yield from _with(fast, tile, delta(tile))


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
    """One seed each: first visits, references, groups, rounding, up to eight stages, one direction
    alone, and widths at which direct coding sends what delta sends in three epochs."""
    wide, narrow = DIRECT["4/8"], DIRECT["2/4"]
    for first in ("raw", "bf16", "int4"):
        yield from _with(claim, delta(narrow, f",first={first}"))
    for ref in ("fp32", "bf16", "int4"):
        yield from _with(claim, delta(narrow, f",ref={ref}"))
    for option in ("group=row", "group=32", "round=stochastic"):
        optioned = (f"{narrow[0]}:{option}", f"{narrow[1]}:{option}")
        yield from _with(claim, delta(optioned))
    deep = dataclasses.replace(claim, layers=8)
    yield from _with(deep, FP32)
    for stages in (8, 4, 2):
        yield from _with(dataclasses.replace(deep, stages=stages), delta(wide))
    for option in ("group=row", "group=32", "round=stochastic"):
        yield from _with(claim, (f"{narrow[0]}:{option}", f"{narrow[1]}:{option}"))
    yield from _with(claim, ("raw", "int4"), ("raw", "int8"), ("int2", "raw"), ("int4", "raw"))
    yield from _with(claim, ("int5", "int8"), ("int6", "int8"), ("int3", "int4"))
    for first in ("raw", "int4"):
        yield from _with(claim, delta(wide, f",first={first}"))
    for ref in ("fp32", "int4"):
        yield from _with(claim, delta(wide, f",ref={ref}"))


def _with(case: Case, *plans: tuple[str, str]) -> Iterator[Case]:
    """``case`` under each plan."""
    for forward, backward in plans:
        yield dataclasses.replace(case, forward=forward, backward=backward)
