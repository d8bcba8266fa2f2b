"""Random crops and flips, drawn for each variant of a sample alike, wherever and whenever."""

from __future__ import annotations

import struct

import torch
import xxhash
from torch import Tensor
from torch.nn import functional

from thinwire.native.noise import uniform
from thinwire.store import signed

_PAD = 4


def crop_flip(pixels: Tensor, seed: int, numbers: Tensor, variants: Tensor) -> Tensor:
    """``pixels`` uint8 ``[rows, C, H, W]``, black at 4 more on each side, cropped to their size at
    random, and every other one mirrored.

    numbers, variants: int64 ``[rows]``; with the seed they decide alone.
    """
    rows, _, height, width = pixels.shape
    pairs = zip(numbers.tolist(), variants.tolist(), strict=True)
    seeds = [signed(xxhash.xxh3_64_intdigest(struct.pack("<3q", seed, *pair))) for pair in pairs]
    drawn = uniform(torch.tensor(seeds, dtype=torch.int64), 3)
    top, left = (drawn[:, :2] * (2 * _PAD + 1)).long().unbind(1)
    y = top[:, None] + torch.arange(height)
    across = torch.arange(width).expand(rows, width)
    x = left[:, None] + torch.where(drawn[:, 2:] < 0.5, across.flip(1), across)
    padded = functional.pad(pixels, [_PAD] * 4)
    row = torch.arange(rows)[:, None, None]
    # indexed dimensions apart from each other come first
    return padded[row, :, y[:, :, None], x[:, None, :]].movedim(-1, 1).contiguous()
