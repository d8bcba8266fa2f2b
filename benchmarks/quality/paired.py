"""Paired differences between plans over seeds, and their standard errors."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.quality.cases import Case
from benchmarks.quality.results import Results


@dataclass(frozen=True)
class Difference:
    """Mean and standard error of paired differences; of a single pair there is no error."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def error(self) -> float | None:
        """Standard deviation over the root of the number, None for one pair."""
        if len(self.values) < 2:
            return None
        return statistics.stdev(self.values) / math.sqrt(len(self.values))

    @property
    def beyond(self) -> bool | None:
        """Whether the mean is more than two standard errors from zero; None for one pair."""
        return None if self.error is None else abs(self.mean) > 2 * self.error

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {_digits(self.error)}"
        return f"{'+' * (self.mean >= 0)}{_digits(self.mean)}{error}"


def _digits(value: float) -> str:
    """Four decimals, or where they are all zeros the power of ten."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 5e-5 else f"{value:.0e}"


def against_fp32(results: Results, cases: Sequence[Case], loss: str) -> Difference | None:
    """``loss`` of ``cases`` less that of fp32, seed by seed; None where there is no pair.

    fp32 gives the same bits in any number of stages, so that of two serves all.
    """
    pairs = [(case, baseline(case)) for case in cases]
    return _paired(results, pairs, loss)


def between(results: Results, worse: Sequence[Case], better: Sequence[Case]) -> Difference | None:
    """``val_loss`` of ``worse`` less that of ``better``, over the seeds that both have."""
    by_seed = {case.seed: case for case in better}
    pairs = [(case, by_seed[case.seed]) for case in worse if case.seed in by_seed]
    return _paired(results, pairs, "val_loss")


def baseline(case: Case) -> Case:
    """The fp32 run that ``case`` is compared with."""
    return dataclasses.replace(case, forward="raw", backward="raw", ulp=False, stages=2)


def _paired(results: Results, pairs: list[tuple[Case, Case]], loss: str) -> Difference | None:
    values = tuple(
        results[one][loss] - results[other][loss]
        for one, other in pairs
        if loss in results.get(one, {}) and loss in results.get(other, {})
    )
    return Difference(values) if values else None
