"""``topk:0.1``: a tenth of each row's values, those of largest magnitude; the rest become zero.

Exactly ceil(share * n) of n values are kept, at least one; of equal magnitudes the first. They
travel as they are (float64 as float32), or through another codec: ``topk:0.1/int8``. Positions take
at most 1.9 % more than their entropy below a share of a quarter (a Golomb code of the gaps, whose
size depends on the data), and a bit a value from there on (a bitmask). For shares, sizes and layout
see ``thinwire.native.topk``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire.codecs import share as shares
from thinwire.codecs.base import Codec, Lengths, row_sizes, saturated
from thinwire.native import topk, topk_kernels
from thinwire.spec import register

_MOST_VALUES = 1 << 31


@register("codec", "topk")
@dataclasses.dataclass(frozen=True)
class TopK(Codec):
    """``share`` is a decimal above 0 and up to 1, and may name the values' codec: ``0.1/int8``.

    ``mask=shared``, on a pipeline's backward link, keeps what the forward link has transmitted of
    the same micro-batch instead, and sends no positions; see ``thinwire.schemes.mask``.
    """

    share: str = dataclasses.field(metadata={"positional": "0.1"})
    mask: Literal["own", "shared"] = "own"

    _invalid: ClassVar[str] = "positions or values that do not fit"

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", shares.canonical("topk", self.share))

    @property
    def fraction(self) -> Fraction:
        """The share of values kept, exactly."""
        return shares.fraction(self.share)

    @property
    def alone(self) -> bool:
        return self.mask == "own"

    def halved(self) -> TopK:
        """The same with half of the share."""
        number, slash, coder = self.share.partition("/")
        half = f"{Decimal(number) / 2:f}"
        return TopK(f"{half}{slash}{coder}", self.mask)

    @property
    def values(self) -> Codec:
        """What the kept values are coded in."""
        return shares.values_of("topk", self.share)

    @property
    def stochastic(self) -> bool:
        return self.values.stochastic

    @property
    def fixed_size(self) -> bool:
        return topk.modulus(self.fraction) == 0

    def kept(self, n: int) -> int:
        """How many of ``n`` values are kept."""
        return shares.kept(self.fraction, n)

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        k = self.kept(n)
        return self.values.row_nbytes(k, carrier(dtype)) + self._most_positions(n, k)

    def most_row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        k = self.kept(n)
        return self.values.most_row_nbytes(k, carrier(dtype)) + self._most_positions(n, k)

    def _most_positions(self, n: int, k: int) -> int:
        return topk.positions_max_nbytes(n, k, topk.modulus(self.fraction))

    def _least_row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        k = self.kept(n)
        positions = topk.positions_min_nbytes(n, k, topk.modulus(self.fraction))
        return self.values.row_nbytes(k, carrier(dtype)) + positions

    def _encode_all(
        self, x2: Tensor, sizes: list[int] | None, seeds: Tensor, out: Tensor
    ) -> int | None:
        x = x2.to(carrier(x2.dtype))
        # row-major even where a dimension of size 1 hides a stride from contiguous()
        x = x if x.stride(1) == 1 else x.reshape(-1).contiguous().view(x.shape)
        rows = self._rows(x, sizes)
        if self.values == shares.RAW:
            starts = topk_kernels.encode(x, rows, out, None)
            return None if starts is None else int(starts[-1])
        values, kept = self._values_of(rows, x)
        starts = topk_kernels.encode(x, rows, out, values)
        if starts is None:
            return None
        coded = out.new_empty(int(rows.widths.sum()))
        written = self.values._encode_all(values, kept, seeds, coded)
        if written is None or written < 0:
            return None
        topk_kernels.put_values(rows, coded, starts, out)
        return int(starts[-1])

    def _decode_all(self, payload: Tensor, y2: Tensor, sizes: list[int] | None) -> bool:
        payload = payload.contiguous()
        y = y2 if y2.dtype in topk.DTYPES else y2.new_empty(y2.shape, dtype=torch.float32)
        rows = self._rows(y, sizes)
        values = None
        if self.values != shares.RAW:
            coded = topk_kernels.take_values(rows, payload)
            if coded is None:
                return False
            values, kept = self._values_of(rows, y)
            if not self.values._decode_all(coded, values, kept):
                return False
        if not topk_kernels.decode(rows, payload, values, y):
            return False
        if y is not y2:
            y2.copy_(saturated(y, y2.dtype))
        return True

    def check_dtype(self, dtype: torch.dtype) -> None:
        super().check_dtype(dtype)
        if self.mask == "shared":
            raise ValueError(
                f"codec {self}: the mask is that of a pipeline's forward link; it codes no tensor "
                "by itself"
            )

    def transmitted(
        self,
        payload: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        rows: int,
        lengths: Lengths | None,
    ) -> Tensor:
        n = math.prod(shape) // max(rows, 1)
        found = payload.new_zeros((rows, n), dtype=torch.float32)
        if n:
            sizes = row_sizes(lengths, rows, n)
            kinds = self._rows(found.to(carrier(dtype)), sizes)
            ones = found.new_ones((rows, int(kinds.kept.max()) if rows else 0))
            if not topk_kernels.decode(kinds, payload.contiguous(), ones, found):
                raise ValueError(f"codec {self}: the payload holds {self._invalid}")
        return found > 0

    def _rows(self, x: Tensor, sizes: list[int] | None) -> topk.Rows:
        count, n = x.shape
        if n >= _MOST_VALUES:
            raise ValueError(f"codec {self}: a row of {n} values; at most {_MOST_VALUES - 1} go")
        kept = {size: self.kept(size) for size in ({n} if sizes is None else set(sizes))}
        width = {size: self.values.row_nbytes(k, x.dtype) for size, k in kept.items()}

        def each(of: Mapping[int, int]) -> Tensor:
            if sizes is None:
                return torch.full((count,), of[n], dtype=torch.int64)
            return torch.tensor([of[size] for size in sizes], dtype=torch.int64)

        lengths = each({size: size for size in kept})
        return topk.Rows(lengths, each(kept), each(width), topk.modulus(self.fraction))

    def _values_of(self, rows: topk.Rows, x: Tensor) -> tuple[Tensor, list[int] | None]:
        """Room for the kept values, [rows, most kept], and how many each row has."""
        count = len(rows.kept)
        most = int(rows.kept.max()) if count else 0
        values = x.new_zeros((count, most))
        return values, None if bool((rows.kept == most).all()) else rows.kept.tolist()


def carrier(dtype: torch.dtype) -> torch.dtype:
    """What values of ``dtype`` are selected and kept in."""
    return dtype if dtype in topk.DTYPES else torch.float32
