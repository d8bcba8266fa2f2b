"""What the input of each sample was at its last visit: only the same one may rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from thinwire.boundary import Boundary
from thinwire.store import signed, unsigned


class Inputs:
    """The input of each sample at its last visit, as a hash; on the first stage's rank."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._coming: dict[int, int] = {}

    def known(
        self,
        boundaries: Sequence[Boundary],
        inputs: Sequence[Tensor],
        keys: Sequence[int],
        lengths: Sequence[int] | None,
    ) -> str:
        """A digit for each row: 1 where its input is that of its sample's last visit."""
        hashes = _hashes(boundaries, inputs, len(keys), lengths)
        digits = [str(int(self._seen.get(k) == h)) for k, h in zip(keys, hashes, strict=True)]
        self._coming = {}
        for key, found in zip(keys, hashes, strict=True):
            # a second visit in a step is sent as a value, and leaves what is remembered alone
            self._coming.setdefault(key, found)
        return "".join(digits)

    def accept(self) -> None:
        """The step that was asked about takes place."""
        self._seen.update(self._coming)
        self._coming = {}

    def save(self) -> dict[str, Tensor]:
        """Plain tensors for ``load``: int64 ``keys`` and ``hashes``."""
        hashes = [signed(hash_) for hash_ in self._seen.values()]
        return {
            "keys": torch.tensor(list(self._seen), dtype=torch.int64),
            "hashes": torch.tensor(hashes, dtype=torch.int64),
        }

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take over what ``save`` gave; raises ValueError where ``saved`` is nothing like that."""
        keys, hashes = saved.get("keys"), saved.get("hashes")
        if (
            keys is None
            or hashes is None
            or keys.shape != hashes.shape
            or {(x.dtype, x.dim()) for x in (keys, hashes)} != {(torch.int64, 1)}
        ):
            raise ValueError("it does not have a hash for each sample")
        found = zip(keys.tolist(), hashes.tolist(), strict=True)
        self._seen = {key: unsigned(hash_) for key, hash_ in found}


def _hashes(
    boundaries: Sequence[Boundary],
    inputs: Sequence[Tensor],
    rows: int,
    lengths: Sequence[int] | None,
) -> list[int]:
    """A 64-bit hash of each row of all inputs, padding left out."""
    hashers = [xxhash.xxh3_64() for _ in range(rows)]
    for boundary, x in zip(boundaries, inputs, strict=True):
        part = rows if boundary.batched else 1
        data = x.detach().cpu().contiguous().view(-1).view(torch.uint8).view(part, -1).numpy()
        for row, hasher in enumerate(hashers):
            values = data[row if boundary.batched else 0]
            if lengths is not None and boundary.sequence:
                values = values[: len(values) // x.shape[1] * lengths[row]]
            hasher.update(len(values).to_bytes(8, "little"))
            hasher.update(values.data)
    return [hasher.intdigest() for hasher in hashers]
