"""The kernels of the codec tile against the twin, bit for bit, on every level."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codecs.base import saturated
from thinwire.native import library, tile, tile_kernels
from thinwire.native.tile import TileFormat

LEVELS = library.levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason=f"no library: {library.why_missing()}")
DTYPES = list(tile_kernels.DTYPES)


@st.composite
def values(draw: st.DrawFn) -> tuple[Tensor, list[int] | None]:
    """[rows, n] of some dtype, with tiles of equal or unequal size, and, maybe, lengths."""
    n = draw(st.integers(0, 400) | st.integers(500, 3000) | st.just(20000))
    rows = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, n, generator=generator) ** draw(st.sampled_from([1, 1, 5]))
    spread = draw(st.sampled_from([0, 0, 3, 30, 60]))
    tiles = torch.randn(rows, -(-n // 32), generator=generator) * spread
    x = x * tiles.exp2().repeat_interleave(32, 1)[:, :n]
    x = x * 2.0 ** draw(st.sampled_from([0, 0, -148, -140, -70, 60, 110, 122]))
    x = x + draw(st.sampled_from([0.0, 0.0, 1000.0]))
    x = torch.where(
        torch.rand(rows, n, generator=generator) < draw(st.sampled_from([0, 0.6])), 0, x
    )
    x = x.to(draw(st.sampled_from(DTYPES)))
    ragged = st.lists(st.integers(0, n), min_size=rows, max_size=rows)
    return x, draw(st.none() | ragged)


def twin_encode(x: Tensor, sizes: list[int], fmt: TileFormat) -> Tensor | None:
    parts = []
    for row, size in enumerate(sizes):
        out = torch.zeros((1, tile.row_nbytes(size, fmt)), dtype=torch.uint8)
        if not tile.encode_rows(x[row : row + 1, :size].float(), fmt, torch.zeros(1), out):
            return None
        parts.append(out[0])
    return torch.cat(parts)


def check_decoding(payload: Tensor, sizes: list[int], fmt: TileFormat, n: int, level: str) -> None:
    """That all dtypes come out as from the twin, or that both refuse."""
    for dtype in DTYPES:
        y = torch.full((len(sizes), n), torch.nan, dtype=dtype)
        with library.forced(level):
            accepted = tile_kernels.decode(payload, sizes, fmt, y)
        at, expected = 0, []
        for size in sizes:
            width = tile.row_nbytes(size, fmt)
            expected.append(tile.decode_rows(payload[None, at : at + width], size, fmt))
            at += width
        assert accepted == all(values is not None for values in expected)
        if not accepted:
            return
        for row, (size, values) in enumerate(zip(sizes, expected, strict=True)):
            assert values is not None
            same = saturated(values[0], dtype)
            assert torch.equal(y[row, :size].view(torch.uint8), same.view(torch.uint8))
            assert not y[row, size:].any()


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=200, deadline=None)
@given(st.integers(3, 8), values())
def test_payloads_and_values_are_those_of_the_twin(level, bits, given_values):
    (x, lengths), fmt = given_values, TileFormat(bits)
    rows, n = x.shape
    sizes = [n] * rows if lengths is None else lengths
    expected = twin_encode(x, sizes, fmt)
    room = sum(tile.row_nbytes(size, fmt) for size in sizes)
    buffer = torch.full((room + 64,), 171, dtype=torch.uint8)
    with library.forced(level):
        place = tile_kernels.encode(x, lengths, fmt, buffer[:room])
    assert (place < 0) == (expected is not None)
    assert bool((buffer[room:] == 171).all())
    if expected is not None:
        assert torch.equal(buffer[:room], expected)
        check_decoding(expected, sizes, fmt, n, level)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=100, deadline=None)
@given(
    st.integers(3, 8),
    st.lists(st.integers(0, 700), min_size=1, max_size=3),
    st.integers(0, 2**31),
    st.integers(0, 0x7FF),
)
def test_any_bytes_decode_to_the_values_of_the_twin_or_are_refused(level, bits, sizes, seed, top):
    fmt = TileFormat(bits)
    generator = torch.Generator().manual_seed(seed)
    widths = [tile.row_nbytes(size, fmt) for size in sizes]
    payload = torch.randint(0, 256, (sum(widths),), generator=generator, dtype=torch.uint8)
    for at, width in zip(torch.tensor([0, *widths]).cumsum(0).tolist(), widths, strict=False):
        if width:
            payload[at], payload[at + 1] = top & 255, top >> 8
    # exactly as long as the payload: reading beyond its end would be reading beyond the tensor's
    check_decoding(payload.clone(), sizes, fmt, max(sizes), level)


@pytest.mark.parametrize("level", [*LEVELS, library.EAGER])
@pytest.mark.parametrize("n", [64, 70])
def test_tiles_too_small_for_a_scale_get_the_code_of_zero(level, n):
    x = torch.full((1, n), 1e30)
    x[0, 40] = 3e38  # 2**28 times as much; a lifted 1e30 would be infinite
    fmt = TileFormat(4)
    out = torch.zeros((1, tile.row_nbytes(n, fmt)), dtype=torch.uint8)
    if level == library.EAGER:
        assert tile.encode_rows(x, fmt, torch.zeros(1), out)
    else:
        with library.forced(level):
            assert tile_kernels.encode(x, None, fmt, out[0]) < 0
    head = -(-n // 32)
    assert out[0, 2] == 0
    assert set(out[0, 2 + head : 2 + head + 8].tolist()) == {0xAA}  # 2 bits, each code 2


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 31, 32, 95, 98])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_named_by_its_place(level, dtype, at, value):
    x = torch.randn(3, 99, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[2, at] = value
    out = torch.empty(3 * tile.row_nbytes(99, TileFormat(4)), dtype=torch.uint8)
    with library.forced(level):
        assert tile_kernels.encode(x, None, TileFormat(4), out) == 2 * 99 + at


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("lengths", [None, [30000, 12345, 0, 32, 31, 29999, 1]], ids=str)
def test_bytes_do_not_depend_on_the_number_of_threads(level, lengths):
    fmt, rows, n = TileFormat(4), 7, 30000
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(1))
    room = sum(tile.row_nbytes(size, fmt) for size in lengths or [n] * rows)
    threads, found = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        out, y = torch.empty(room, dtype=torch.uint8), torch.empty_like(x)
        with library.forced(level):
            assert tile_kernels.encode(x, lengths, fmt, out) < 0
            assert tile_kernels.decode(out, lengths, fmt, y)
        found.append((out, y))
    torch.set_num_threads(threads)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("level", LEVELS)
def test_a_long_row_is_that_of_the_twin(level):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 4_000_001, generator=generator) * torch.randn(4_000_001).exp()
    fmt = TileFormat(4)
    expected = torch.empty((1, tile.row_nbytes(x.shape[1], fmt)), dtype=torch.uint8)
    assert tile.encode_rows(x, fmt, torch.zeros(1), expected)
    out, y = torch.empty_like(expected[0]), torch.empty_like(x)
    with library.forced(level):
        assert tile_kernels.encode(x, None, fmt, out) < 0
        assert tile_kernels.decode(out, None, fmt, y)
    assert torch.equal(out, expected[0])
    values = tile.decode_rows(expected, x.shape[1], fmt)
    assert values is not None
    assert torch.equal(y, values)
