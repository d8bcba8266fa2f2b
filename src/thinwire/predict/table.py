"""A vector for each of a number of ids: the mean of what was seen with it, more of late.

Both ends of a link learn it from what both have decoded, in whole numbers: sums of those do not
depend on their order, so nothing has to be sent and the two are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.predict.exact import exponents_for, power_of_two

#: Values are counted in units of which the largest of the first step has up to 2^13.
_UNITS = 13
_FEWEST, _MOST_UNITS = 1 << 9, 1 << 15  # of the largest of a step, else the unit changes
_CLAMP = 1 << 17
#: What was seen counts as at most so many visits: later ones outweigh it.
_MEMORY = 1 << 10
_SHRINK = 1  # as if zero had been seen so often too


class Table:
    """``size`` vectors of ``width`` values, at first zero."""

    def __init__(self, size: int, width: int, device: torch.device | str = "cpu") -> None:
        self.size, self.width = size, width
        self._sums = torch.zeros((size, width), dtype=torch.int32, device=device)
        self._counts = torch.zeros(size, dtype=torch.int32, device=device)
        self._unit: int | None = None  # its exponent
        #: float32 [size, width]
        self.values = torch.zeros((size, width), device=device)

    def __call__(self, ids: Tensor) -> Tensor:
        """The vectors of ``ids`` [n] int64, float32 [n, width]."""
        return self.values[ids]

    def learn(self, ids: Tensor, x: Tensor) -> None:
        """Take in vectors ``x`` [n, width] float32, finite, which were seen with ``ids`` [n]."""
        if not len(ids):
            return
        self._settle_unit(x)
        assert self._unit is not None
        units = (
            x * power_of_two(torch.tensor(-self._unit, dtype=torch.int32)).to(x.device)
        ).round_()
        units = units.clamp_(-_CLAMP, _CLAMP).to(torch.int32)
        seen, places = torch.unique(ids, return_inverse=True)
        sums = self._sums[seen].to(torch.int64)
        sums.index_add_(0, places, units.to(torch.int64))
        counts = self._counts[seen] + torch.bincount(places, minlength=len(seen)).to(torch.int32)
        kept = counts.clamp(max=_MEMORY)
        sums = torch.where(
            (counts > _MEMORY)[:, None],
            torch.div(sums * kept[:, None], counts[:, None], rounding_mode="trunc"),
            sums,
        )
        self._sums[seen], self._counts[seen] = sums.to(torch.int32), kept
        self._refresh(seen)

    def grow(self, size: int) -> None:
        """Have room for more ids, which nothing was seen with."""
        more = size - self.size
        self._sums = torch.cat([self._sums, self._sums.new_zeros(more, self.width)])
        self._counts = torch.cat([self._counts, self._counts.new_zeros(more)])
        self.values = torch.cat([self.values, self.values.new_zeros(more, self.width)])
        self.size = size

    def _settle_unit(self, x: Tensor) -> None:
        """Choose the unit, or another one where values have become much larger or smaller."""
        largest = x.abs().amax().cpu()
        fitting = int(exponents_for(largest, _UNITS))
        if self._unit is None:
            self._unit = fitting
        units = float(largest) * 2.0**-self._unit
        if not _FEWEST <= units <= _MOST_UNITS and float(largest) > 0:
            shift = fitting - self._unit
            self._sums = self._sums >> shift if shift > 0 else _widened(self._sums, -shift)
            self._unit = fitting
            self._refresh(torch.arange(self.size, device=self._sums.device))

    def _refresh(self, ids: Tensor) -> None:
        """Divide anew: a division of float64, which is rounded alike everywhere."""
        assert self._unit is not None
        mean = self._sums[ids].double() / (self._counts[ids].double() + _SHRINK)[:, None]
        self.values[ids] = (mean * 2.0**self._unit).to(torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` restores."""
        unit = torch.tensor(0 if self._unit is None else 1 + self._unit + 1000, dtype=torch.int64)
        return {"sums": self._sums, "counts": self._counts, "unit": unit}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where it is another table's."""
        if state["sums"].shape != self._sums.shape or state["counts"].shape != self._counts.shape:
            raise ValueError("the saved table has another size")
        self._sums, self._counts = state["sums"].clone(), state["counts"].clone()
        unit = int(state["unit"])
        self._unit = unit - 1001 if unit else None
        self.values.zero_()
        if self._unit is not None:
            self._refresh(torch.arange(self.size, device=self._sums.device))


def _widened(sums: Tensor, shift: int) -> Tensor:
    """``sums`` in a unit 2^shift times as small, within int32."""
    most = (1 << 30) >> min(shift, 30)
    return sums.clamp(-most, most) << min(shift, 30)
