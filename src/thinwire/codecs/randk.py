"""``randk:0.1``: a tenth of each row's values, chosen at random, as a baseline for ``topk``.

Exactly ceil(share * n) different ones, at least one; the rest become zero, or with ``unbiased``
those that are kept are scaled by n / k. Which ones follows from the row's seed, which travels
instead of positions: 8 bytes. Kept values travel as they are or through another codec, as in
``topk``.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from thinwire.codecs import share as shares
from thinwire.codecs.base import Codec, saturated
from thinwire.native import noise
from thinwire.spec import register

_SEED_BYTES = 8


@register("codec", "randk")
@dataclasses.dataclass(frozen=True)
class RandK(Codec):
    """``share`` is a decimal above 0 and up to 1, and may name the values' codec: ``0.1/int8``."""

    share: str = dataclasses.field(metadata={"positional": "0.1"})
    unbiased: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", shares.canonical("randk", self.share))

    @property
    def values(self) -> Codec:
        """What the kept values are coded in."""
        return shares.values_of("randk", self.share)

    @property
    def stochastic(self) -> bool:
        return True

    def kept(self, n: int) -> int:
        """How many of ``n`` values are kept."""
        return shares.kept(shares.fraction(self.share), n)

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return _SEED_BYTES + self.values.row_nbytes(self.kept(n), dtype) if n else 0

    def most_row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return _SEED_BYTES + self.values.most_row_nbytes(self.kept(n), dtype) if n else 0

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        if x.numel() == 0:
            return True
        if not bool(torch.isfinite(x.to(torch.float64)).all()):
            return False
        rows, n = x.shape
        part = x.gather(1, self._chosen(seeds, n))
        coded = out.new_empty(rows * self.values.row_nbytes(part.shape[1], x.dtype))
        written = self.values._encode_all(part, None, seeds, coded)
        if written is None or written < 0:
            return False
        out[:, :_SEED_BYTES] = seeds[:, None].contiguous().view(torch.uint8)
        out[:, _SEED_BYTES:] = coded.view(rows, -1)
        return True

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        rows = payload.shape[0]
        y = torch.zeros((rows, n), dtype=dtype, device=payload.device)
        if y.numel() == 0:
            return y
        seeds = payload[:, :_SEED_BYTES].reshape(-1).clone().view(torch.int64)
        wide = dtype if self.values == shares.RAW else torch.promote_types(dtype, torch.float32)
        part = y.new_empty((rows, self.kept(n)), dtype=wide)
        if not self.values._decode_all(payload[:, _SEED_BYTES:].reshape(-1), part, None):
            return None
        if self.unbiased:
            part = part.to(torch.float64) * (n / part.shape[1])
        return y.scatter_(1, self._chosen(seeds, n), saturated(part, dtype).to(dtype))

    def _chosen(self, seeds: Tensor, n: int) -> Tensor:
        """The positions that are kept [rows, k], in order."""
        order = noise.uniform(seeds, n).argsort(dim=1, stable=True)
        return order[:, : self.kept(n)].sort(dim=1).values
