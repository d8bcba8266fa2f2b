"""Differences between plans, seed by seed, and their standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """Mean and standard error of some values, or of paired differences; one value has no error."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def error(self) -> float | None:
        """Standard deviation over the root of the number; None for one value."""
        if len(self.values) < 2:
            return None
        return statistics.stdev(self.values) / math.sqrt(len(self.values))

    @property
    def beyond(self) -> bool | None:
        """Whether the mean is more than two standard errors from zero; None for one value."""
        return None if self.error is None else abs(self.mean) > 2 * self.error

    def __str__(self) -> str:
        return self.text()

    def text(self, signed: bool = True, decimals: int = 4) -> str:
        """``+0.0123 ± 0.0004``."""
        sign = "+" * (signed and self.mean >= 0)
        error = "" if self.error is None else f" ± {_digits(self.error, decimals)}"
        return f"{sign}{_digits(self.mean, decimals)}{error}"


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """``one`` less ``other``, both by seed; None where they have no seed in common."""
    seeds = sorted(set(one) & set(other))
    return Difference(tuple(one[seed] - other[seed] for seed in seeds)) if seeds else None


def _digits(value: float, decimals: int) -> str:
    """So many decimals, or where they are all zeros the power of ten."""
    is_plain = value == 0 or abs(value) >= 0.5 * 10**-decimals
    return f"{value:.{decimals}f}" if is_plain else f"{value:.0e}"
