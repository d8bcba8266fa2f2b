"""Exact arithmetic: equal to that of whole numbers, whatever order and precision it is done in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.native.expect import exponent_for, exponents_for, power_of_two
from thinwire.predict.exact import Map, on_grid


def test_powers_of_two_are_made_of_their_bits() -> None:
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    assert power_of_two(exponents).tolist() == [2.0**k for k in exponents.tolist()]


@given(st.floats(0, 2.0**100, width=32, allow_subnormal=True))
def test_the_exponent_is_the_least_that_holds_a_value(largest: float) -> None:
    k = int(exponents_for(torch.tensor(largest)))
    assert k == exponent_for(largest, 7)
    assert k == -100 or largest <= 127 * 2.0**k
    assert k == -100 or largest > 63 * 2.0**k


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_a_vector_on_the_grid_is_within_half_a_step(scale: float) -> None:
    x = scale * torch.randn(50, 130, generator=torch.Generator().manual_seed(1))
    codes, steps = on_grid(x)
    assert codes.abs().max() <= 127
    assert torch.equal(codes, codes.round())
    assert bool(((codes * steps[:, None] - x).abs() <= steps[:, None] / 2).all())
    zeros, _ = on_grid(torch.zeros(2, 3))
    assert not zeros.any()


@pytest.mark.parametrize("inputs", [1, 128, 1040, 1041, 3000])
def test_a_map_gives_what_whole_numbers_give(inputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(7, inputs, generator=generator)
    made = Map.of(torch.randn(inputs, 5, generator=generator) * torch.logspace(-3, 3, 5))
    codes, scales = on_grid(x)
    whole = codes.long() @ made.codes.long()
    expected = (
        whole.double() * scales.double()[:, None] * power_of_two(made.exponents.int()).double()
    )
    assert torch.equal(made(codes, scales), expected.to(torch.float32))
    order = torch.randperm(inputs, generator=generator)
    other = Map(made.codes[order], made.exponents)
    assert torch.equal(other(codes[:, order], scales), made(codes, scales))
    low = codes.bfloat16() @ made.codes.bfloat16()[:, :1] if inputs < 200 else None
    assert low is None or codes.bfloat16().float().equal(codes)


def test_the_largest_products_are_still_exact() -> None:
    codes = torch.full((1, 1040), 127.0)
    made = Map(torch.full((1040, 1), 127, dtype=torch.int8), torch.zeros(1, dtype=torch.int8))
    assert made(codes, torch.ones(1)).item() == 127 * 127 * 1040


def test_a_map_is_near_the_weights_that_it_is_of() -> None:
    weights = torch.randn(40, 30, generator=torch.Generator().manual_seed(3))
    made = Map.of(weights)
    back = made.codes.float() * power_of_two(made.exponents.int())
    assert (back - weights).abs().max() < 0.02
