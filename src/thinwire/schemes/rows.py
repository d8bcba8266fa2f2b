"""Some of a visit's rows: their keys, values, lengths and seeds, and room for their payloads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from thinwire.codecs.base import within
from thinwire.schemes.base import Visit, keys_digest


def keys_of(visit: Visit) -> tuple[int, ...]:
    """The visit's keys. Raises ValueError where it has none."""
    if visit.keys is None:
        raise ValueError("the scheme needs sample_ids: pass them to Pipeline.step")
    return visit.keys


def digest_of(visit: Visit, keys: Sequence[int]) -> int:
    """The digest of some of the visit's keys, which it knows where they are all."""
    return visit.keys_digest if len(keys) == len(visit.lengths) else keys_digest(keys)


def keys_at(keys: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
    """The keys of ``rows``: ``keys`` itself where they are all."""
    return keys if len(rows) == len(keys) else [keys[r] for r in rows]


def as_rows(x: Tensor) -> Tensor:
    """``x`` [rows, …] as [rows, values]."""
    return x.detach().reshape(x.shape[0], math.prod(x.shape[1:]))


def rows_at(values: Tensor, rows: Sequence[int]) -> Tensor:
    """``rows`` of ``values``: itself where they are all."""
    return values if len(rows) == values.shape[0] else values[list(rows)]


def lengths_at(visit: Visit, rows: Sequence[int]) -> list[int] | None:
    """Lengths of ``rows`` for a codec: None where every row of the visit is full."""
    return [visit.lengths[r] for r in rows] if visit.padded else None


def seeds_at(visit: Visit, rows: Sequence[int]) -> Tensor:
    """The seeds of ``rows``."""
    return visit.seeds if len(rows) == len(visit.lengths) else visit.seeds[list(rows)]


def valid(x: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """``x`` [rows, n], zero beyond each row's length; None: all of it is there."""
    if lengths is None:
        return x
    return x.masked_fill(~within(lengths, x.shape[1], x.device), 0.0)


class Space:
    """The bytes that payloads are to lie in, end to end; none: each gets its own."""

    def __init__(self, out: Tensor | None) -> None:
        self.rest = out

    def took(self, payload: Tensor) -> Tensor:
        """``payload`` lies at the start of what was the rest."""
        if self.rest is not None:
            self.rest = self.rest[payload.numel() :]
        return payload

    def put(self, payload: Tensor) -> Tensor:
        """``payload`` goes to the start of what is the rest."""
        if self.rest is not None:
            self.rest[: payload.numel()] = payload
            payload = self.rest[: payload.numel()]
        return self.took(payload)
