"""The codecs as torch operators: the same bytes, and shapes known without running them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.codecs.common import normal
from thinwire.codecs import codec, ops  # noqa: F401  registers the operators

SPECS = ["int4", "int2", "tile", "bf16", "int8:round=stochastic"]


@pytest.mark.parametrize("spec", SPECS)
def test_the_operators_are_the_codec(spec):
    x = normal(3, 200)
    payload = torch.ops.thinwire.encode(x, spec, 7)
    assert torch.equal(payload, codec(spec).encode(x, seed=7))
    y = torch.ops.thinwire.decode(payload, spec, x.shape, x.dtype)
    assert torch.equal(y, codec(spec).decode(payload, x.shape, x.dtype))


@pytest.mark.parametrize("spec", SPECS)
def test_fake_tensors_have_the_shapes_of_real_ones(spec):
    real = torch.ops.thinwire.encode(normal(3, 200), spec)
    with FakeTensorMode():
        x = torch.empty(3, 200)
        payload = torch.ops.thinwire.encode(x, spec)
        assert payload.shape == real.shape
        assert payload.dtype == torch.uint8
        y = torch.ops.thinwire.decode(payload, spec, x.shape, torch.bfloat16)
        assert y.shape == x.shape
        assert y.dtype == torch.bfloat16


def test_both_ends_of_a_delta_stay_equal():
    here, there = torch.zeros(2, 300), torch.zeros(2, 300)
    for seed in range(3):
        payload = torch.ops.thinwire.delta_encode(normal(2, 300, seed=seed), here, "int4")
        y = torch.ops.thinwire.delta_decode(payload, there, "int4")
        assert torch.equal(here, there)
        assert torch.equal(y, there)


@pytest.mark.parametrize("name", ["encode", "decode", "delta_encode", "delta_decode"])
def test_the_operators_pass_torchs_own_checks(name):
    x, m = normal(2, 64), torch.zeros(2, 64)
    payload = codec("int4").encode(x)
    arguments = {
        "encode": (x, "int4"),
        "decode": (payload, "int4", (2, 64), torch.float32),
        "delta_encode": (x, m, "int4"),
        "delta_decode": (payload, m, "int4"),
    }
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        getattr(torch.ops.thinwire, name).default, arguments[name], test_utils=checks
    )


def test_a_codec_of_varying_size_is_refused():
    with pytest.raises(ValueError, match=r"fixed size, not 'topk:0.01'"):
        torch.ops.thinwire.encode(normal(4), "topk:0.01")


@pytest.mark.parametrize(
    "strided", [lambda m: m.t().contiguous().t(), lambda m: torch.cat([m, m], 1)[:, : m.shape[1]]]
)
def test_references_of_any_stride_move_as_contiguous_ones(strided):
    x, there = normal(4, 256), torch.zeros(4, 256)
    m = strided(torch.zeros(4, 256))
    payload = torch.ops.thinwire.delta_encode(x, m, "int4")
    assert torch.equal(payload, torch.ops.thinwire.delta_encode(x, there, "int4"))
    assert torch.equal(m, there)
