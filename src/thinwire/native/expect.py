"""The eager twin of what both ends of a link expect: what the kernels must equal, bit for bit.

Vectors have ``width`` float32 values, n of them in a tensor. A table is read by ids: int64 [n],
and ids that it does not have read its first vector.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

_MOST = 127
_LEAST_POWER, _MOST_POWER = -100, 100
_NEARLY_TWO = 0x7E0000  # fraction bits of 127/64
#: What was seen counts as at most so many visits: later ones outweigh it.
MEMORY = 1 << 10
CLAMP = 1 << 17


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents as float32, made of its bits; ``exponents`` int32 within -126 to 127."""
    return ((exponents + 127) << 23).view(torch.float32)


def exponents_for(largest: Tensor, most: int = 7) -> Tensor:
    """The least int32 k with ``largest`` <= (2^most - 1) 2^k nearly, by the bits of ``largest``.

    ``largest`` float32, finite, not below zero; k stays within -100 and 100.
    """
    bits = largest.contiguous().view(torch.int32)
    exponents = (bits >> 23) - 126 - most + ((bits & 0x7FFFFF) > _NEARLY_TWO).to(torch.int32)
    return exponents.clamp(_LEAST_POWER, _MOST_POWER)


def exponent_for(largest: float, most: int) -> int:
    """``exponents_for`` of one value."""
    bits: int = struct.unpack("<i", struct.pack("<f", largest))[0]
    exponent = (bits >> 23) - 126 - most + ((bits & 0x7FFFFF) > _NEARLY_TWO)
    return min(max(exponent, _LEAST_POWER), _MOST_POWER)


def expect(ids: Sequence[Tensor], tables: Sequence[Tensor]) -> Tensor:
    """The sum over ``tables``, float32 [size, width] each and at least one, in order."""
    total: Tensor | None = None
    for each, table in zip(ids, tables, strict=True):
        part = table[each.where(each < len(table), 0)]
        total = part if total is None else total + part
    assert total is not None
    return total


def centre(ids: Sequence[Tensor], tables: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` less what the tables say, as whole numbers from -127 to 127, float32 [n, width], each
    times a power of two, float32 [n]."""
    if tables:
        x = x - expect(ids, tables)
    exponents = exponents_for(x.abs().amax(1))
    codes = (x * power_of_two(-exponents)[:, None]).round_().clamp_(-_MOST, _MOST)
    return codes + 0.0, power_of_two(exponents)  # without the sign of a zero


def add(y: Tensor, part: Tensor, scales: Tensor, powers: Tensor) -> None:
    """y <- y + part scales powers, with a scale for each vector and a power for each place."""
    y.add_(part * scales[:, None] * powers)


def weigh(x: Tensor, base: Tensor | None, e: Tensor) -> Tensor:
    """Of each row the sum of (x - base) e, and that of e e, float64 [rows, 2]; their order of
    summation is not that of the kernels."""
    left = (x if base is None else x - base).double()
    return torch.stack([(left * e).sum(1), e.double().square().sum(1)], dim=1)


def stand(base: Tensor | None, e: Tensor, gains: Tensor) -> Tensor:
    """base + e gains, a gain for each row [rows]."""
    part = e * gains[:, None]
    return part if base is None else base + part


def largest(x: Tensor) -> Tensor:
    """The greatest magnitude of each vector, float32 [n]."""
    return x.abs().amax(1)


def learn(
    sums: Tensor,
    counts: Tensor,
    values: Tensor,
    ids: Tensor,
    x: Tensor,
    unit: int,
    rest: bool,
) -> Tensor | None:
    """Count ``x``, in units of 2^``unit``, to its ids: ``sums`` int32 [size, width], ``counts``
    int32 [size], of which ``values`` [size, width] are the means. With ``rest``, ``x`` becomes what
    they had left of it, and that's ``largest`` is returned."""
    left = x - values[ids]
    units = x * power_of_two(torch.tensor(-unit, dtype=torch.int32)).to(x.device)
    units = units.clamp_(-CLAMP, CLAMP).round_().to(torch.int64)
    seen, places = torch.unique(ids, return_inverse=True)
    total = sums[seen].to(torch.int64)
    total.index_add_(0, places, units)
    count = counts[seen] + torch.bincount(places, minlength=len(seen)).to(torch.int32)
    kept = count.clamp(max=MEMORY)
    faded = torch.div(total * kept[:, None], count[:, None], rounding_mode="trunc")
    sums[seen] = torch.where((count > MEMORY)[:, None], faded, total).to(torch.int32)
    counts[seen] = kept
    means(sums, counts, values, seen, unit)
    return largest(x.copy_(left)) if rest else None


def means(sums: Tensor, counts: Tensor, values: Tensor, ids: Tensor, unit: int) -> None:
    """Set the vectors of ``ids`` anew, as if zero had been seen once too: divisions of float64,
    which are rounded alike everywhere."""
    mean = sums[ids].double() / (counts[ids].double() + 1)[:, None]
    values[ids] = (mean * 2.0**unit).to(torch.float32)
