"""``int1`` … ``int8``: sizes, error bounds, symmetry, gain, unbiasedness."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.codecs.common import normal, quick, round_trip, snr_db
from thinwire.codecs import codec
from thinwire.errors import NonFiniteError
from thinwire.native import hadamard

WIDTHS = range(1, 9)
SMALLEST_BF16 = 2.0**-133


def per_group(x: Tensor, size: int, reduce: str) -> Tensor:
    """``amin`` or ``amax`` of each value's group, spread to the values; x [rows, n]."""
    groups = x.split(size, 1)
    ends: list[Tensor] = [getattr(g, reduce)(1, keepdim=True) for g in groups]
    return torch.cat([end.expand_as(g) for end, g in zip(ends, groups, strict=True)], 1)


def half_ulp(y: Tensor) -> Tensor:
    """Half the spacing of float32 at each |y|, in float64."""
    y = y.abs()
    above = torch.nextafter(y, torch.full_like(y, torch.inf))
    half: Tensor = (above.double() - y.double()) / 2
    return half


def half_step(x: Tensor, bits: int, size: int, symmetric: bool = False) -> Tensor:
    """Half a step of each value's group, float64, as the range scales define it."""
    x = x.double()
    span, steps = per_group(x, size, "amax") - per_group(x, size, "amin"), 2**bits - 1
    if symmetric:
        span, steps = per_group(x.abs(), size, "amax"), 2 ** (bits - 1) - 1
    half: Tensor = span / steps / 2
    return half


# sizes


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("n", [1, 7, 8, 9, 127, 128, 129, 1000])
def test_the_payload_is_scales_offsets_and_bits_per_value(bits, n):
    groups = -(-n // 128)
    codes = -(-n // 8) * bits
    assert codec(f"int{bits}").encode(normal(3, n)).numel() == 3 * (groups * 6 + codes)
    symmetric = codec(f"int{bits}:symmetric,scale={'std' if bits == 1 else 'range'}")
    assert symmetric.encode(normal(3, n)).numel() == 3 * (groups * 2 + codes)


def test_three_bits_cost_three_bits():
    assert codec("int3").encode(normal(1, 1024)).numel() == 8 * 6 + 1024 * 3 // 8


def test_a_whole_row_may_share_a_scale():
    assert codec("int4:group=row").encode(normal(2, 1001)).numel() == 2 * (6 + 126 * 4)


# error bounds


@pytest.mark.parametrize("bits", range(2, 9))
@quick
@given(
    seed=st.integers(0, 2**32),
    exponent=st.integers(-30, 30),
    mean=st.sampled_from([0, 1, -30, 1000]),
    n=st.integers(1, 400),
    group=st.sampled_from([8, 64, 100, 128, 512]),
    uniform=st.booleans(),
)
def test_no_value_is_off_by_more_than_half_a_step_of_its_groups_range(
    bits, seed, exponent, mean, n, group, uniform
):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand if uniform else torch.randn
    x = (draw(2, n, generator=generator, dtype=torch.float32) + 6 * mean) * 10.0**exponent
    y = round_trip(f"int{bits}:scale=range,group={group}", x)
    bound = half_step(x, bits, group) * 1.02 + half_ulp(y)
    assert bool(((y.double() - x.double()).abs() <= bound).all())


@pytest.mark.parametrize("bits", range(2, 9))
@quick
@given(seed=st.integers(0, 2**32), exponent=st.integers(-30, 30), n=st.integers(1, 300))
def test_symmetric_values_are_off_by_at_most_half_a_step_of_the_peak(bits, seed, exponent, n):
    x = normal(2, n, seed=seed) * 10.0**exponent
    y = round_trip(f"int{bits}:symmetric,scale=range", x)
    bound = half_step(x, bits, 128, symmetric=True) * 1.02
    assert bool(((y.double() - x.double()).abs() <= bound).all())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("options", ["", ",symmetric"])
def test_subnormal_groups_are_off_by_half_a_step_or_half_the_smallest_scale(bits, options):
    x = torch.arange(-300, 300, dtype=torch.int32).to(torch.float32)[None] * 2.0**-145
    y = round_trip(f"int{bits}:scale=range{options}", x)
    bound = half_step(x, bits, 128, symmetric="sym" in options) * 1.02
    # a scale's error counts once a code
    bound = bound + SMALLEST_BF16 / 2
    assert bool(((y.double() - x.double()).abs() <= bound).all())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.3, 1e-42, 1e38, 65504.0])
@pytest.mark.parametrize("n", [1, 64, 128])
def test_a_constant_group_comes_back_exactly(bits, value, n, device):
    x = torch.full((2, n), value, device=device)
    assert torch.equal(round_trip(f"int{bits}", x), x)
    if bits > 2:
        assert torch.equal(round_trip(f"int{bits}:round=stochastic", x), x)


@pytest.mark.parametrize("n", [3, 100, 127])
def test_a_constant_group_of_any_size_is_within_a_rounding_of_its_mean(n):
    x = torch.full((1, n), 3.3)
    for spec in ("int1", "int2", "int4:scale=std"):
        assert torch.allclose(round_trip(spec, x), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", ["symmetric", "symmetric,scale=std"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_zeros_come_back_exactly_in_symmetric_formats(bits, options, device):
    x = torch.zeros(2, 100, device=device)
    assert torch.equal(round_trip(f"int{bits}:{options}", x), x)


@pytest.mark.parametrize("spec", ["int2", "int3", "int4", "int8", "int4:symmetric"])
def test_tiny_gradients_survive(spec):
    x = normal(2, 128) * 1e-9
    assert snr_db(x, round_trip(spec, x)) > 5


def test_a_range_beyond_float32_is_an_error():
    x = torch.tensor([[1.0, 3e38, -3e38]])
    with pytest.raises(NonFiniteError, match=r"int4 cannot hold, at index \(0, 1\)"):
        codec("int4").encode(x)


@pytest.mark.parametrize("bits", WIDTHS)
@quick
@given(st.floats(1, 2 - 2.0**-23), st.integers(0, 2**32))
def test_what_is_encoded_decodes_to_finite_values_near_the_end_of_float32(bits, peak, seed):
    x = normal(1, 64, seed=seed).clamp(-1, 1).abs() * peak * 2.0**127
    for options in ("", ":symmetric", ":scale=range" if bits > 1 else ""):
        try:
            y = round_trip(f"int{bits}{options}", x)
        except NonFiniteError:
            continue
        assert bool(torch.isfinite(y).all())


# symmetry and gain


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("scale", ["range", "std"])
@quick
@given(seed=st.integers(0, 2**32), n=st.integers(1, 300))
def test_a_symmetric_format_treats_both_signs_alike(bits, scale, seed, n):
    if bits == 1:
        scale = "std"
    x = normal(2, n, seed=seed)
    spec = f"int{bits}:symmetric,scale={scale}"
    assert torch.equal(round_trip(spec, -x), -round_trip(spec, x))


def test_the_positive_end_is_not_clipped_at_two_bits():
    x = torch.tensor([[1.0, -1.0, 0.0, 0.2, -0.2, 1.0, -1.0, 0.0]])
    assert torch.equal(round_trip("int2:symmetric,scale=range", x), x.round())


SPECS = ["int2", "int3", "int4", "int8", "int4:symmetric", "int1", "int3:scale=std"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("factor", [1e-8, 3e-5, 0.1, 7.0, 1e4])
def test_the_gain_is_one_per_cent_exact_at_any_scale(spec, factor):
    x = normal(8, 512)
    scaled = round_trip(spec, x * factor)
    assert float(scaled.norm() / factor / round_trip(spec, x).norm()) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("power", [-90, -60, -27, -1, 13, 100])
def test_powers_of_two_scale_exactly(spec, power):
    x = normal(8, 512)
    assert torch.equal(round_trip(spec, x * 2.0**power), round_trip(spec, x) * 2.0**power)


# the std scale


@pytest.mark.parametrize(("bits", "db"), [(1, 4.40), (2, 9.25), (3, 14.27), (4, 19.38), (5, 24.57)])
@pytest.mark.parametrize("symmetric", ["", ",symmetric"])
def test_the_std_scale_reaches_the_lloyd_figure_on_gaussian_values(bits, db, symmetric):
    x = normal(64, 4096)
    y = round_trip(f"int{bits}:scale=std,group=1024{symmetric}", x)
    assert snr_db(x, y) > db - 0.1


def test_two_bits_are_3_db_better_by_default_than_with_a_range_scale():
    x = normal(512, 1024)
    assert snr_db(x, round_trip("int2", x)) > snr_db(x, round_trip("int2:scale=range", x)) + 3


def test_the_std_scale_follows_the_mean():
    x = normal(16, 512) + 1000
    assert snr_db(x - 1000, round_trip("int2", x) - 1000) > 9


# stochastic rounding


@pytest.mark.parametrize(
    "spec", ["int1", "int2", "int2:symmetric", "int3", "int4:symmetric", "int8"]
)
@pytest.mark.parametrize("shape", ["normal", "one outlier"])
def test_stochastic_rounding_is_unbiased_without_a_dead_zone(spec, shape, device):
    repeats = 4096
    x = normal(1, 64)
    if shape == "one outlier":  # all others lie deep inside the first step
        x = torch.cat([x[:, :63] * 0.01, torch.tensor([[3.0]])], 1)
    if spec == "int1":
        spec = "int1:scale=range"
    spec += ("," if ":" in spec else ":") + "round=stochastic"
    batch = x.to(device).expand(repeats, 64)
    y = round_trip(spec, batch, seed=torch.arange(repeats)).double().cpu()
    levels = y.unique()
    step = float(levels.diff().max())
    error = (y.mean(0) - x[0].double()).abs()
    # Bernoulli rounding: a deviation of at most half a step; 5 standard errors over 64 values
    variance = y.var(0).clamp(min=(step / 50) ** 2)
    assert bool((error <= 5 * (variance / repeats).sqrt()).all())


@pytest.mark.parametrize("spec", ["int2", "int3", "int3:symmetric"])
def test_the_stochastic_error_meets_the_aq_sgd_bound(spec):
    x = normal(128, 1024)
    spec += ("," if ":" in spec else ":") + "round=stochastic"
    y = round_trip(spec, x, seed=torch.arange(128))
    assert float((y - x).norm() / x.norm()) < 0.707


def test_stochastic_rounding_follows_its_seed():
    x = normal(2, 64)
    c = codec("int4:round=stochastic")
    assert torch.equal(c.encode(x, seed=1), c.encode(x, seed=1))
    assert not torch.equal(c.encode(x, seed=1), c.encode(x, seed=2))
    assert torch.equal(c.encode(x, seed=-1), c.encode(x, seed=2**64 - 1))


def test_decoding_needs_no_seed():
    x = normal(4, 100)
    c = codec("int4:round=stochastic")
    y = c.decode(c.encode(x, seed=77), x.shape, x.dtype)
    assert bool(((y - x).abs() <= half_step(x, 4, 128) * 2.04).all())


# the Hadamard rotation


@pytest.mark.parametrize("group", [32, 100, 128, "row"])
def test_a_rotated_codec_is_the_plain_one_on_rotated_values(group, device):
    x = normal(3, 700, device=device)
    size = 0 if group == "row" else group
    turned = hadamard.rotate(x, size)
    payload = codec(f"int4:group={group},hadamard").encode(x)
    assert torch.equal(payload, codec(f"int4:group={group}").encode(turned))
    y = codec(f"int4:group={group}").decode(payload, x.shape, torch.float32)
    expected = hadamard.unrotate(y, size)
    assert torch.equal(
        codec(f"int4:group={group},hadamard").decode(payload, x.shape, x.dtype), expected
    )


def test_outliers_are_10_db_better_off_with_a_rotation():
    x = normal(64, 1024)
    x[:, ::100] *= 40
    plain, turned = round_trip("int4", x), round_trip("int4:hadamard", x)
    ordinary = (torch.arange(1024) % 100) != 0
    assert snr_db(x, turned) > snr_db(x, plain)
    assert (
        snr_db(x[:, ordinary], turned[:, ordinary])
        > snr_db(x[:, ordinary], plain[:, ordinary]) + 10
    )


@pytest.mark.parametrize("spec", ["int4:hadamard", "int4:hadamard,group=row", "int2:hadamard"])
@pytest.mark.parametrize("value", [1e35, 1e38, 3.4e38])
def test_what_could_overflow_when_rotated_back_is_an_error_or_finite(spec, value):
    x = normal(2, 1000).clamp(-1, 1) * value
    try:
        y = round_trip(spec, x)
    except NonFiniteError:
        return
    assert bool(torch.isfinite(y).all())


# damaged payloads


@pytest.mark.parametrize("value", [0x7F80, 0x7FC0, 0xBF80], ids=["inf", "nan", "negative"])
@pytest.mark.parametrize("spec", ["int4", "int2", "int4:symmetric"])
def test_an_invalid_scale_is_refused(spec, value):
    payload = codec(spec).encode(normal(2, 300))
    payload[2:4] = torch.tensor([value]).to(torch.uint16).view(torch.uint8)
    with pytest.raises(ValueError, match="invalid scale or offset"):
        codec(spec).decode(payload, (2, 300), torch.float32)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_an_invalid_offset_is_refused(value):
    payload = codec("int4").encode(normal(2, 300))
    payload[6:10] = torch.tensor([value]).view(torch.uint8)
    with pytest.raises(ValueError, match="invalid scale or offset"):
        codec("int4").decode(payload, (2, 300), torch.float32)


@quick
@given(st.sampled_from([f"int{b}" for b in WIDTHS]), st.binary(min_size=150, max_size=150))
def test_any_bytes_decode_to_finite_values_or_an_error(spec, noise):
    c = codec(spec)
    n = 128
    payload = torch.frombuffer(bytearray(noise), dtype=torch.uint8)[
        : c.row_nbytes(n, torch.float32)
    ]
    try:
        y = c.decode(payload, (payload.numel() and n,), torch.float32)
    except ValueError:
        return
    assert bool(torch.isfinite(y).all())
