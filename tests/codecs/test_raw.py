"""``raw``: every dtype, to the bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codecs.common import quick, round_trip
from thinwire.codecs import codec

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@quick
@given(st.integers(0, 4), st.integers(0, 20), st.integers(0, 2**32))
def test_any_bits_of_any_dtype_come_back(dtype, rows, n, seed):
    # random bytes: NaN payloads and subnormals among them
    generator = torch.Generator().manual_seed(seed)
    size = (rows, n * dtype.itemsize)
    bits = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    x = bits.view(-1).view(dtype).view(rows, n)
    y = round_trip("raw", x)
    assert torch.equal(y.view(-1).view(torch.uint8), bits.view(-1))


def test_bool_comes_back(device):
    x = torch.tensor([[True, False, True]], device=device)
    assert torch.equal(round_trip("raw", x), x)


def test_nan_and_infinities_pass(device):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], device=device)
    assert torch.equal(round_trip("raw", x).view(torch.int32), x.view(torch.int32))


def test_a_lazily_conjugated_tensor_is_sent_with_its_values():
    x = torch.complex(torch.arange(3.0), torch.arange(3.0)).conj()
    assert torch.equal(round_trip("raw", x), x)


def test_the_payload_is_the_tensors_own_bytes():
    x = torch.tensor([[1.0, -2.0]])
    assert bytes(codec("raw").encode(x).tolist()) == x.numpy().tobytes()


@pytest.mark.parametrize("name", ["raw", "bf16", "fp16", "int4", "fp8"])
@pytest.mark.parametrize("lengths", [None, [1] * 4, [0] * 4])
def test_strides_hidden_by_a_dimension_of_one_or_none_are_no_obstacle(name, lengths):
    x = torch.randn(6, 4).t()  # four rows of six values, column-major
    x = x if lengths else x[:, :1]
    coder = codec(name)
    payload = coder.encode(x, lengths=lengths)
    assert torch.equal(payload, coder.encode(x.contiguous().clone(), lengths=lengths))
