"""The randomized Hadamard rotation: the eager twin, which kernels must equal bit for bit.

A rotation is orthonormal, so it keeps the energy of a group and of any error in it, and it spreads
an outlier evenly over its group. A group is cut into blocks of a power of two by its binary
expansion, the largest first (100 = 64 + 32 + 4). Each block of 2**k values, all in float32:

1. every value times its sign, which depends on its position in the row alone;
2. butterflies (a, b) -> (a + b, a - b) on values h apart, for h = 2**(k-1), … 4, 2, 1;
3. every value times 2**(-k/2), rounded to float32.

The inverse runs step 2, then step 3, then step 1. No step is fused with another, so that results
are the same on every ISA. Long strides come first: they combine whole vector registers (or, in a
block larger than a cache, leave two halves that are independent); the strides within a register
come last, where a kernel takes the extremes.

The sign of position i is bit i % 32 of lowbias32(i // 32 ^ SEED), a set bit for -1: one word for
32 values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.native import noise

SEED = 0x3C6EF372


def rotate(x: Tensor, group: int) -> Tensor:
    """Rotate each group of ``x`` [rows, n] float32; ``group`` = 0 stands for the whole row.

    The last group may be short. Sums beyond float32 become infinities or NaN, in their block only.
    """
    return _blocks(x * signs(x.shape[1], x.device), group)


def unrotate(x: Tensor, group: int) -> Tensor:
    """The inverse of ``rotate``, up to float32 rounding."""
    return _blocks(x, group).mul_(signs(x.shape[1], x.device))


def signs(n: int, device: torch.device) -> Tensor:
    """The signs of ``n`` positions, +1 or -1 in float32."""
    words = torch.arange(-(-n // 32), dtype=torch.int32, device=device)
    words = noise.mix(words ^ SEED)
    bits = (words[:, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    return bits.flatten()[:n].to(torch.float32).mul_(-2.0).add_(1.0)


def _blocks(x: Tensor, group: int) -> Tensor:
    """Steps 2 and 3 on every block of ``x`` [rows, n]."""
    rows, n = x.shape
    y = torch.empty_like(x)
    group = group or n
    full = n // group * group if n else 0
    for start, end in ((0, full), (full, n)):
        if start == end or rows == 0:
            continue
        size = min(group, end - start)
        source = x[:, start:end].unflatten(1, (-1, size))
        target = y[:, start:end].unflatten(1, (-1, size))
        at = 0
        for k in range(size.bit_length() - 1, -1, -1):
            if size >> k & 1:
                block = slice(at, at + 2**k)
                target[:, :, block] = _transform(source[:, :, block])
                at += 2**k
    return y


def _transform(x: Tensor) -> Tensor:
    """The scaled Walsh-Hadamard transform over the last dimension, a power of two."""
    size = x.shape[-1]
    # the blocks side by side, so that every stride is a run of contiguous values
    y = x.flatten(0, 1).t().contiguous()
    h = size // 2
    while h:
        pairs = y.view(-1, 2, h, y.shape[1])
        a, b = pairs[:, 0], pairs[:, 1]
        y = torch.stack((a + b, a - b), 1).view_as(y)
        h //= 2
    scale = math.sqrt(1 / size)
    return (y * scale).t().reshape(x.shape)
