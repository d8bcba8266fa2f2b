"""References in RAM: one float32 row a key, with the number of visits that made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor


class MemoryStore:
    """Key (int) to reference (1-D float32) and version (number of visits so far)."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}
        self._lengths: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> Mapping[int, int]:
        """Values in each key's reference."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all references."""
        return sum(row.nbytes for row in self._rows.values())

    def versions(self, keys: Sequence[int]) -> list[int]:
        """Visits of each key so far; 0 for one never seen."""
        return [self._versions.get(key, 0) for key in keys]

    def rows(self, keys: Sequence[int]) -> list[Tensor]:
        """The references of ``keys`` themselves: not to be changed, and good until replaced."""
        return [self._rows[key] for key in keys]

    def read(self, keys: Sequence[int]) -> Tensor:
        """A copy of the references of ``keys`` (of one length), [keys, length]."""
        return torch.stack(self.rows(keys))

    def put(self, keys: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """Make ``rows``, which the store takes over, the references of ``keys``; versions advance.

        Returns the tensors that they replace, now the caller's.
        """
        displaced = []
        for key, row in zip(keys, rows, strict=True):
            held = self._rows.get(key)
            if held is not None:
                displaced.append(held)
            self._rows[key] = row
            self._lengths[key] = row.numel()
            self._versions[key] = self._versions.get(key, 0) + 1
        return displaced

    def write(self, keys: Sequence[int], rows: Tensor) -> None:
        """Set the references of ``keys`` to copies of ``rows`` [keys, length]; versions advance."""
        self.put(keys, [row.clone() for row in rows])

    def drop(self, keys: Sequence[int]) -> None:
        """Forget ``keys``: their next visit is a first one."""
        for key in keys:
            self._rows.pop(key, None)
            self._versions.pop(key, None)
            self._lengths.pop(key, None)

    def digest(self) -> int:
        """A 64-bit hash of all keys, versions and references: equal at both ends of a link."""
        digest = xxhash.xxh3_64()
        for key in sorted(self._rows):
            digest.update(f"{key}:{self._versions[key]};".encode())
            digest.update(self._rows[key].cpu().numpy().data.cast("B"))
        return digest.intdigest()

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors: keys, versions, lengths, and all references end to end."""
        keys = sorted(self._rows)
        rows = [self._rows[key] for key in keys]
        return {
            "keys": torch.tensor(keys, dtype=torch.int64),
            "versions": torch.tensor(self.versions(keys), dtype=torch.int64),
            "lengths": torch.tensor([row.numel() for row in rows], dtype=torch.int64),
            "values": torch.cat(rows) if rows else torch.empty(0),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents by those of ``state_dict``."""
        rows = state["values"].split(state["lengths"].tolist())
        keys = state["keys"].tolist()
        self._rows = {key: row.clone() for key, row in zip(keys, rows, strict=True)}
        self._lengths = {key: row.numel() for key, row in self._rows.items()}
        self._versions = dict(zip(keys, state["versions"].tolist(), strict=True))
