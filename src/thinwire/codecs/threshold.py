"""``threshold:2``: of each row the values beyond twice its root mean square, as a baseline.

At least one is kept, at most 1 / t**2 of them; the rest become zero. How many there are depends on
the data. A row's bytes are their number, the number of bytes that follow (both uint32), and those,
as ``topk`` codes so many. Kept values travel as they are or through another codec,
``threshold:2/int8``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs import share as shares
from thinwire.codecs.base import Codec, saturated
from thinwire.codecs.topk import carrier
from thinwire.errors import SpecError
from thinwire.native import topk, topk_kernels
from thinwire.spec import register

_FACTOR = re.compile(r"[0-9]{1,3}(\.[0-9]{1,6})?")
_HEAD_BYTES = 8


@register("codec", "threshold")
@dataclasses.dataclass(frozen=True)
class Threshold(Codec):
    """``factor`` is a decimal above 0, and may name the values' codec: ``2/int8``."""

    factor: str = dataclasses.field(metadata={"positional": "2"})

    _invalid: ClassVar[str] = "a count, positions or values that do not fit"

    def __post_init__(self) -> None:
        number, slash, coder = str(self.factor).partition("/")
        if not _FACTOR.fullmatch(number) or not Fraction(number):
            raise SpecError(
                f"threshold: {number!r} is not a factor such as 2; write threshold:2 or "
                "threshold:2/int8"
            )
        if slash:
            shares.values_codec("threshold", coder)
        plain = f"{Fraction(number).numerator}" if Fraction(number).denominator == 1 else number
        object.__setattr__(self, "factor", plain + slash + coder)

    @property
    def values(self) -> Codec:
        """What the kept values are coded in."""
        return shares.values_of("threshold", self.factor)

    @property
    def _times(self) -> Fraction:
        return shares.fraction(self.factor)

    @property
    def sparse(self) -> bool:
        return True

    @property
    def stochastic(self) -> bool:
        return self.values.stochastic

    @property
    def fixed_size(self) -> bool:
        return False

    @property
    def _modulus(self) -> int:
        """Of the code of the gaps: that of a quarter of the most that can be kept."""
        return topk.modulus(min(Fraction(1), 1 / (4 * self._times**2)))

    def most(self, n: int) -> int:
        """The most of ``n`` values that can be so far off."""
        return max(min(n, math.floor(n / self._times**2)), min(n, 1))

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        if not n:
            return 0
        k = self.most(n)
        positions = max(topk.positions_max_nbytes(n, j, self._modulus) for j in {1, k})
        # fewer values may take longer codes, but never more than a bitmask
        positions = max(positions, -(-n // 8))
        return _HEAD_BYTES + self.values.most_row_nbytes(k, carrier(dtype)) + positions

    def _least_row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return _HEAD_BYTES if n else 0

    def _encode_all(
        self, x2: Tensor, sizes: list[int] | None, seeds: Tensor, out: Tensor
    ) -> int | None:
        count, n = x2.shape
        at = 0
        for row, size in enumerate(sizes or [n] * count):
            if not size:
                continue
            x = x2[row : row + 1, :size].to(carrier(x2.dtype)).contiguous()
            k = self._count(x)
            if k is None:
                return None
            head, at = at, at + _HEAD_BYTES
            rows = self._row(size, k, x.dtype)
            values = None if self.values == shares.RAW else x.new_zeros((1, k))
            starts = topk_kernels.encode(x, rows, out[at:], values)
            if starts is None:
                return None
            if values is not None:
                coded = out.new_empty(int(rows.widths.sum()))
                written = self.values._encode_all(values, None, seeds[row : row + 1], coded)
                if written is None or written < 0:
                    return None
                topk_kernels.put_values(rows, coded, starts, out[at:])
            width = int(starts[-1])
            numbers = torch.tensor([k, width], dtype=torch.int32)
            out[head:at] = numbers.view(torch.uint8).to(out.device)
            at += width
        return at

    def _count(self, x: Tensor) -> int | None:
        """How many values of a row [1, n] are kept; None where one is not finite."""
        peak = float(x.abs().max())
        if not math.isfinite(peak):
            return None
        scaled = x.to(torch.float64) / (peak or 1.0)
        limit = float(self._times) * float(scaled.square().mean()) ** 0.5
        return min(max(int((scaled.abs() > limit).sum()), 1), self.most(x.shape[1]))

    def _row(self, n: int, k: int, dtype: torch.dtype) -> topk.Rows:
        numbers = (n, k, self.values.row_nbytes(k, dtype))
        size, kept, width = (torch.tensor([number], dtype=torch.int64) for number in numbers)
        return topk.Rows(size, kept, width, self._modulus)

    def _decode_all(self, payload: Tensor, y2: Tensor, sizes: list[int] | None) -> bool:
        payload = payload.contiguous()
        count, n = y2.shape
        at = 0
        for row, size in enumerate(sizes or [n] * count):
            y2[row] = 0
            if not size:
                continue
            head = payload[at : at + _HEAD_BYTES]
            if head.numel() < _HEAD_BYTES:
                return False
            k, width = head.clone().view(torch.int32).tolist()
            at += _HEAD_BYTES
            if not 1 <= k <= self.most(size) or not 0 <= width <= payload.numel() - at:
                return False
            y = y2.new_zeros((1, size), dtype=carrier(y2.dtype))
            if not self._decode_row(payload[at : at + width], k, y):
                return False
            at += width
            y2[row, :size] = saturated(y[0], y2.dtype)
        return at == payload.numel()

    def _decode_row(self, payload: Tensor, k: int, y: Tensor) -> bool:
        """One row of ``k`` kept values into ``y`` [1, n]; False where its bytes are invalid."""
        rows, values = self._row(y.shape[1], k, y.dtype), None
        if self.values != shares.RAW:
            coded = topk_kernels.take_values(rows, payload)
            values = y.new_zeros((1, k))
            if coded is None or not self.values._decode_all(coded, values, None):
                return False
        return topk_kernels.decode(rows, payload, values, y)
