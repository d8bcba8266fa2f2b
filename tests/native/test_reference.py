"""The constants of the Gaussian quantizers, recomputed, and the details that kernels must copy."""

import math

import pytest
import torch

from thinwire.native import reference
from thinwire.native.reference import IntegerFormat


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def tail(x: float) -> float:
    return math.erfc(x / math.sqrt(2)) / 2


def moments(lo: float, hi: float) -> tuple[float, float]:
    """(probability, first moment) of a unit Gaussian between two bounds."""
    if hi == math.inf:
        return tail(lo), density(lo)
    return tail(lo) - tail(hi), density(lo) - density(hi)


def distortion_slope(step: float, bits: int) -> float:
    """Half the derivative of the mean squared error of a uniform quantizer by its step.

    The cells' bounds drop out, since the error is equal on both sides of a bound.
    """
    half = 2 ** (bits - 1)
    slope = 0.0
    for k in range(half):
        hi = (k + 1) * step if k + 1 < half else math.inf
        probability, first = moments(k * step, hi)
        slope += (k + 0.5) * ((k + 0.5) * step * probability - first)
    return slope


def test_the_two_level_constant_is_lloyd_max():
    assert pytest.approx(math.sqrt(2 / math.pi), abs=1e-12) == reference.LLOYD_1


def test_the_four_level_constants_are_lloyd_max():
    threshold = 1.0
    for _ in range(200):
        levels = [first / p for p, first in (moments(0, threshold), moments(threshold, math.inf))]
        threshold = sum(levels) / 2
    assert pytest.approx(levels, abs=1e-6) == list(reference.LLOYD_2)
    assert pytest.approx(threshold, abs=1e-6) == reference.LLOYD_2_THRESHOLD


@pytest.mark.parametrize("bits", sorted(reference.UNIFORM_STEP))
def test_the_uniform_steps_minimize_the_distortion_of_a_gaussian(bits):
    low, high = 1e-3, 2.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if distortion_slope(middle, bits) < 0 else (low, middle)
    assert pytest.approx(low, rel=1e-6) == reference.UNIFORM_STEP[bits]


def test_every_finite_scale_is_rounded_up_to_the_next_bfloat16():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 0x7F7F0000, (20000,), generator=generator, dtype=torch.int32)
    x = bits.view(torch.float32)
    rounded = reference._round_up_bf16(x)
    assert torch.equal(rounded, rounded.to(torch.bfloat16).to(torch.float32))
    assert bool((rounded >= x).all())
    below = (rounded.view(torch.int32) - 0x10000).view(torch.float32)
    assert bool(((below < x) | (rounded == 0)).all())


def test_the_tree_sum_folds_halves_of_the_next_power_of_two():
    x = torch.tensor([1e8, 1.0, -1e8, 1.0, 3.0])
    padded = [*x.tolist(), 0.0, 0.0, 0.0]
    pairs = [torch.tensor(padded[i]) + torch.tensor(padded[i + 4]) for i in range(4)]
    expected = (pairs[0] + pairs[2]) + (pairs[1] + pairs[3])
    assert reference.tree_sum(x) == expected


def test_a_zero_group_has_the_same_bytes_whatever_the_signs_of_its_zeros():
    for symmetric in (False, True):
        for std in (False, True):
            fmt = IntegerFormat(4, 8, symmetric=symmetric, stochastic=False, std=std)
            scales = set()
            for pattern in range(256):
                zeros = [-0.0 if pattern >> i & 1 else 0.0 for i in range(8)]
                out = torch.empty((1, reference.row_nbytes(8, fmt)), dtype=torch.uint8)
                x = torch.tensor([zeros], dtype=torch.float32)
                assert reference.encode_rows(x, fmt, torch.zeros(1, dtype=torch.int64), out)
                scales.add(bytes(out[0, : 2 if symmetric else 6].tolist()))
            assert scales == {bytes(2 if symmetric else 6)}


def test_square_roots_are_correctly_rounded():
    squares = torch.tensor([16509855334400.0, 2.0, 0.25, 1e-30])
    expected = [math.sqrt(v) for v in squares.tolist()]
    assert reference._root(squares).tolist() == torch.tensor(expected).tolist()
