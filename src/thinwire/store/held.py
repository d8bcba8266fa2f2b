"""What a store holds of one sample."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

from thinwire.store.slots import Slot


class Held:
    """A key's reference (1-D, not to be changed), of how many values, and its version: visits.

    ``row`` is None while it is on disk alone; ``slot`` says where there. ``clean``: the slot has
    this very row. ``writing``: a thread is about to write it. ``resident``: it stays in RAM.
    ``hash`` is that of the row's bytes, None where it has not been asked for.
    """

    __slots__ = ("clean", "hash", "key", "resident", "row", "slot", "values", "version", "writing")

    def __init__(self, key: int, row: Tensor | None, values: int, version: int) -> None:
        self.key, self.row, self.values, self.version = key, row, values, version
        self.hash: int | None = None
        self.slot: Slot | None = None
        self.clean = self.writing = self.resident = False

    def renew(self, row: Tensor) -> bool:
        """``row`` is the reference from now on. Whether the old one is free to be written over."""
        free = not self.writing
        self.row, self.hash = row, None
        self.clean = self.writing = False
        self.version += 1
        return free

    @property
    def content_hash(self) -> int:
        """64 bits of the row's bytes, which must be in RAM unless it was hashed before."""
        if self.hash is None:
            assert self.row is not None
            self.hash = xxhash.xxh3_64_intdigest(bytes_of(self.row))
        return self.hash


_WRAP = 1 << 64


def signed(hash_: int) -> int:
    """A 64-bit hash as the signed number that an int64 tensor holds."""
    return hash_ - _WRAP * (hash_ >> 63)


def unsigned(number: int) -> int:
    """The hash of which ``signed`` made ``number``."""
    return number % _WRAP


def bytes_of(row: Tensor) -> memoryview:
    """A reference's bytes; a view where it lies in host memory."""
    return row.cpu().view(torch.uint8).numpy().data
