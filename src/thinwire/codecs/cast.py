"""``bf16``, ``fp16`` and ``fp8``: a cast to a shorter float, the baselines of compression."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.spec import register

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
_FP8_MAX = 448.0


def _all_finite(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether all values of ``x``, of which there are some, are finite as ``dtype``."""
    # rounding keeps the order, and a NaN is both extremes
    return bool(torch.isfinite(torch.stack(torch.aminmax(x)).to(dtype)).all())


@dataclasses.dataclass(frozen=True)
class Cast(Codec):
    """Round to ``to``; a value beyond its range is an error, never an infinity."""

    to: str

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return n * _DTYPES[self.to].itemsize

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        if x.numel() == 0:
            return True
        if not _all_finite(x, _DTYPES[self.to]):
            return False
        if self._aligned(out):
            out.view(_DTYPES[self.to]).copy_(x)
        else:
            out.copy_(x.to(_DTYPES[self.to]).view(torch.uint8))
        return True

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        whole = payload if self._aligned(payload) else payload.clone()
        values = whole.view(_DTYPES[self.to])
        return values if _all_finite(values, values.dtype) else None

    def _aligned(self, rows: Tensor) -> bool:
        """Whether uint8 ``rows`` can be viewed as what they hold."""
        size = _DTYPES[self.to].itemsize
        steps = (rows.storage_offset(), rows.data_ptr(), rows.stride(0))
        return rows.stride(1) == 1 and all(step % size == 0 for step in steps)


@dataclasses.dataclass(frozen=True)
class Float8(Codec):
    """e4m3 with one float32 scale a row (max|x| / 448), without which small gradients vanish."""

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return 4 + n if n else 0

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        if x.numel() == 0:
            return True
        x = x.to(torch.float32)
        peak = x.abs().amax(1)
        if not bool(torch.isfinite(peak).all()):
            return False
        scale = peak / _FP8_MAX
        # subnormal scales would divide to infinity: such rows are all but zero
        ratio = torch.where(scale[:, None] > 0, x / scale[:, None], torch.zeros_like(x))
        short = ratio.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        out[:, :4].copy_(scale[:, None].view(torch.uint8))
        out[:, 4:].copy_(short.view(torch.uint8))
        return True

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        if n == 0 or payload.shape[0] == 0:
            return torch.zeros((payload.shape[0], n), device=payload.device)
        scale = payload[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
        values = payload[:, 4:].contiguous().view(torch.float8_e4m3fn).to(torch.float32) * scale
        return values if bool(torch.isfinite(values).all()) else None


register("codec", "bf16", to="bf16")(Cast)
register("codec", "fp16", to="fp16")(Cast)
register("codec", "fp8")(Float8)
