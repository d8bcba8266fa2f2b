"""Quantizers of published code, as they are there, to replicate results that were made with them.

Their rows are coded together, so what comes of a sample depends on its batch. For anything else
``int2`` … ``int8`` are better: they have a scale for 128 values, and rows stand alone.

``rudakov-int4`` (Rudakov et al. 2024, arXiv 2401.07788): one minimum and maximum for the whole
tensor; 2**b levels from one to the other, to the nearest. Where both are equal, that value comes
back; the published code divides by zero.

``acsgd-int4`` (the same authors' port of AQ-SGD's quantizer): a float16 scale for each position of
a row, the largest magnitude there over all rows; fixed point from -2**(b-1) to 2**(b-1) - 1, so the
largest positive value is clipped. A scale takes 16 bits for each position, whatever the rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, layout, within
from thinwire.native import planes
from thinwire.spec import register

_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class _Together(Codec):
    """Rows of packed codes, after what they share. Subclasses say how many bytes that takes."""

    bits: int

    @property
    def together(self) -> bool:
        return True

    def _shared_nbytes(self, n: int) -> int:
        """Bytes that rows of up to ``n`` values share."""
        raise NotImplementedError

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return planes.packed_nbytes(n, self.bits) + self._shared_nbytes(n) if n else 0

    def max_nbytes(self, shape: Sequence[int], dtype: torch.dtype, rows: int | None = None) -> int:
        count, n = layout(shape, rows)
        return self._payload_nbytes(count, n, None, dtype)

    def _payload_nbytes(
        self, count: int, n: int, sizes: list[int] | None, dtype: torch.dtype
    ) -> int:
        if sizes is None:
            codes, most = count * planes.packed_nbytes(n, self.bits), n
        else:
            codes = sum(planes.packed_nbytes(size, self.bits) for size in sizes)
            most = max(sizes, default=0)
        return codes + self._shared_nbytes(most) if codes else 0

    def _put_codes(self, codes: Tensor, sizes: list[int] | None, out: Tensor) -> None:
        """Pack the first ``sizes[i]`` of each row of ``codes`` [rows, n] into ``out``."""
        at = 0
        for row, size in zip(codes, sizes or [codes.shape[1]] * len(codes), strict=True):
            width = planes.packed_nbytes(size, self.bits)
            planes.pack(row[None, :size], self.bits, out[None, at : at + width])
            at += width

    def _take_codes(self, payload: Tensor, count: int, n: int, sizes: list[int] | None) -> Tensor:
        """The reverse, [count, n] uint8, zeros beyond each row's size."""
        codes, at = payload.new_zeros((count, n)), 0
        for row, size in zip(codes, sizes or [n] * count, strict=True):
            width = planes.packed_nbytes(size, self.bits)
            row[:size] = planes.unpack(payload[None, at : at + width], size, self.bits)[0]
            at += width
        return codes


@dataclasses.dataclass(frozen=True)
class Rudakov(_Together):
    """Minimum and maximum of the whole tensor."""

    def _shared_nbytes(self, n: int) -> int:
        return 8 if n else 0

    def _encode_all(
        self, x2: Tensor, sizes: list[int] | None, seeds: Tensor, out: Tensor
    ) -> int | None:
        x = x2.to(torch.float32)
        valid = x[_within(sizes, x)]
        low, high = valid.min(), valid.max()
        if not bool(torch.isfinite(high - low)):
            return None
        span = torch.where(high > low, high - low, torch.ones_like(low))
        levels = 2**self.bits - 1
        codes = torch.round((x - low).div(span).clamp(0, 1) * levels).to(torch.uint8)
        out[:8] = torch.stack([low, high]).view(torch.uint8)
        self._put_codes(codes, sizes, out[8:])
        return out.numel()

    def _decode_all(self, payload: Tensor, y2: Tensor, sizes: list[int] | None) -> bool:
        low, high = payload[:8].clone().view(torch.float32)
        if not bool(torch.isfinite(high - low)) or bool(high < low):
            return False
        codes = self._take_codes(payload[8:], y2.shape[0], y2.shape[1], sizes)
        y = codes.to(torch.float32).div(2**self.bits - 1) * (high - low) + low
        _put(y, y2, sizes)
        return True


@dataclasses.dataclass(frozen=True)
class FixedPoint(_Together):
    """A scale for each position of a row, shared by the rows."""

    def _shared_nbytes(self, n: int) -> int:
        return 2 * n

    def _encode_all(
        self, x2: Tensor, sizes: list[int] | None, seeds: Tensor, out: Tensor
    ) -> int | None:
        n = max(sizes) if sizes else x2.shape[1]
        x = x2[:, :n].to(torch.float32)
        scale = torch.where(_within(sizes, x), x.abs(), torch.zeros_like(x)).amax(0)
        scale = scale.to(torch.float16)
        if not bool(torch.isfinite(scale).all()):
            return None
        half = 2 ** (self.bits - 1)
        ratio = x / (scale.to(torch.float32) + _EPSILON)
        codes = torch.round(ratio * half).clamp(-half, half - 1) + half
        out[: 2 * n] = scale.view(torch.uint8)
        self._put_codes(codes.to(torch.uint8), sizes, out[2 * n :])
        return out.numel()

    def _decode_all(self, payload: Tensor, y2: Tensor, sizes: list[int] | None) -> bool:
        n = max(sizes) if sizes else y2.shape[1]
        scale = payload[: 2 * n].clone().view(torch.float16).to(torch.float32)
        if not bool(torch.isfinite(scale).all()):
            return False
        half = 2 ** (self.bits - 1)
        codes = self._take_codes(payload[2 * n :], y2.shape[0], n, sizes)
        y = (codes.to(torch.float32) - half) / half * scale
        y2[:, n:] = 0
        _put(y, y2[:, :n], sizes)
        return True


def _within(sizes: list[int] | None, x: Tensor) -> Tensor:
    """Which values of ``x`` [rows, n] count, bool."""
    if sizes is None:
        return torch.ones_like(x, dtype=torch.bool)
    return within(sizes, x.shape[1], x.device)


def _put(y: Tensor, target: Tensor, sizes: list[int] | None) -> None:
    """``y`` into ``target`` within the range of its dtype, zeros beyond each row's size."""
    if target.dtype.itemsize < 4:
        limit = torch.finfo(target.dtype).max
        y = y.clamp(-limit, limit)
    target.copy_(torch.where(_within(sizes, y), y, torch.zeros_like(y)))


for _bits in range(1, 9):
    register("codec", f"rudakov-int{_bits}", bits=_bits)(Rudakov)
    if _bits > 1:
        register("codec", f"acsgd-int{_bits}", bits=_bits)(FixedPoint)
