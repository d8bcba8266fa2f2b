"""``topk:0.1``: a tenth of each row's values, those of largest magnitude; the rest become zero.

Exactly ceil(share * n) of n values are kept, at least one; of equal magnitudes the first. They
travel as they are (float64 as float32), or through another codec: ``topk:0.1/int8``. Positions take
at most 1.9 % more than their entropy below a share of a quarter (a Golomb code of the gaps, whose
size depends on the data), and a bit a value from there on (a bitmask). For shares, sizes and layout
see ``thinwire.native.topk``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, saturated
from thinwire.codecs.raw import Raw
from thinwire.errors import SpecError
from thinwire.native import topk, topk_kernels
from thinwire.spec import names, nearest, parse, register

_SHARE = re.compile(r"[0-9]*\.?[0-9]+|[0-9]+\.")
_MOST_DECIMALS = 9
_MOST_VALUES = 1 << 31
_RAW = Raw()


@register("codec", "topk")
@dataclasses.dataclass(frozen=True)
class TopK(Codec):
    """``share`` is a decimal above 0 and up to 1, and may name the values' codec: ``0.1/int8``."""

    share: str = dataclasses.field(metadata={"positional": "0.1"})

    _invalid: ClassVar[str] = "positions or values that do not fit"

    def __post_init__(self) -> None:
        number, slash, coder = str(self.share).partition("/")
        object.__setattr__(self, "share", _canonical_share(number) + slash + coder)
        if slash:
            _values_codec(coder)

    @property
    def fraction(self) -> Fraction:
        """The share of values kept, exactly."""
        return _fraction(self.share)

    @property
    def values(self) -> Codec:
        """What the kept values are coded in."""
        _, slash, coder = self.share.partition("/")
        return _values_codec(coder) if slash else _RAW

    @property
    def stochastic(self) -> bool:
        return self.values.stochastic

    @property
    def fixed_size(self) -> bool:
        return topk.modulus(self.fraction) == 0

    def kept(self, n: int) -> int:
        """How many of ``n`` values are kept."""
        return -(-n * self.fraction.numerator // self.fraction.denominator)

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        k = self.kept(n)
        return self.values.row_nbytes(k, _carrier(dtype)) + self._most_positions(n, k)

    def most_row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        k = self.kept(n)
        return self.values.most_row_nbytes(k, _carrier(dtype)) + self._most_positions(n, k)

    def _most_positions(self, n: int, k: int) -> int:
        return topk.positions_max_nbytes(n, k, topk.modulus(self.fraction))

    def _least_row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        k = self.kept(n)
        positions = topk.positions_min_nbytes(n, k, topk.modulus(self.fraction))
        return self.values.row_nbytes(k, _carrier(dtype)) + positions

    def _encode_all(
        self, x2: Tensor, sizes: list[int] | None, seeds: Tensor, out: Tensor
    ) -> int | None:
        x = x2.to(_carrier(x2.dtype))
        # row-major even where a dimension of size 1 hides a stride from contiguous()
        x = x if x.stride(1) == 1 else x.reshape(-1).contiguous().view(x.shape)
        rows = self._rows(x, sizes)
        if self.values == _RAW:
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
        if self.values != _RAW:
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


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """What values of ``dtype`` are selected and kept in."""
    return dtype if dtype in topk.DTYPES else torch.float32


@functools.cache
def _fraction(share: str) -> Fraction:
    return Fraction(share.partition("/")[0])


def _canonical_share(text: str) -> str:
    if not _SHARE.fullmatch(text):
        raise SpecError(
            f"topk: {text!r} is not a share such as 0.1; write topk:0.1 or topk:0.1/int8"
        )
    whole, _, decimals = text.partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    share = Fraction(f"{whole}.{decimals or '0'}")
    if not 0 < share <= 1:
        raise SpecError(f"topk: a share of {text} is not above 0 and at most 1")
    if len(decimals) > _MOST_DECIMALS:
        raise SpecError(f"topk: a share has at most {_MOST_DECIMALS} decimals, not {text}")
    return f"{whole}.{decimals}" if decimals else whole


@functools.cache
def _values_codec(name: str) -> Codec:
    """The codec that ``name`` names; anything that cannot code the kept values is an error."""
    known = set(names("codec")) - {"topk", "raw"}
    coder = parse(name) if name in known else None
    if not isinstance(coder, Codec) or not coder.fixed_size:
        raise SpecError(f"topk: {name!r} is no codec for the kept values{nearest(name, known)}")
    return coder
