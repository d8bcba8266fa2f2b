"""The kernels of rotated integer formats against the twin, bit for bit, on every level."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codecs.base import saturated
from thinwire.native import delta_reference, hadamard, kernels, library, reference
from thinwire.native.delta_reference import Kept
from thinwire.native.reference import IntegerFormat

LEVELS = library.levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason=f"no library: {library.why_missing()}")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GROUPS = [8, 20, 32, 64, 100, 128, 256, 1000, 1024, 4096, 0]
KEPT: list[Kept] = [
    torch.float32,
    torch.bfloat16,
    IntegerFormat(8, 64, False, False, False),
    IntegerFormat(8, 96, True, False, False, hadamard=True),
    IntegerFormat(7, 0, False, False, False, hadamard=True),
]


@st.composite
def formats(draw: st.DrawFn) -> IntegerFormat:
    bits, symmetric = draw(st.integers(1, 8)), draw(st.booleans())
    std = draw(st.booleans()) or (bits == 1 and symmetric)
    stochastic = not std and draw(st.booleans())
    return IntegerFormat(bits, draw(st.sampled_from(GROUPS)), symmetric, stochastic, std, True)


@st.composite
def values(draw: st.DrawFn) -> tuple[Tensor, list[int] | None]:
    """[rows, n] of some dtype and, maybe, lengths."""
    n = draw(st.integers(0, 400) | st.sampled_from([1000, 4096, 5000, 20000]))
    rows = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, n, generator=generator) ** draw(st.sampled_from([1, 1, 5]))
    x = x * 2.0 ** draw(st.sampled_from([0, 0, -140, -70, 60, 110, 122]))
    x = x + draw(st.sampled_from([0.0, 0.0, 1000.0]))
    x = x.to(draw(st.sampled_from(DTYPES)))
    ragged = st.lists(st.integers(0, n), min_size=rows, max_size=rows)
    return x, draw(st.none() | ragged)


def seeds_of(rows: int) -> Tensor:
    return torch.arange(rows, dtype=torch.int64) * (7 * 2**33) - 5


def nbytes(x: Tensor, sizes: Sequence[int], fmt: IntegerFormat) -> int:
    return sum(reference.row_nbytes(size, fmt) for size in sizes)


def twin_encode(x: Tensor, sizes: Sequence[int], fmt: IntegerFormat) -> Tensor | None:
    parts = []
    for row, size in enumerate(sizes):
        out = torch.zeros((1, reference.row_nbytes(size, fmt)), dtype=torch.uint8)
        seeds = seeds_of(len(sizes))[row : row + 1]
        if not reference.encode_rows(x[row : row + 1, :size].float(), fmt, seeds, out):
            return None
        parts.append(out[0])
    return torch.cat(parts)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=150, deadline=None)
@given(formats(), values())
def test_payloads_and_values_are_those_of_the_twin(level, fmt, given_values):
    x, lengths = given_values
    rows, n = x.shape
    sizes = [n] * rows if lengths is None else lengths
    expected = twin_encode(x, sizes, fmt)
    out = torch.full((nbytes(x, sizes, fmt),), 171, dtype=torch.uint8)
    with library.forced(level):
        place = kernels.encode(x, lengths, fmt, seeds_of(rows), out)
    assert (place < 0) == (expected is not None)
    if expected is None:
        return
    assert torch.equal(out, expected)
    at = 0
    y = {dtype: torch.full((rows, n), torch.nan, dtype=dtype) for dtype in DTYPES}
    with library.forced(level):
        assert all(kernels.decode(out, lengths, fmt, y[dtype]) for dtype in DTYPES)
    for row, size in enumerate(sizes):
        width = reference.row_nbytes(size, fmt)
        values = reference.decode_rows(out[None, at : at + width], size, fmt)
        assert values is not None
        at += width
        for dtype in DTYPES:
            assert same(y[dtype][row, :size], saturated(values[0], dtype))
            assert not y[dtype][row, size:].any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("in_place", [False, True])
@settings(max_examples=100, deadline=None)
@given(formats(), st.sampled_from(KEPT), values(), st.sampled_from([0, 1, 2]))
def test_the_aq_sgd_step_is_that_of_the_twin(level, in_place, fmt, how, given_values, wide):
    x, lengths = given_values
    x = x if x.dtype != torch.float16 else x.float()
    rows, n = x.shape
    sizes = [n] * rows if lengths is None else lengths
    generator = torch.Generator().manual_seed(n)
    payloads, moved, before = [], [], []
    for row, size in enumerate(sizes):
        start = torch.randn(1, size, generator=generator) + wide * x[row : row + 1, :size].float()
        kept = delta_reference.keep_rows(start, how)
        if kept is None:
            return
        out = torch.zeros((1, reference.row_nbytes(size, fmt)), dtype=torch.uint8)
        seeds = seeds_of(rows)[row : row + 1]
        m = delta_reference.read_rows([kept[0]], size, how)
        y = delta_reference.delta_encode_rows(x[row : row + 1, :size].float(), m, fmt, seeds, out)
        after = None if y is None else delta_reference.keep_rows(y, how)
        before.append(kept[0])
        payloads.append(out[0])
        moved.append(None if after is None or y is None else (after[0], y[0]))
    starts = [row.clone() for row in before]
    targets = before if in_place else [torch.empty_like(row) for row in before]
    out = torch.full((nbytes(x, sizes, fmt),), 171, dtype=torch.uint8)
    energies = torch.empty((rows, 2))
    with library.forced(level):
        place = kernels.delta_encode(
            x, lengths, fmt, seeds_of(rows), out, before, targets, how, energies
        )
    assert (place < 0) == all(row is not None for row in moved)
    if place >= 0:
        return
    assert torch.equal(out, torch.cat(payloads))
    received = [torch.empty_like(row) for row in starts]
    y = torch.full((rows, n), torch.nan, dtype=x.dtype)
    with library.forced(level):
        assert kernels.delta_decode(out, (rows, n), lengths, fmt, starts, received, how, y)
        if in_place:
            assert kernels.delta_decode(out, (rows, n), lengths, fmt, starts, starts, how)
    for row, size in enumerate(sizes):
        pair = moved[row]
        assert pair is not None
        assert same(targets[row], pair[0])
        assert same(received[row], pair[0])
        assert not in_place or same(starts[row], pair[0])
        assert same(y[row, :size], saturated(pair[1], x.dtype))
        assert not y[row, size:].any()


@pytest.mark.parametrize("level", [*LEVELS, library.EAGER])
@pytest.mark.parametrize("group", [32, 100, 0])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_payload_that_could_overflow_when_rotated_back_is_refused(level, group, symmetric):
    n = 200
    fmt = IntegerFormat(4, group, symmetric, False, False, True)
    limit = fmt.limit(n)
    assert limit == 2.0 ** (127 - {32: 5, 100: 6, 0: 7}[group])
    payload = torch.zeros(reference.row_nbytes(n, fmt), dtype=torch.uint8)
    top = 8 if symmetric else 15
    for factor, fits in ((1.0, True), (1.01, False)):
        scale = torch.tensor([limit / top * factor]).to(torch.bfloat16)
        fits = float(scale) * top <= limit
        payload[:2] = scale.view(torch.uint8)
        y = torch.empty(1, n)
        if level == library.EAGER:
            assert (reference.decode_rows(payload[None], n, fmt) is not None) == fits
        else:
            with library.forced(level):
                assert kernels.decode(payload, None, fmt, y) == fits
            assert not fits or bool(torch.isfinite(y).all())


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=100, deadline=None)
@given(formats(), st.integers(1, 300), st.integers(0, 2**31), st.booleans())
def test_any_bytes_decode_to_the_values_of_the_twin_or_are_refused(level, fmt, n, seed, tame):
    generator = torch.Generator().manual_seed(seed)
    size = (reference.row_nbytes(n, fmt),)
    payload = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    if tame:  # else a scale is nearly always negative
        payload[1 : 2 * fmt.groups(n) : 2] &= 0x7F
    expected = reference.decode_rows(payload[None], n, fmt)
    y = torch.empty(1, n)
    with library.forced(level):
        assert kernels.decode(payload, None, fmt, y) == (expected is not None)
    if expected is not None:
        assert bool(torch.isfinite(expected).all())
        assert same(y, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("group", [8, 100, 128, 0])
@pytest.mark.parametrize("at", [0, 77, 127, 299])
def test_a_value_that_is_not_finite_is_named_by_its_place(level, group, at):
    fmt = IntegerFormat(4, group, False, False, False, True)
    x = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    x[1, at] = torch.inf
    out = torch.empty(2 * reference.row_nbytes(300, fmt), dtype=torch.uint8)
    with library.forced(level):
        assert kernels.encode(x, None, fmt, seeds_of(2), out) == 300 + at


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("group", [128, 1000, 0])
def test_bytes_do_not_depend_on_the_number_of_threads(level, group):
    fmt = IntegerFormat(4, group, False, True, False, True)
    x = torch.randn(2, 300_000, generator=torch.Generator().manual_seed(1))
    threads, found = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        out = torch.empty(2 * reference.row_nbytes(300_000, fmt), dtype=torch.uint8)
        y = torch.empty_like(x)
        with library.forced(level):
            assert kernels.encode(x, None, fmt, seeds_of(2), out) < 0
            assert kernels.decode(out, None, fmt, y)
        found.append((out, y))
    torch.set_num_threads(threads)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("power", [*range(21), 22])
def test_a_row_of_any_power_of_two_is_rotated_as_by_the_twin(level, power):
    n = 2**power
    fmt = IntegerFormat(8, 0, False, False, False, True)
    x = torch.randn(1, n, generator=torch.Generator().manual_seed(power))
    out = torch.empty(reference.row_nbytes(n, fmt), dtype=torch.uint8)
    plain, expected = torch.empty_like(out), IntegerFormat(8, 0, False, False, False)
    with library.forced(level):
        assert kernels.encode(x, None, fmt, seeds_of(1), out) < 0
        turned = hadamard.rotate(x, 0)
        assert kernels.encode(turned, None, expected, seeds_of(1), plain) < 0
    assert torch.equal(out, plain)
