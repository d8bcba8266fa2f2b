"""Top-k: the twin against its definition, the byte layout, and the kernels against the twin."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.native import library, topk, topk_kernels
from thinwire.native.topk import Rows

LEVELS = [*library.levels(), library.EAGER]
MODULI = [0, 2, 3, 4, 6, 8, 12, 16, 64, 1024, 1 << 20]
several = settings(max_examples=60, deadline=None)


def rows_of(sizes: list[int], kept: list[int], m: int, itemsize: int = 4) -> Rows:
    s, k = torch.tensor(sizes, dtype=torch.int64), torch.tensor(kept, dtype=torch.int64)
    return Rows(s, k, k * itemsize, m)


def room(rows: Rows) -> int:
    return sum(w + topk.positions_max_nbytes(n, k, rows.modulus) for n, k, w in rows.each())


def encoded(x: Tensor, rows: Rows, level: str = library.EAGER) -> Tensor:
    """The payload, from a buffer of exactly the most bytes; none if a value is not finite."""
    out = torch.full((room(rows),), 171, dtype=torch.uint8)
    with library.forced(level):
        starts = topk_kernels.encode(x, rows, out, None)
    return out[:0] if starts is None else out[: int(starts[-1])]


def decoded(payload: Tensor, rows: Rows, like: Tensor, level: str) -> Tensor | None:
    y = torch.full_like(like, torch.nan)
    with library.forced(level):
        return y if topk_kernels.decode(rows, payload, None, y) else None


def bits(x: Tensor | None) -> Tensor:
    return torch.empty(0) if x is None else x.contiguous().view(torch.uint8)


def expected(x: Tensor, k: int) -> Tensor:
    """By a stable sort, which leaves equal magnitudes in order of position."""
    order = torch.sort(x.double().abs(), stable=True, descending=True).indices[:k]
    y = torch.zeros_like(x)
    y[order] = x[order]
    return y


@st.composite
def rows_of_values(draw) -> Tensor:
    """One row, with ties, zeros of both signs, subnormals and constants."""
    n = draw(st.integers(1, 400) | st.sampled_from([4095, 4096, 4097, 6000]))
    dtype = draw(st.sampled_from(list(topk.DTYPES)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(n, generator=generator, dtype=torch.float32)
    kind = draw(st.sampled_from(["normal", "few", "constant", "relu", "zeros", "tiny", "ramp"]))
    x = {
        "normal": x,
        "few": (2 * x).round(),
        "constant": torch.full_like(x, -3.0),
        "relu": x.relu(),
        "zeros": x.sign() * 0.0,
        "tiny": (4 * x).round() * 2.0**-149,
        "ramp": torch.linspace(0, 1, n, dtype=torch.float32),
    }[kind]
    return x.to(dtype)


@several
@given(rows_of_values(), st.floats(0.0, 1.0), st.sampled_from(MODULI))
def test_exactly_k_are_kept_and_of_equal_ones_the_first(x, share, m):
    k = max(1, math.ceil(share * len(x)))
    rows = rows_of([len(x)], [k], m, x.itemsize)
    for level in LEVELS:
        payload = encoded(x[None], rows, level)
        y = decoded(payload, rows, x[None], level)
        assert torch.equal(bits(y), bits(expected(x, k)[None]))


@several
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=4),
    st.floats(0.0, 1.0),
    st.sampled_from(MODULI),
    st.sampled_from(list(topk.DTYPES)),
    st.integers(0, 2**31),
)
def test_every_level_gives_the_bytes_and_values_of_the_twin(sizes, share, m, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(sizes), max(sizes) + 3, generator=generator).to(dtype)[:, :-3]
    kept = [min(n, max(1, math.ceil(share * n))) for n in sizes]
    rows = rows_of(sizes, kept, m, x.itemsize)
    payload = encoded(x, rows)
    y = decoded(payload, rows, x, library.EAGER)
    for level in LEVELS:
        assert torch.equal(encoded(x, rows, level), payload)
        assert torch.equal(bits(decoded(payload, rows, x, level)), bits(y))


# Long rows take another way: a sample, a bracket, and what to do where it misses.
LONG = 40_000
SHAPES = {
    "normal": lambda r: r,
    "many ties": lambda r: (4 * r).round(),
    "mostly zero": lambda r: torch.where(r > 1.5, r, 0 * r),
    "constant": torch.ones_like,
    "ascending": lambda r: r.sort().values,
    "one channel large": lambda r: torch.where(torch.arange(LONG) % 64 == 0, 100 * r, r),
    "one outlier": lambda r: torch.where(torch.arange(LONG) == 777, 1e9 + 0 * r, 0 * r + 1),
    "two values": lambda r: r.sign() + 2,
    "exponential": lambda r: torch.exp2(8 * r),
}


@pytest.mark.parametrize("share", [1 / LONG, 0.001, 0.0999, 0.1, 0.3, 0.5, 0.99, 1 - 1 / LONG, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_long_rows_are_selected_exactly(shape, share):
    x = SHAPES[shape](torch.randn(LONG, generator=torch.Generator().manual_seed(7)))
    k = math.ceil(share * LONG)
    for dtype in (torch.float32, torch.bfloat16):
        values = x.to(dtype)
        rows = rows_of([LONG], [k], topk.modulus(Fraction(share)), dtype.itemsize)
        payload = encoded(values[None], rows)
        for level in LEVELS:
            assert torch.equal(encoded(values[None], rows, level), payload)
        y = decoded(payload, rows, values[None], LEVELS[0])
        assert torch.equal(bits(y), bits(expected(values, k)[None]))


@pytest.mark.parametrize("n", [1, 70, 5000, LONG])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_is_found_anywhere(n, value):
    for dtype in topk.DTYPES:
        for place in {0, n // 2, n - 1}:
            x = torch.ones(2, n, dtype=dtype)
            x[1, place] = value
            rows = rows_of([n, n], [-(-n // 10)] * 2, 6, dtype.itemsize)
            assert not any(len(encoded(x, rows, level)) for level in LEVELS)


def test_the_layout_of_a_bitmask():
    x = torch.tensor([[0.0, 5, 0, -6, 0, 0, 0, 0, 0, 7, 0]])
    payload = encoded(x, rows_of([11], [3], 0))
    assert payload.tolist() == [*x[0, [1, 3, 9]].view(torch.uint8).tolist(), 0b00001010, 0b10]


def test_the_layout_of_a_golomb_code():
    rows = rows_of([96], [3], 6)
    x = torch.zeros(1, 96)
    x[0, [7, 20, 21]] = 1.0  # gaps 7, 12, 0: digits 0, 0, 0, low bits 1, 0, 0, quotients 1, 2, 0
    assert encoded(x, rows)[12:].tolist() == [0, 0b10010001, 0b1]
    x = torch.zeros(1, 96)
    x[0, [4, 10, 30]] = 1.0  # gaps 4, 5, 19: digits 2, 2, 0, low bits 0, 1, 1, quotients 0, 0, 3
    assert encoded(x, rows)[12:].tolist() == [2 + 2 * 3, 0b00011110, 0b1]


def test_a_code_is_never_longer_than_its_bound_nor_the_bitmask():
    for n in [*range(1, 200), 1000, 32768]:
        for share in (0.001, 0.03, 0.1, 0.2, 0.249):
            k, m = math.ceil(share * n), topk.modulus(Fraction(share))
            bound = topk.positions_max_nbytes(n, k, m)
            assert bound <= -(-n // 8)
            worst = torch.zeros(1, n)
            worst[0, n - k :] = 1.0  # the longest gap first
            found = encoded(worst, rows_of([n], [k], m)).numel() - 4 * k
            assert found <= bound
            assert found >= bound - 1


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.02, 0.1, 0.2, 0.2499])
def test_the_bound_never_shrinks_as_rows_grow(share):
    m = topk.modulus(Fraction(share))
    sizes = [topk.positions_max_nbytes(n, math.ceil(share * n), m) for n in range(1, 20000)]
    assert sizes == sorted(sizes)


def test_the_modulus_keeps_the_expected_length_within_two_percent_of_the_entropy():
    for i in range(5, 2500):
        p = i / 10_000
        m = topk.modulus(Fraction(i, 10_000))
        digit = 1.6 if m % 3 == 0 else 0.0
        low = (m // 3 if m % 3 == 0 else m).bit_length() - 1
        tail = (1 - p) ** m
        length = low + digit + 1 + tail / (1 - tail)
        entropy = -math.log2(p) - (1 - p) / p * math.log2(1 - p)
        assert length <= 1.02 * entropy, p


@pytest.mark.parametrize(("share", "m"), [("0.25", 0), ("1", 0), ("0.2", 3), ("0.1", 6)])
def test_the_modulus_is_part_of_the_format(share, m):
    assert topk.modulus(Fraction(share)) == m


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 120),
    st.sampled_from([0, 2, 3, 6, 12, 16]),
    st.sampled_from([0.02, 0.1, 0.2, 0.4]),
    st.data(),
)
def test_damaged_bytes_are_an_error_or_some_values_alike_on_every_level(n, m, share, data):
    k = math.ceil(share * n)
    rows = rows_of([n], [k], m)
    x = torch.randn(1, n, generator=torch.Generator().manual_seed(n))
    payload = encoded(x, rows).clone()
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(4 * k, payload.numel() - 1))
        payload[place] ^= 1 << data.draw(st.integers(0, 7))
    payload = payload[: data.draw(st.integers(payload.numel() - 2, payload.numel()))]
    results = [decoded(payload, rows, x, level) for level in LEVELS]
    for y in results:
        assert torch.equal(bits(y), bits(results[-1]))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80), st.integers(1, 100), st.sampled_from([0, 3, 8, 12]))
def test_any_bytes_are_an_error_or_some_values_alike_on_every_level(data, n, m):
    rows = rows_of([n, n], [-(-n // 12)] * 2, m)
    payload = torch.tensor(list(data), dtype=torch.uint8)
    like = torch.zeros(2, n)
    results = [decoded(payload, rows, like, level) for level in LEVELS]
    for y in results:
        assert torch.equal(bits(y), bits(results[-1]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_received_value_that_is_not_finite_is_an_error(level, value):
    for k in (3, 40):
        rows = rows_of([100], [k], 12)
        payload = encoded(torch.arange(100.0)[None], rows).clone()
        payload[4:8] = torch.tensor([value]).view(torch.uint8)
        assert decoded(payload, rows, torch.zeros(1, 100), level) is None
