"""What the micro-batches of a step have shown: ids, and values, in the same memory each step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Lessons:
    """Positions of one width, with ``count`` ids each."""

    def __init__(self, count: int) -> None:
        self._ids: list[list[Tensor]] = [[] for _ in range(count)]
        self._parts: list[tuple[tuple[int, int], int, int]] = []  # place, first, behind the last
        self._room = torch.empty(0, 0)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def clear(self) -> None:
        """Hold nothing."""
        for ids in self._ids:
            ids.clear()
        self._parts.clear()
        self._used = 0

    def room(self, n: int, width: int, device: torch.device) -> Tensor:
        """Where the values of the next ``n`` positions go, float32 [n, width]."""
        first, end = self._used, self._used + n
        room = self._room
        if end > len(room) or room.shape[1] != width or room.device != device:
            more = torch.empty((max(2 * len(room), end), width), device=device)
            if first:
                more[:first] = room[:first]
            self._room = more
        return self._room[first:end]

    def add(self, place: tuple[int, int], ids: Sequence[Tensor], n: int) -> None:
        """``n`` positions, of ``ids`` [n] each, have shown what is in the ``room`` that was asked
        for last, at this ``place`` of the step."""
        for known, each in zip(self._ids, ids, strict=True):
            known.append(each)
        first, self._used = self._used, self._used + n
        self._parts.append((place, first, self._used))

    def all(self) -> tuple[list[Tensor], Tensor]:
        """The ids of all positions, and their values float32 [n, width], in order of their places,
        whatever the order in which they came. Its own, to be changed at will."""
        ids, values = [torch.cat(each) for each in self._ids], self._room[: self._used]
        parts = sorted(self._parts)
        if parts == self._parts:
            return ids, values
        order = torch.cat([torch.arange(first, end) for _, first, end in parts]).to(values.device)
        return [each[order] for each in ids], values[order]
