"""Uniform noise for stochastic rounding: a counter hash in integer arithmetic.

It depends on a seed and the position in the row alone, gives the same bits on every ISA and
device, and never touches torch's generators. The mixer is the two-multiply finalizer known as
lowbias32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_M1 = 0x7FEB352D
_M2 = 0x846CA68B - 2**32  # as int32
_GOLDEN = 0x9E3779B9


def mix(x: Tensor, key: Tensor | None = None) -> Tensor:
    """lowbias32 on int32 tensors; shifts are made logical by a mask. ``key`` enters half way."""
    x = x ^ (x >> 16).bitwise_and_(0xFFFF)
    x.mul_(_M1)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    if key is not None:
        x.bitwise_xor_(key)
    x.mul_(_M2)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def uniform(seeds: Tensor, n: int) -> Tensor:
    """Noise in [0, 1), multiples of 2**-24, [rows, n] float32; ``seeds`` [rows] int64.

    Two words derived from the seed go into one pass of the mixer over the position.
    """
    low = _wrap(seeds & 0xFFFFFFFF)[:, None]
    high = _wrap(((seeds >> 32) & 0xFFFFFFFF) ^ _GOLDEN)[:, None]
    first = mix(low ^ mix(high))
    second = mix(first ^ high)
    position = _wrap(torch.arange(n, dtype=torch.int64, device=seeds.device) & 0xFFFFFFFF)
    h = mix(position[None, :] ^ first, second)
    return h.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)


def _wrap(x: Tensor) -> Tensor:
    """int64 in [0, 2**32) to the int32 with the same bits."""
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)
