"""``raw``: the tensor's own bytes, of any dtype, unchanged."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.spec import register


@register("codec", "raw")
@dataclasses.dataclass(frozen=True)
class Raw(Codec):
    """Bytes as they lie in memory (little-endian hosts); decoding needs the dtype encoded."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Every dtype passes."""

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return n * dtype.itemsize

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        out.copy_(x.resolve_conj().resolve_neg().view(torch.uint8).view(out.shape))
        return True

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        # a copy: a view of the payload need not be aligned for dtype
        return payload.clone().view(dtype).view(payload.shape[0], n)
