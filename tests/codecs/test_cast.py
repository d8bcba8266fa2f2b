"""``bf16``, ``fp16``, ``fp8``."""

import pytest
import torch

from tests.codecs.common import normal, round_trip
from thinwire.codecs import codec
from thinwire.errors import NonFiniteError


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_value_is_the_cast(name, dtype, device):
    x = normal(3, 40, device=device)
    assert torch.equal(round_trip(name, x), x.to(dtype).float())
    assert codec(name).max_nbytes(x.shape, x.dtype) == 2 * 120


@pytest.mark.parametrize(("name", "value"), [("fp16", 65520.0), ("fp16", -1e5), ("bf16", 3.4e38)])
def test_a_value_beyond_the_range_is_an_error_never_an_infinity(name, value):
    x = torch.tensor([[1.0, 2.0], [value, 3.0]])
    with pytest.raises(NonFiniteError, match=rf"{name} cannot hold, at index \(1, 0\)"):
        codec(name).encode(x)


def test_the_largest_fp16_value_passes():
    x = torch.tensor([65504.0, -65504.0])
    assert torch.equal(round_trip("fp16", x), x)


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e8, 1e30])
def test_fp8_keeps_three_bits_of_mantissa_at_any_scale(scale):
    x = normal(4, 100) * scale
    y = round_trip("fp8", x)
    # 2^-4 of the value, or half the spacing of e4m3's subnormals under the row's own scale
    spacing = 2.0**-9 * x.abs().amax(1, keepdim=True) / 448
    assert bool(((y - x).abs() <= torch.maximum(x.abs() / 16, spacing / 2) * 1.001).all())


def test_fp8_rows_have_their_own_scales():
    x = torch.stack([normal(64) * 1e-9, normal(64) * 1e3])
    y = round_trip("fp8", x)
    assert torch.equal(y[:1], round_trip("fp8", x[:1]))
    assert bool(y[0].any())


def test_fp8_costs_a_byte_a_value_and_a_scale_a_row():
    assert codec("fp8").max_nbytes((3, 100), torch.float32) == 3 * (4 + 100)


def test_fp8_zeros_come_back_exactly(device):
    x = torch.zeros(3, 5, device=device)
    assert torch.equal(round_trip("fp8", x), x)


@pytest.mark.parametrize("scale", [3.4028234e38, 1.2e-38, 1e-45])
def test_fp8_takes_the_ends_of_float32(scale):
    x = torch.tensor([scale, -scale, 0.0])
    y = round_trip("fp8", x)
    assert bool(torch.isfinite(y).all())
    assert float((y - x).abs().max()) <= max(scale * 0.07, 2.0**-126 / 448)


@pytest.mark.parametrize("corrupt", [0x7F800000, 0x7FC00000])
def test_fp8_refuses_a_scale_that_is_not_finite(corrupt):
    payload = codec("fp8").encode(normal(1, 8))
    payload[:4] = torch.tensor([corrupt], dtype=torch.int32).view(torch.uint8)
    with pytest.raises(ValueError, match="invalid scale"):
        codec("fp8").decode(payload, (1, 8), torch.float32)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_payload_with_a_value_that_is_not_finite_is_refused(name, value):
    short = torch.ones(2, 5, dtype=torch.bfloat16 if name == "bf16" else torch.float16)
    short[1, 3] = value
    with pytest.raises(ValueError, match="the payload holds"):
        codec(name).decode(short.view(torch.uint8).flatten(), (2, 5), torch.float32)
