"""Positions far beyond the others, as attention sinks are: they wreck every mean."""

from __future__ import annotations

import math

from torch import Tensor

_FAR, _ORDINARY = 8.0, 0.95  # times the magnitude that this share of the positions stays below


def ordinary_of(count: int) -> int:
    """The so manieth smallest of ``count`` magnitudes is that of an ordinary position."""
    return max(1, math.ceil(_ORDINARY * count))


def is_far(largest: Tensor) -> Tensor | None:
    """Which of vectors with these greatest magnitudes [n] are far beyond the others, bool [n];
    None: none."""
    if not len(largest):
        return None
    ordinary = largest.kthvalue(ordinary_of(len(largest))).values
    far = largest > _FAR * ordinary
    return far if bool(far.any()) else None
