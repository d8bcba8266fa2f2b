"""References in RAM: one float32 row a key, with the number of visits that made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor


class Held:
    """A key's reference (1-D float32), not to be changed, and its version: visits so far."""

    __slots__ = ("row", "version")

    def __init__(self, row: Tensor, version: int) -> None:
        self.row, self.version = row, version

    def renew(self, row: Tensor) -> None:
        """``row`` is the reference from now on."""
        self.row = row
        self.version += 1


class MemoryStore:
    """Key (int) to reference and version."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self._lengths: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def lengths(self) -> Mapping[int, int]:
        """Values in each key's reference."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all references."""
        return sum(held.row.nbytes for held in self._held.values())

    def versions(self, keys: Sequence[int]) -> list[int]:
        """Visits of each key so far; 0 for one never seen."""
        return [held.version if (held := self._held.get(key)) else 0 for key in keys]

    def held(self, keys: Sequence[int]) -> list[Held]:
        """What is held of each key: the store's own, good until the key is dropped."""
        return [self._held[key] for key in keys]

    def rows(self, keys: Sequence[int]) -> list[Tensor]:
        """The references of ``keys`` themselves: not to be changed, and good until replaced."""
        return [self._held[key].row for key in keys]

    def read(self, keys: Sequence[int]) -> Tensor:
        """A copy of the references of ``keys`` (of one length), [keys, length]."""
        return torch.stack(self.rows(keys))

    def put(self, keys: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """Make ``rows``, which the store takes over, the references of ``keys``; versions advance.

        Returns the tensors that they replace, now the caller's.
        """
        displaced = []
        for key, row in zip(keys, rows, strict=True):
            held = self._held.get(key)
            if held is None:
                self._held[key] = Held(row, 1)
            else:
                displaced.append(held.row)
                held.renew(row)
            self._lengths[key] = row.numel()
        return displaced

    def write(self, keys: Sequence[int], rows: Tensor) -> None:
        """Set the references of ``keys`` to copies of ``rows`` [keys, length]; versions advance."""
        self.put(keys, [row.clone() for row in rows])

    def drop(self, keys: Sequence[int]) -> None:
        """Forget ``keys``: their next visit is a first one."""
        for key in keys:
            self._held.pop(key, None)
            self._lengths.pop(key, None)

    def digest(self) -> int:
        """A 64-bit hash of all keys, versions and references: equal at both ends of a link."""
        digest = xxhash.xxh3_64()
        for key in sorted(self._held):
            held = self._held[key]
            digest.update(f"{key}:{held.version};".encode())
            digest.update(held.row.cpu().numpy().data.cast("B"))
        return digest.intdigest()

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors: keys, versions, lengths, and all references end to end."""
        keys = sorted(self._held)
        rows = self.rows(keys)
        return {
            "keys": torch.tensor(keys, dtype=torch.int64),
            "versions": torch.tensor(self.versions(keys), dtype=torch.int64),
            "lengths": torch.tensor([row.numel() for row in rows], dtype=torch.int64),
            "values": torch.cat(rows) if rows else torch.empty(0),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents by those of ``state_dict``."""
        keys, versions = state["keys"].tolist(), state["versions"].tolist()
        rows = state["values"].split(state["lengths"].tolist())
        self._held = {
            key: Held(row.clone(), version)
            for key, row, version in zip(keys, rows, versions, strict=True)
        }
        self._lengths = {key: held.row.numel() for key, held in self._held.items()}
