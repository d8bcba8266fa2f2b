"""What naive compressors of activations get wrong, for every codec that codes them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codecs.common import LOSSY, normal, quick, round_trip
from thinwire.errors import NonFiniteError

#: Whose decoded values are those of the input or coarser ones on a grid that has the minimum.
KEEPS_ZERO = [
    *("bf16", "fp16", "fp8", "int4:symmetric", "int4", "int5", "int8", "int4:group=row"),
    *("topk:0.3", "topk:0.3/int8", "randk:0.3", "threshold:1", "rudakov-int4", "acsgd-int4"),
]


@pytest.mark.parametrize("spec", KEEPS_ZERO)
def test_zeros_of_a_rectified_tensor_stay_zero(spec):
    x = normal(4, 600).relu()
    y = round_trip(spec, x)
    assert int((x == 0).sum()) > 1000
    assert not y[x == 0].any()


#: fp16 has a range, as have the published quantizers' float16 scales; rows share those.
EQUIVARIANT = [name for name in LOSSY if name not in ("fp16", "acsgd-int4")]


@pytest.mark.parametrize("spec", EQUIVARIANT)
@quick
@given(st.integers(-60, 60), st.integers(0, 9))
def test_a_power_of_two_scales_what_comes_out_exactly(spec, exponent, seed):
    x = normal(3, 200, seed=seed)
    scaled = round_trip(spec, x * 2.0**exponent)
    assert scaled.equal(round_trip(spec, x) * 2.0**exponent)


@pytest.mark.parametrize("spec", ["topk:0.1", "topk:0.1/int4", "threshold:2", "randk:0.1"])
def test_a_value_that_is_not_finite_is_never_left_out_in_silence(spec):
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = normal(2, 50)
        x[1, 7] = bad
        with pytest.raises(NonFiniteError, match=r"\(1, 7\)"):
            round_trip(spec, x)
