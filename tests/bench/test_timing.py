"""How often operations run, on a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from thinwire.bench.timing import Task, Timing, measure


class Clock:
    """Stands still but for what operations take."""

    def __init__(self) -> None:
        self.ns = 0

    def now(self) -> int:
        return self.ns

    def task(self, *ns: int, often: int = 1) -> Task:
        """Takes the given times in turn, the last one from then on."""
        left = list(ns)

        def run() -> None:
            self.ns += left.pop(0) if len(left) > 1 else left[0]

        return Task(run, often)


def run(clock: Clock, rounds: int, **tasks: Task) -> dict[str, Timing]:
    return measure(tasks, rounds, clock.now, lambda line, stage: None)


def test_each_operation_runs_once_a_round_and_a_copy_more_often() -> None:
    clock = Clock()
    found = run(clock, 7, copy=clock.task(2_000_000, often=4), fast=clock.task(1_000_000))
    assert (found["copy"].ms, found["copy"].samples) == (2.0, 28)
    assert (found["fast"].ms, found["fast"].samples) == (1.0, 7)


@pytest.mark.parametrize(("seconds", "samples"), [(100, 3), (0.5, 6), (0.001, 20)])
def test_a_slow_operation_runs_in_fewer_rounds_and_in_three_at_least(
    seconds: float, samples: int
) -> None:
    clock = Clock()
    assert run(clock, 20, slow=clock.task(int(seconds * 1e9)))["slow"].samples == samples


def test_one_round_is_enough() -> None:
    clock = Clock()
    assert run(clock, 1, fast=clock.task(1_000_000))["fast"].samples == 1


def test_the_warm_up_does_not_count() -> None:
    clock = Clock()
    found = run(clock, 5, one=clock.task(900_000_000, 900_000_000, 1_000_000))["one"]
    assert found.ms == found.ms_high == 1.0


def test_the_median_of_an_even_number_of_samples_lies_between_them() -> None:
    clock = Clock()
    found = run(clock, 4, one=clock.task(1, 1, 1_000_000, 2_000_000, 4_000_000, 8_000_000))["one"]
    assert found.ms == 3.0
    assert found.ms_low < 3.0 < found.ms_high


def test_progress_says_where_a_stage_begins() -> None:
    clock, lines = Clock(), []
    shown: Callable[[str, bool], None] = lambda line, stage: lines.append((line, stage))  # noqa: E731
    measure({"a": clock.task(1), "b": clock.task(1)}, 2, clock.now, shown)
    assert lines == [
        ("warming up 1 of 2", True),
        ("warming up 2 of 2", False),
        ("round 1 of 2", True),
        ("round 2 of 2", True),
    ]
