"""What the tests of the kernels share: formats, data, the twin on whole tensors, the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codecs.base import saturated
from thinwire.native import kernels, library, reference
from thinwire.native.reference import IntegerFormat

needs_library = pytest.mark.skipif(
    library.why_missing() != "", reason=f"no library: {library.why_missing()}"
)

LEVELS = library.levels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODES = {  # symmetric, stochastic, std
    "affine": (False, False, False),
    "symmetric": (True, False, False),
    "stochastic": (False, True, False),
    "symmetric stochastic": (True, True, False),
    "std": (False, False, True),
    "symmetric std": (True, False, True),
}
GROUPS = [8, 16, 32, 64, 100, 128, 256, 512, 999, 1024, 2048, 0]
SMALL = [0, 1, 7, 31, 32, 40, 100, 128, 129, 255, 256, 257, 300, 512, 1000, 1024, 2500]
#: Few rows are cut between threads, many are shared out.
LARGE = [(1, 200_001), (3, 60_000), (30, 5000), (1100, 130)]
several = settings(max_examples=60, deadline=None)


def format_of(mode: str, bits: int, group: int) -> IntegerFormat:
    symmetric, stochastic, std = MODES[mode]
    if bits == 1 and symmetric and not std:
        bits = 2  # a symmetric range scale of one bit has a single level
    return IntegerFormat(bits, group, symmetric, stochastic, std)


# Data.


def normal(rows: int, n: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))


def seeds_of(rows: int) -> Tensor:
    return torch.arange(rows, dtype=torch.int64) * (7 * 2**33) - 5


KINDS = {
    "normal": lambda x: x,
    "zeros of both signs": lambda x: x.sign() * 0.0,
    "one": torch.ones_like,
    "a large constant": lambda x: torch.full_like(x, -1e30),
    "a subnormal constant": lambda x: torch.full_like(x, 1e-40),
    "tiny": lambda x: x * 1e-30,
    "subnormal": lambda x: x * 1e-42,
    "huge": lambda x: x * 1e37,
    "near overflow": lambda x: x * 1.1e38,
    "of many magnitudes": lambda x: x * torch.exp(8 * x.flip(1)),
    "far from zero": lambda x: x + 1000,
    "spiky": lambda x: torch.where(x.abs() > 2.5, x * 1e4, x * 0),
    "signs": lambda x: x.sign(),
    "grid with ties": lambda x: (4 * x).round() / 4,
    "halves of a grid": lambda x: (4 * x).round().clamp(-15, 15) + 0.5 * (x > 2),
}


@st.composite
def tensors(draw, bad: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> Tensor:
    """[rows, n], mostly with rows apart; ``bad``: maybe with a value that is not finite."""
    rows, n = draw(st.integers(0, 4)), draw(st.sampled_from(SMALL) | st.integers(0, 1300))
    apart = draw(st.integers(0, 5))
    x = normal(rows, n + apart, draw(st.integers(0, 2**31)))
    x = KINDS[draw(st.sampled_from(list(KINDS)))](x).clamp(-3.3e38, 3.3e38)
    dtype = draw(st.sampled_from(dtypes))
    x = saturated(x, dtype)
    for _ in range(draw(st.integers(0, 2)) if bad and rows * n else 0):
        place = draw(st.integers(0, rows - 1)), draw(st.integers(0, n - 1))
        x[place] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    return x[:, :n]


def some_sizes(draw_from: st.DataObject, x: Tensor) -> list[int] | None:
    rows, n = x.shape
    lengths = st.lists(st.integers(0, n), min_size=rows, max_size=rows)
    return draw_from.draw(st.none() | lengths) if rows else None


# The twin.


def each(x: Tensor, sizes: list[int] | None) -> list[tuple[slice, int]]:
    """(rows, length): all rows at once where they are of one length, else one by one."""
    if sizes is None:
        return [(slice(0, x.shape[0]), x.shape[1])]
    return [(slice(row, row + 1), size) for row, size in enumerate(sizes)]


def twin_encode(
    x: Tensor, sizes: list[int] | None, fmt: IntegerFormat, seeds: Tensor
) -> tuple[Tensor, int]:
    """(payload, -1), or (nothing, place) of the value that cannot be coded."""
    parts = [torch.empty(0, dtype=torch.uint8)]
    for rows, size in each(x, sizes):
        values = x[rows, :size].to(torch.float32)
        out = torch.zeros((len(values), reference.row_nbytes(size, fmt)), dtype=torch.uint8)
        if not reference.encode_rows(values, fmt, seeds[rows], out):
            return parts[0], rows.start * x.shape[1] + unfit_place(values, x.shape[1], fmt)
        parts.append(out.flatten())
    return torch.cat(parts), -1


def unfit_place(x: Tensor, n: int, fmt: IntegerFormat) -> int:
    """Of the first group that cannot be coded: the first value that is not finite, or greatest."""
    group = fmt.group or x.shape[1]
    alone = IntegerFormat(fmt.bits, 0, fmt.symmetric, fmt.stochastic, fmt.std)
    for row in range(len(x)):
        for start in range(0, x.shape[1], group):
            values = x[row : row + 1, start : start + group]
            out = torch.zeros((1, reference.row_nbytes(values.numel(), alone)), dtype=torch.uint8)
            if not reference.encode_rows(values, alone, seeds_of(1), out):
                magnitude = values[0].abs().nan_to_num(torch.inf, torch.inf)
                return row * n + start + int(torch.nonzero(magnitude == magnitude.max())[0])
    raise AssertionError("each group alone can be coded, the rows cannot")


def twin_decode(payload: Tensor, y: Tensor, sizes: list[int] | None, fmt: IntegerFormat) -> Tensor:
    result, at = torch.zeros_like(y), 0
    for rows, size in each(y, sizes):
        width = reference.row_nbytes(size, fmt)
        count = len(y[rows])
        end = at + count * width
        values = reference.decode_rows(payload[at:end].view(count, width), size, fmt)
        assert values is not None
        result[rows, :size] = saturated(values, y.dtype)
        at = end
    return result


# The kernels.


def payload_nbytes(x: Tensor, sizes: list[int] | None, fmt: IntegerFormat) -> int:
    lengths = [x.shape[1]] * x.shape[0] if sizes is None else sizes
    return sum(reference.row_nbytes(size, fmt) for size in lengths)


def encoded(
    x: Tensor, sizes: list[int] | None, fmt: IntegerFormat, seeds: Tensor, level: str
) -> tuple[Tensor, int]:
    out = torch.full((payload_nbytes(x, sizes, fmt),), 171, dtype=torch.uint8)
    with library.forced(level):
        place = kernels.encode(x, sizes, fmt, seeds, out)
    return (out, -1) if place < 0 else (out[:0], place)


def decoded(
    payload: Tensor, y: Tensor, sizes: list[int] | None, fmt: IntegerFormat, level: str
) -> Tensor:
    with library.forced(level):
        assert kernels.decode(payload, sizes, fmt, y)
    return y


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))
