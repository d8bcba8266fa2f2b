"""``tile``: stateless coding for activations and gradients of unequal size, 4.0 bits all in.

In the manner of TAH-Quant (He et al. 2025, arXiv 2506.01352): tiles of 32 values with a scale
each, more bits for the tiles that have the wider range, and a Hadamard rotation where an outlier
dominates. Other than there, scales are a byte with the rotation flag in it, the widths (2 to 8
bits) follow from the scales, so no map is sent, and there is no pivot; ``benchmarks/tile_design``
compares the choices, and the arithmetic is written down in ``thinwire.native.tile``.

Error: let P be a tile's peak, the largest magnitude in it or, where that is less, in its rotation;
s <= 1.0625 * 2**(1-w) * P the step of a tile of w bits, and up to twice that where P is below 1/64
of the largest P in the row. No (rotated) value is off by more than s + P / 16 (P / 64 from 5 bits
on), so no tile's root mean square error is more. Tiles with P below 2**-21 of the largest, or below
2**-130, come back as zeros. Values on one side of zero, as behind a ReLU, waste half of the levels:
an affine ``int4`` suits them better.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, saturated
from thinwire.errors import SpecError
from thinwire.native import tile, tile_kernels
from thinwire.spec import register


@register("codec", "tile")
@dataclasses.dataclass(frozen=True)
class Tile(Codec):
    """``bits`` a value, scales included; a row's bytes depend on its length alone."""

    bits: int = 4

    def __post_init__(self) -> None:
        if not 3 <= self.bits <= 8:
            raise SpecError(f"tile: bits={self.bits} is not within 3 … 8")

    @property
    def format(self) -> tile.TileFormat:
        """What the kernels need to know."""
        return tile.TileFormat(self.bits)

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return tile.row_nbytes(n, self.format)

    def most_row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        # a short tile has no share in the bits that scales cost
        short = max(0, n // tile.TILE * tile.TILE - 1)
        return max(self.row_nbytes(n, dtype), self.row_nbytes(short, dtype))

    def _encode_all(
        self, x2: Tensor, sizes: list[int] | None, seeds: Tensor, out: Tensor
    ) -> int | None:
        x = x2 if x2.dtype in tile_kernels.DTYPES else x2.to(torch.float32)
        if not tile_kernels.usable(x):
            return super()._encode_all(x2, sizes, seeds, out)
        place = tile_kernels.encode(x, sizes, self.format, out)
        return out.numel() if place < 0 else -1 - place

    def _decode_all(self, payload: Tensor, y2: Tensor, sizes: list[int] | None) -> bool:
        known = y2.dtype in tile_kernels.DTYPES
        y = y2 if known else y2.new_empty(y2.shape, dtype=torch.float32)
        if not tile_kernels.usable(y):
            return super()._decode_all(payload, y2, sizes)
        if not tile_kernels.decode(payload.contiguous(), sizes, self.format, y):
            return False
        if not known:
            y2.copy_(saturated(y, y2.dtype))
        return True

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        return tile.encode_rows(x.to(torch.float32), self.format, seeds, out)

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        return tile.decode_rows(payload, n, self.format)
