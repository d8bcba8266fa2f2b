"""A vector for each of a number of ids: the mean of what was seen with it, more of late.

Both ends of a link learn it from what both have decoded, in whole numbers: sums of those do not
depend on their order, so nothing has to be sent and the two are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.native.expect import MEMORY, exponent_for, means
from thinwire.predict.ops import ops

#: Values are counted in units of which the largest of the first step has up to 2^13.
_UNITS = 13
_FEWEST, _MOST_UNITS = 1 << 9, 1 << 15  # of the largest of a step, else the unit changes
#: So many vectors at once, that sums of them stay within 32 bits.
_AT_ONCE = 1 << 13
#: Of a table that was saved: those of several add up to less than the largest float32.
_LARGEST = 2.0**120
#: Ids beyond share the vectors of those below; a power of two.
MOST_IDS = 1 << 17


class Table:
    """``size`` vectors of ``width`` values, at first zero."""

    def __init__(self, size: int, width: int, device: torch.device | str = "cpu") -> None:
        self.size, self.width = size, width
        self._sums = torch.zeros((size, width), dtype=torch.int32, device=device)
        self._counts = torch.zeros(size, dtype=torch.int32, device=device)
        self._unit: int | None = None  # its exponent
        #: float32 [size, width]
        self.values = torch.zeros((size, width), device=device)

    def learn(self, ids: Tensor, x: Tensor, largest: Tensor, rest: bool = False) -> Tensor | None:
        """Take in vectors ``x`` [n, width] float32, finite and contiguous, which were seen with
        ``ids`` [n] and whose greatest magnitudes are ``largest`` [n]. With ``rest``, ``x`` becomes
        what the table had left of them, and the greatest magnitudes of that are returned."""
        if not len(ids):
            return largest
        unit = self._settled_unit(largest.amax())
        found = []
        for each, some in zip(ids.split(_AT_ONCE), x.split(_AT_ONCE), strict=True):
            state = self._sums, self._counts, self.values
            most = ops(x).learn(*state, each, some, unit, rest)
            if most is not None:
                found.append(most)
        return torch.cat(found) if found else None

    def grow(self, size: int) -> None:
        """Have room for more ids, which nothing was seen with."""
        more = size - self.size
        self._sums = torch.cat([self._sums, self._sums.new_zeros(more, self.width)])
        self._counts = torch.cat([self._counts, self._counts.new_zeros(more)])
        self.values = torch.cat([self.values, self.values.new_zeros(more, self.width)])
        self.size = size

    def _settled_unit(self, largest: Tensor) -> int:
        """The unit, or another one where values have become much larger or smaller."""
        most = float(largest)
        fitting = exponent_for(most, _UNITS)
        if self._unit is None:
            self._unit = fitting
        units = most * 2.0**-self._unit
        if not _FEWEST <= units <= _MOST_UNITS and most > 0:
            shift = fitting - self._unit
            self._sums = self._sums >> shift if shift > 0 else _widened(self._sums, -shift)
            self._unit = fitting
            self._refresh()
        return self._unit

    def _refresh(self) -> None:
        assert self._unit is not None
        everyone = torch.arange(self.size, device=self._sums.device)
        means(self._sums, self._counts, self.values, everyone, self._unit)

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` restores."""
        unit = torch.tensor([] if self._unit is None else [self._unit], dtype=torch.int64)
        return {"sums": self._sums, "counts": self._counts, "unit": unit}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where it is another table's."""
        if state["sums"].shape != self._sums.shape or state["counts"].shape != self._counts.shape:
            raise ValueError("the saved table has another size")
        sums, counts, units = state["sums"], state["counts"], state["unit"].tolist()
        whole = sums.dtype == counts.dtype == torch.int32 and state["unit"].dtype == torch.int64
        if not whole or len(units) > 1 or not all(-100 <= unit <= 100 for unit in units):
            raise ValueError("the saved table is none")
        counted = bool(((counts >= 0) & (counts <= MEMORY)).all())
        if not sums.numel() or not counted or len(sums) > MOST_IDS:
            raise ValueError("the saved table holds what none learns")
        self._sums, self._counts = sums.clone(), counts.clone()
        self._unit = units[0] if units else None
        self.values.zero_()
        if self._unit is not None:
            self._refresh()
        if not bool((self.values.abs() <= _LARGEST).all()):
            raise ValueError("the saved table expects what no values are")


def _widened(sums: Tensor, shift: int) -> Tensor:
    """``sums`` in a unit 2^shift times as small, within int32."""
    most = (1 << 30) >> min(shift, 30)
    return sums.clamp(-most, most) << min(shift, 30)
