"""What a run is made of: the scheme that suits it, and what is said of that."""

from __future__ import annotations

import pytest

from thinwire.train import batches, check, data, report
from thinwire.train.arguments import read_arguments
from thinwire.train.build import planned
from thinwire.train.config import Config
from thinwire.train.data import Samples
from thinwire.train.model import Gpt

TEXT = data.Text(bytes(128 * 16 * 4), bytes(1024), "0" * 64, "a text")  # 4 steps an epoch
TILE = "predicted(tile,by=token+previous)"
HALF = "--train.frozen=2"


def config(*words: str) -> Config:
    return check.resolved(read_arguments(words))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "forward delta(int4), since 3 epochs are planned"),
        (
            ("--train.epochs=1",),
            f"forward {TILE}, since 1 epoch is planned",
        ),
        (("--steps=6",), f"forward {TILE}, since 1.5 epochs are planned"),
        (
            (HALF, "--train.epochs=2"),
            "forward delta(int4), since 2 epochs are planned and frozen stages can rest",
        ),
        (
            (HALF, "--steps=7"),
            f"forward {TILE}, since 1.75 epochs are planned",
        ),
        (
            (HALF, "--steps=8", "--skip-frozen=false"),
            f"forward {TILE}, since 2 epochs are planned",
        ),
        (
            (HALF, "--steps=8", "--model.dropout=0.1"),
            f"forward {TILE}, since 2 epochs are planned",
        ),
        # no stage is frozen as a whole
        (
            ("--train.frozen=1", "--steps=8"),
            f"forward {TILE}, since 2 epochs are planned",
        ),
    ],
)
def test_the_default_scheme_is_told_with_the_reason(words: tuple[str, ...], line: str) -> None:
    told: list[str] = []
    made = planned(config(*words), TEXT, told.append)
    assert told == [line]
    assert line.startswith(f"forward {made.plan.forward}, ")


def test_nothing_is_told_of_a_scheme_that_was_given() -> None:
    told: list[str] = []
    given = config("--forward=int4")
    assert planned(given, TEXT, told.append) == given
    assert not told


def opening(*words: str, steps: int = 8) -> str:
    made = config(*words)
    samples = batches.Split(Samples(bytes(128 * 64 + 1), 128), Samples(bytes(128 * 8 + 1), 128))
    return report.opening(made, TEXT, samples, Gpt(made), steps)


def test_frozen_stages_that_cannot_rest_are_told() -> None:
    note = "note: no frozen stage can rest: tile remembers no samples"
    assert note in opening(HALF, "--forward=tile")
    assert note not in opening(HALF, "--forward=tile", steps=4)  # nothing recurs
    assert note not in opening("--train.frozen=1", "--forward=tile")
    assert note not in opening(HALF, "--forward=delta(int4)")


def test_one_of_a_kind_is_not_told_as_several() -> None:
    shown = opening("--link.transport=memory", "--pipeline.stages=1", "--link.rate=None", steps=1)
    assert "in 1 stage on 1 process; Interleaved1F1B, 8 micro-batches" in shown
    assert "links: memory, not emulated" in shown
    assert "training: 1 step of 16 samples" in shown
