"""Selections that ``topk`` is compared with, and quantizers of published code."""

import pytest
import torch

from tests.codecs.common import normal, round_trip
from thinwire.codecs import codec
from thinwire.codecs.threshold import Threshold
from thinwire.errors import NonFiniteError, SpecError


def test_randk_keeps_exactly_so_many_and_what_it_keeps_is_exact():
    x = normal(5, 997)
    y = round_trip("randk:0.1", x, seed=torch.arange(5))
    kept = y != 0
    assert kept.sum(1).tolist() == [100] * 5
    assert y[kept].equal(x[kept])
    assert not kept[0].equal(kept[1])
    again = round_trip("randk:0.1", x, seed=torch.arange(5))
    assert again.equal(y)


def test_randk_chooses_every_position_equally_often():
    x = torch.ones(4000, 20)
    y = round_trip("randk:0.25", x, seed=torch.arange(4000))
    assert float((y.mean(0) - 0.25).abs().max()) < 0.03


def test_unbiased_randk_is_so():
    x = normal(1, 50).expand(6000, 50)
    y = round_trip("randk:0.2,unbiased", x, seed=torch.arange(6000))
    assert float((y.mean(0) - x[0]).abs().max()) < 0.15 * float(x.abs().max())


def test_randk_sends_a_seed_instead_of_positions():
    assert codec("randk:0.1/int8").encode(normal(1, 1000)).numel() == 8 + codec("int8").row_nbytes(
        100, torch.float32
    )


def test_threshold_keeps_what_is_beyond_it():
    x = normal(3, 5000)
    y = round_trip("threshold:2", x)
    limit = 2 * x.square().mean(1, keepdim=True).sqrt()
    assert y.equal(torch.where(x.abs() > limit, x, torch.zeros_like(x)))


@pytest.mark.parametrize("factor", ["0.5", "1", "3.25"])
def test_threshold_keeps_at_least_one_and_never_more_than_can_be_so_far_off(factor):
    for row in (torch.ones(64), torch.zeros(64), torch.eye(64)[3] * 1e30, normal(64)):
        y = round_trip(f"threshold:{factor}", row)
        most = Threshold(factor).most(64)
        assert bool((y == row).any())
        assert int((y != 0).sum()) <= most


@pytest.mark.parametrize("spec", ["threshold:0", "threshold:-1", "threshold:x", "threshold:2/topk"])
def test_a_factor_that_is_none_is_refused(spec):
    with pytest.raises(SpecError, match="threshold"):
        codec(spec)


def test_a_tensor_has_one_range_as_published():
    x = torch.tensor([[-1.0, 0.0, 2.0], [5.0, 1.0, 1.0]])
    y = round_trip("rudakov-int2", x)
    assert y.tolist() == [[-1.0, -1.0, 3.0], [5.0, 1.0, 1.0]]  # half to even; -1, 1, 3, 5
    assert len(round_trip("rudakov-int1", normal(4, 99)).unique()) == 2
    constant = torch.full((2, 7), 0.3)
    assert round_trip("rudakov-int4", constant).equal(constant)


def test_a_zero_stays_one_where_nothing_is_negative():
    x = normal(4, 100).relu()
    y = round_trip("rudakov-int4", x)
    assert not y[x == 0].any()


def test_a_position_has_one_scale_for_all_rows_as_published():
    x = torch.tensor([[1.0, -8.0], [-1.0, 2.0]])
    y = round_trip("acsgd-int2", x)
    assert torch.allclose(y, torch.tensor([[0.5, -8.0], [-1.0, 0.0]]), atol=1e-3)  # +max clipped
    payload = codec("acsgd-int4").encode(normal(8, 1000))
    assert payload.numel() == 2 * 1000 + 8 * 500  # the scales alone are 2 bits a value


def test_a_scale_beyond_float16_is_an_error():
    with pytest.raises(NonFiniteError, match="70000"):
        codec("acsgd-int4").encode(torch.full((2, 3), 7e4))


@pytest.mark.parametrize("spec", ["topk:0.1/acsgd-int4", "randk:0.1/rudakov-int4"])
def test_they_code_no_values_of_others(spec):
    with pytest.raises(SpecError, match="is no codec for the kept values"):
        codec(spec)
