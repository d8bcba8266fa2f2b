"""What the micro-batches of a step have shown: ids, and values in one tensor, step after step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Lessons:
    """Positions in the order in which they came, with ``count`` ids each."""

    def __init__(self, count: int) -> None:
        self._ids: list[list[Tensor]] = [[] for _ in range(count)]
        self._room = torch.empty(0, 0)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def clear(self) -> None:
        """Hold nothing."""
        for ids in self._ids:
            ids.clear()
        self._used = 0

    def add(self, ids: Sequence[Tensor], y: Tensor, base: Tensor | None, factor: float) -> Tensor:
        """Positions of ``ids`` [n] each have shown y - base, times ``factor``, float32 [n, width];
        returns that, which is good until the next call."""
        for known, each in zip(self._ids, ids, strict=True):
            known.append(each)
        n, width = y.shape
        if self._room.shape[1] != width or self._room.device != y.device:
            if self._used:
                raise ValueError(f"values of {self._room.shape[1]} and of {width} in one step")
            self._room = y.new_empty((0, width))
        if self._used + n > len(self._room):
            more = y.new_empty(max(2 * len(self._room), self._used + n), width)
            more[: self._used] = self._room[: self._used]
            self._room = more
        there = self._room[self._used : self._used + n]
        self._used += n
        if base is None:
            there.copy_(y)
        else:
            torch.sub(y, base, out=there)
        return there if factor == 1.0 else there.mul_(factor)

    @property
    def ids(self) -> list[Tensor]:
        """Of all positions."""
        return [torch.cat(ids) for ids in self._ids]

    @property
    def values(self) -> Tensor:
        """Of all positions, float32 [n, width]; its own, to be changed at will before the next
        step."""
        return self._room[: self._used]
