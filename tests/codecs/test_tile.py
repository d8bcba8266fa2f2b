"""``tile``: sizes, error bounds, extremes, independence of rows, damaged payloads."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.codecs.common import FLOATS, normal, quick, round_trip, snr_db
from thinwire.codecs import codec
from thinwire.errors import NonFiniteError, SpecError
from thinwire.native import hadamard, tile
from thinwire.schemes import scheme

BITS = range(3, 9)


def tiles_of(x: Tensor) -> list[Tensor]:
    """[rows, n] as tiles of 32, the last maybe short."""
    return list(x.split(32, 1))


def bounds(x: Tensor, bits: int) -> Tensor:
    """The documented bound on each tile's root mean square error, float64 [rows, tiles]."""
    n = x.shape[1]
    c = codec(f"tile:bits={bits}")
    payload = c.encode(x).view(len(x), -1)
    count = -(-n // 32)
    codes = payload[:, 2 : 2 + count].to(torch.int32) & 63
    widths = tile._widths(codes, n, tile.TileFormat(bits)).double()
    rotated = hadamard.rotate(x, 32).abs().nan_to_num(torch.inf)
    parts = zip(tiles_of(x), tiles_of(rotated), strict=True)
    peak = torch.stack([torch.minimum(a.abs().amax(1), b.amax(1)) for a, b in parts], 1).double()
    top = peak.amax(1, keepdim=True)
    step = 1.0625 * 2 ** (1 - widths) * peak * torch.where(peak < top / 64, 2, 1)
    bound = step + peak / (16 if bits <= 4 else 64)
    gone = (peak < top * 2.0**-20) | (peak < 2.0**-128)
    return torch.where(gone, torch.maximum(bound, peak), bound)


def errors(x: Tensor, y: Tensor) -> Tensor:
    """Root mean square error of each tile, float64 [rows, tiles]."""
    return torch.stack([e.square().mean(1).sqrt() for e in tiles_of(x.double() - y.double())], 1)


def outlier_channels(tokens: int, channels: int) -> Tensor:
    """Log-normal channels of which a few are 20 to 100 times larger; one row of values."""
    scales = torch.exp(0.6 * normal(channels, seed=1))
    scales[::170] *= 60
    return (normal(tokens, channels, seed=2) * scales).reshape(1, -1)


# sizes


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [128, 1024, 16384])
def test_a_value_costs_its_bits_scales_and_all(bits, n):
    size = codec(f"tile:bits={bits}").encode(normal(3, n)).numel()
    assert 3 * (n * bits / 8 - 4) < size <= 3 * n * bits / 8


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [0, 1, 7, 31, 32, 33, 65, 1000])
def test_a_short_tile_costs_a_byte_and_its_values(bits, n):
    full = n // 32 * 32
    c = codec(f"tile:bits={bits}")
    rest = n - full
    expected = c.row_nbytes(full, torch.float32) + bool(rest) + -(-rest // 8) * bits
    expected += 2 if rest and not full else 0
    assert c.encode(normal(2, n)).numel() == 2 * expected


@quick
@given(st.integers(0, 500), st.integers(1, 3), st.sampled_from(BITS), st.floats(-30, 30))
def test_the_size_depends_on_the_length_alone(n, rows, bits, exponent):
    c = codec(f"tile:bits={bits}")
    x = normal(rows, n) ** 5 * 10.0**exponent
    assert c.encode(x).numel() == rows * c.row_nbytes(n, torch.float32)


@pytest.mark.parametrize("bits", [-1, 0, 2, 9])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(SpecError, match=rf"tile: bits={bits} is not within 3 … 8"):
        codec(f"tile:bits={bits}")


def test_the_name_of_the_default_is_tile():
    assert str(codec("tile:bits=4")) == "tile"


# error bounds


@pytest.mark.parametrize("bits", BITS)
@quick
@given(
    seed=st.integers(0, 2**32),
    exponent=st.integers(-37, 35),
    n=st.integers(1, 400),
    power=st.sampled_from([1, 3, 7]),
    mean=st.sampled_from([0, 0, 3, -100]),
)
def test_no_tile_is_off_by_more_than_the_documented_bound(bits, seed, exponent, n, power, mean):
    x = (normal(2, n, seed=seed) + mean).clamp(-101, 101)
    x = (x / x.abs().max()) ** power * 10.0**exponent
    y = round_trip(f"tile:bits={bits}", x)
    rounding = 2.0**-20 * x.double().abs().amax(1, keepdim=True)
    assert bool((errors(x, y) <= bounds(x, bits) + rounding).all())


@pytest.mark.parametrize("bits", BITS)
def test_subnormal_values_are_off_by_the_bound_or_come_back_as_zeros(bits):
    x = torch.arange(-300, 300, dtype=torch.int32).to(torch.float32)[None] * 2.0**-145
    for factor in (1.0, 2.0**8, 2.0**16, 2.0**24):
        y = round_trip(f"tile:bits={bits}", x * factor)
        slack = 2.0**-128 if factor == 1 else 2.0**-140
        assert bool((errors(x * factor, y) <= bounds(x * factor, bits) + slack).all())


@pytest.mark.parametrize("bits", BITS)
@quick
@given(st.integers(0, 2**32), st.floats(1e37, 3.4e38), st.integers(1, 100), st.booleans())
def test_huge_values_come_back_finite_and_within_the_bound(bits, seed, peak, n, one):
    x = normal(1, n, seed=seed)
    if one:
        x = x * 1e-3
        x[0, n // 2] = 5.0
    x = x / x.abs().max() * peak
    y = round_trip(f"tile:bits={bits}", x)
    assert bool(torch.isfinite(y).all())
    # the largest scale is 1.875 * 2**127
    assert float((y.double() - x.double()).abs().max()) <= peak * (2 ** (1 - 2) + 0.125)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [1.0, -3.3, 1e-35, 1e38, 65504.0])
@pytest.mark.parametrize("n", [1, 31, 32, 100])
def test_a_constant_tile_comes_back_within_a_rounding_of_its_scale(bits, value, n, device):
    x = torch.full((2, n), value, device=device)
    y = round_trip(f"tile:bits={bits}", x)
    limit = abs(value) / (15.9 if bits <= 4 else 9.1)  # from 5 bits on scales are rounded up
    assert bool(((y - x).abs() <= limit).all())
    assert bool((y == y[:, :1]).all()) or n > 32


@pytest.mark.parametrize("bits", BITS)
def test_a_constant_scale_comes_back_exactly(bits):
    x = torch.full((2, 96), -0.875)
    assert torch.equal(round_trip(f"tile:bits={bits}", x), x)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [0, 1, 31, 32, 100])
def test_zeros_come_back_exactly(bits, n, device):
    x = torch.zeros(2, n, device=device)
    assert torch.equal(round_trip(f"tile:bits={bits}", x), x)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("at", [0, 5, 31, 40, 95, 98])
@pytest.mark.parametrize("value", [1.0, -1e-30, 3e38])
def test_one_outlier_among_zeros_comes_back_and_leaves_other_tiles_zero(bits, at, value):
    x = torch.zeros(1, 99)
    x[0, at] = value
    y = round_trip(f"tile:bits={bits}", x)
    first = at // 32 * 32
    assert abs(float(y[0, at]) / value - 1) < 0.3
    assert not y[0, :first].any()
    assert not y[0, first + 32 :].any()
    assert float((y - x).abs().max()) < abs(value) * 0.3


def test_zeros_among_values_stay_zero_where_no_rotation_helps():
    x = torch.where(torch.arange(64) % 2 == 0, 1.0, 0.0)[None] * torch.tensor([1.0, -1.0]).repeat(
        32
    )
    y = round_trip("tile", x)
    assert not y[x == 0].any()


# gain and symmetry


@pytest.mark.parametrize("bits", BITS)
@quick
@given(seed=st.integers(0, 2**32), n=st.integers(1, 300))
def test_both_signs_are_treated_alike(bits, seed, n):
    x = normal(2, n, seed=seed)
    spec = f"tile:bits={bits}"
    assert torch.equal(round_trip(spec, -x), -round_trip(spec, x))


@pytest.mark.parametrize("power", [-90, -60, -27, -1, 13, 100])
def test_powers_of_two_scale_exactly(power):
    x = normal(8, 500)
    assert torch.equal(round_trip("tile", x * 2.0**power), round_trip("tile", x) * 2.0**power)


@pytest.mark.parametrize("bits", range(4, 9))
@pytest.mark.parametrize("factor", [1e-8, 3e-5, 0.1, 7.0, 1e4])
def test_the_gain_is_one_per_cent_exact_at_any_scale(bits, factor):
    x = normal(8, 512)
    y = round_trip(f"tile:bits={bits}", x * factor) / factor
    assert float((x * y).sum() / (x * x).sum()) == pytest.approx(1, abs=0.01)


# quality


@pytest.mark.parametrize(("bits", "db"), [(3, 13.5), (4, 19.8), (5, 25.8), (6, 31.8), (8, 43.7)])
def test_gaussian_values(bits, db):
    x = normal(16, 16384)
    assert snr_db(x, round_trip(f"tile:bits={bits}", x)) > db


def test_outlier_channels_are_10_db_better_than_int4():
    x = outlier_channels(32, 1024)
    assert snr_db(x, round_trip("tile", x)) > snr_db(x, round_trip("int4", x)) + 10


def test_rows_of_tokens_with_unequal_scales_are_2_db_better_than_int4():
    x = (normal(128, 128) * torch.exp(normal(128, 1, seed=3))).reshape(1, -1)
    assert snr_db(x, round_trip("tile", x)) > snr_db(x, round_trip("int4", x)) + 2


def test_small_tokens_beside_a_massive_one_survive():
    x = normal(64, 128)
    x[0] *= 3000
    y = round_trip("tile", x.reshape(1, -1)).view_as(x)
    assert snr_db(x[1:], y[1:]) > 3


# rows, dtypes


@quick
@given(st.integers(1, 300), st.integers(2, 5), st.sampled_from(BITS))
def test_a_row_has_the_same_bytes_alone_and_in_any_batch(n, rows, bits):
    x = normal(rows, n) * torch.logspace(-20, 20, rows)[:, None]
    c = codec(f"tile:bits={bits}")
    whole = c.encode(x).view(rows, -1)
    for row in range(rows):
        assert torch.equal(c.encode(x[row : row + 1]), whole[row])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (0, 5), (5, 0), (3, 5, 7), (2, 40)])
def test_any_shape_and_float_dtype_comes_back(dtype, shape, device):
    x = normal(*shape, device=device).to(dtype)
    y = round_trip("tile", x)
    assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
    assert bool(((y - x).abs() <= 1.0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_coded_as_their_float32_values(dtype):
    x = normal(3, 200).to(dtype)
    assert torch.equal(codec("tile").encode(x), codec("tile").encode(x.float()))


@quick
@given(st.lists(st.integers(0, 200), min_size=1, max_size=6))
def test_rows_of_mixed_lengths_are_the_bytes_of_each_row_cut_to_its_length(lengths):
    x = normal(len(lengths), 200)
    c = codec("tile")
    parts = [c.encode(x[i : i + 1, :size]) for i, size in enumerate(lengths)]
    payload = c.encode(x, lengths=lengths)
    assert torch.equal(payload, torch.cat(parts))
    y = c.decode(payload, x.shape, x.dtype, lengths=lengths)
    for i, size in enumerate(lengths):
        assert torch.equal(y[i : i + 1, :size], round_trip("tile", x[i : i + 1, :size]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [0, 45, 69])
def test_a_value_that_is_not_finite_is_an_error_with_its_index(value, column):
    x = normal(2, 70)
    x[1, column] = value
    with pytest.raises(NonFiniteError, match=rf"\(1, {column}\)"):
        codec("tile").encode(x)


# damaged payloads


@quick
@given(st.sampled_from(BITS), st.binary(min_size=160, max_size=160))
def test_any_bytes_decode_to_finite_values_or_an_error(bits, noise):
    c = codec(f"tile:bits={bits}")
    n = 150
    payload = torch.frombuffer(bytearray(noise), dtype=torch.uint8)
    payload = payload[: c.row_nbytes(n, torch.float32)]
    try:
        y = c.decode(payload, (1, n), torch.float32)
    except ValueError:
        return
    assert bool(torch.isfinite(y).all())


def test_a_scale_beyond_float32_is_refused():
    payload = codec("tile").encode(normal(1, 64))
    payload[1] = 0xFF
    with pytest.raises(ValueError, match="invalid scale"):
        codec("tile").decode(payload, (1, 64), torch.float32)


@pytest.mark.parametrize("spec", ["tile", "tile:bits=3", "tile:bits=8", "topk:0.1/tile"])
def test_what_a_row_takes_at_most_covers_shorter_rows_that_take_more(spec):
    c = codec(spec)
    sizes = [c.row_nbytes(n, torch.float32) for n in range(700)]
    assert any(longer < shorter for shorter, longer in pairwise(sizes))
    for n in range(700):
        most = c.most_row_nbytes(n, torch.float32)
        assert most >= max(sizes[: n + 1])
        assert scheme(f"delta({spec},first={spec})").row_nbytes(n, torch.float32) == most
