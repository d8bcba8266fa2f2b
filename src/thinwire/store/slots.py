"""Rows of bytes on disk, in slots that a checkpoint pins.

A file for each size of slot. A slot that a checkpoint still names is never written again: its row
goes elsewhere, and the slot is free once the checkpoint is released. So a checkpoint is a list of
slots, and costs what has changed since the last one.

Rows of many lengths need slots of many sizes. Where the files may not grow any further, free slots
at the end of another file are given up, then larger slots are taken.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Slot(NamedTuple):
    """Where a row lies: the slot's size in bytes, which tells the file, and its number there."""

    size: int
    number: int


def slot_size(nbytes: int) -> int:
    """The size of a slot for a row: at most an eighth larger, so that sizes stay few."""
    step = 1 << max(nbytes.bit_length() - 4, 4)
    return max(-(-nbytes // step) * step, step)


@dataclasses.dataclass
class _File:
    """The slots of one size: which are in use, and by how many checkpoints each is pinned."""

    descriptor: int
    live: np.ndarray[tuple[int], np.dtype[np.bool_]]
    pins: np.ndarray[tuple[int], np.dtype[np.uint32]]
    free: list[int]

    def grow(self, count: int) -> None:
        """Make room for so many slots in all."""
        more = count - len(self.live)
        if more > 0:
            self.free.extend(range(count - 1, len(self.live) - 1, -1))
            self.live = np.append(self.live, np.zeros(more, dtype=np.bool_))
            self.pins = np.append(self.pins, np.zeros(more, dtype=np.uint32))


class SlotFiles:
    """Slots in ``folder``; ``name`` begins the names of their files.

    ``limit``: bytes of all files, None without bound. Only ``write`` and ``read`` touch the content
    of slots in use, and may be called by another thread.
    """

    def __init__(self, folder: Path, name: str, limit: int | None = None) -> None:
        self._folder, self._name, self._limit = folder, name, limit
        self._files: dict[int, _File] = {}
        self._found = False
        self._shrinking = threading.Lock()

    def _path(self, size: int) -> Path:
        return self._folder / f"{self._name}-{size}.rows"

    def extent(self, size: int) -> int:
        """Bytes that are on disk in slots of ``size``."""
        path = self._path(size)
        return path.stat().st_size if path.is_file() else 0

    def _file(self, size: int) -> _File:
        if size not in self._files:
            path = self._path(size)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            nothing = np.zeros(0, dtype=np.bool_), np.zeros(0, dtype=np.uint32)
            self._files[size] = _File(descriptor, *nothing, [])
        return self._files[size]

    def _find(self) -> None:
        """Take the files that are there already into account, before the first slot is given: they
        may be of rows of other sizes, which nobody names any more."""
        if self._found:
            return
        self._found = True
        for path in self._folder.glob(f"{self._name}-*.rows"):
            size = path.name.removeprefix(f"{self._name}-").removesuffix(".rows")
            if size.isdecimal() and slot_size(int(size)) == int(size):
                self._file(int(size)).grow(-(-path.stat().st_size // int(size)))

    @property
    def nbytes(self) -> int:
        """Bytes of all files, as long as they have grown."""
        return sum(size * len(file.live) for size, file in self._files.items())

    def place(self, nbytes: int, before: Slot | None) -> Slot | None:
        """Where a row of ``nbytes`` may be written that was in ``before``: there, if it fits and
        no checkpoint needs it. None where there is no room."""
        self._find()
        size = slot_size(nbytes)
        if before is not None:
            if before.size >= size and not self._files[before.size].pins[before.number]:
                return before
            self.free(before)
        if not self._file(size).free and not self._grow(size):
            size = min((s for s, file in self._files.items() if s > size and file.free), default=0)
            if not size:
                return None
        file = self._files[size]
        number = file.free.pop()
        file.live[number] = True
        return Slot(size, number)

    def _grow(self, size: int) -> bool:
        """Make free slots of ``size``, if the limit allows for one."""
        count = len(self._files[size].live)
        wanted = max(64, count // 8)
        if self._limit is not None:
            if self.nbytes + size > self._limit:
                self._shrink(size)
            wanted = min(wanted, (self._limit - self.nbytes) // size)
        if wanted > 0:
            self._files[size].grow(count + wanted)
        return wanted > 0

    def _shrink(self, but: int) -> None:
        """Give up the free slots at the end of all files but that of the size ``but``."""
        for size, file in self._files.items():
            taken = np.flatnonzero(file.live | (file.pins > 0))
            count = int(taken[-1]) + 1 if len(taken) else 0
            if size != but and count < len(file.live):
                with self._shrinking:
                    file.live, file.pins = file.live[:count], file.pins[:count]
                    file.free = [number for number in file.free if number < count]
                    os.ftruncate(file.descriptor, count * size)

    def free(self, slot: Slot) -> None:
        """The row in ``slot`` is no longer needed, but by checkpoints."""
        file = self._files[slot.size]
        file.live[slot.number] = False
        if not file.pins[slot.number]:
            file.free.append(slot.number)

    def pin(self, slots: Iterable[Slot]) -> None:
        """A checkpoint names ``slots``."""
        for slot in slots:
            file = self._file(slot.size)
            file.pins[slot.number] += 1

    def unpin(self, slots: Iterable[Slot]) -> None:
        """The checkpoint that named ``slots`` is gone."""
        for slot in slots:
            file = self._files[slot.size]
            file.pins[slot.number] -= 1
            if not file.pins[slot.number] and not file.live[slot.number]:
                file.free.append(slot.number)

    def adopt(self, slots: Sequence[Slot], live: bool) -> None:
        """Pin the slots of a checkpoint that was found; ``live``: they are the present rows too."""
        self._find()
        for size in sorted({slot.size for slot in slots}):
            file = self._file(size)
            numbers = np.array([slot.number for slot in slots if slot.size == size])
            file.grow(int(numbers.max()) + 1)
            file.pins[numbers] += 1
            if live:
                file.live[numbers] = True
            taken = set(numbers.tolist())
            file.free = [number for number in file.free if number not in taken]

    def write(self, slot: Slot, row: memoryview) -> None:
        """Write ``row``; raises OSError. A slot that has been given up since is left out, or the
        file would grow again."""
        file = self._files[slot.size]
        with self._shrinking:
            if slot.number >= len(file.live):
                return
            try:
                done = os.pwrite(file.descriptor, row, slot.number * slot.size)
            except OSError as error:
                where = self._path(slot.size)
                text = f"can't write references to {where}: {error.strerror}"
                raise OSError(error.errno, text) from None
        if done != row.nbytes:
            raise OSError(f"only {done} bytes of a reference could be written")

    def read(self, slot: Slot, row: memoryview) -> bool:
        """Read into ``row``; whether all of it was there. Raises OSError."""
        return os.preadv(self._files[slot.size].descriptor, [row], slot.number * slot.size) == len(
            row
        )

    def sync(self) -> None:
        """What was written is on the disk."""
        for file in self._files.values():
            os.fsync(file.descriptor)
        folder = os.open(self._folder, os.O_RDONLY)  # the names of new files
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()
