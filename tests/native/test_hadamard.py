"""The randomized Hadamard rotation against a slow one that is written from its description."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.digest import integers
from thinwire.native import hadamard

GROUPS = [1, 2, 8, 32, 100, 128, 0]


def slow_sign(i: int) -> int:
    x = i // 32 ^ 0x3C6EF372
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return -1 if (x ^ x >> 16) >> i % 32 & 1 else 1


def slow_block(values: list[np.float32]) -> list[np.float32]:
    """Butterflies on one block, value by value."""
    values, n = list(values), len(values)
    h = n // 2
    while h:
        for i in range(n):
            if i & h == 0:
                a, b = values[i], values[i + h]
                values[i], values[i + h] = a + b, a - b
        h //= 2
    scale = np.float32(2.0 ** (-math.log2(n) / 2))
    return [v * scale for v in values]


def slow_rotate(row: list[float], group: int) -> list[float]:
    signed = [np.float32(v) * np.float32(slow_sign(i)) for i, v in enumerate(row)]
    group = group or len(row)
    turned: list[np.float32] = []
    for start in range(0, len(row), group):
        part = signed[start : start + group]
        for k in reversed(range(len(part).bit_length())):
            if len(part) >> k & 1:
                turned += slow_block(part[: 2**k])
                part = part[2**k :]
    return [float(v) for v in turned]


def bell(rows: int, n: int, seed: int = 0) -> torch.Tensor:
    """Bell-shaped float32 values, the same on every machine."""
    total = sum(integers(rows * n, seed + k).to(torch.float32) * 2.0**-23 for k in range(4))
    return torch.as_tensor(total).view(rows, n)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("n", [1, 3, 31, 32, 100, 237])
def test_rotated_values_are_those_of_the_description(group, n, device):
    x = bell(2, n)
    expected = torch.tensor([slow_rotate(row, group) for row in x.tolist()])
    assert torch.equal(hadamard.rotate(x.to(device), group).cpu(), expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 700), st.sampled_from(GROUPS), st.integers(0, 1000))
def test_unrotating_returns_the_values_within_float32_rounding(n, group, seed):
    x = bell(3, n, seed)
    y = hadamard.unrotate(hadamard.rotate(x, group), group)
    assert y.shape == x.shape
    assert torch.allclose(y, x, rtol=0, atol=4e-6)


@pytest.mark.parametrize("group", GROUPS)
def test_a_rotation_keeps_the_energy_of_every_group(group):
    x = bell(2, 400)
    y = hadamard.rotate(x, group)
    size = group or 400
    for before, after in zip(x.split(size, 1), y.split(size, 1), strict=True):
        energy = before.double().square().sum(1)
        assert torch.allclose(after.double().square().sum(1), energy, rtol=1e-6)


def test_an_outlier_is_spread_evenly_over_its_block():
    x = torch.zeros(1, 128)
    x[0, 77] = 64.0
    assert torch.equal(hadamard.rotate(x, 64).abs()[0, 64:], torch.full((64,), 8.0))
    assert not hadamard.rotate(x, 64)[0, :64].any()


def test_a_group_does_not_depend_on_what_follows_it_nor_a_row_on_the_others():
    x = bell(3, 256)
    y = hadamard.rotate(x, 64)
    assert torch.equal(hadamard.rotate(x[:, :128], 64), y[:, :128])
    assert torch.equal(hadamard.rotate(x[1:2], 64), y[1:2])


def test_overflow_and_nan_stay_in_their_group():
    x = torch.ones(1, 96)
    x[0, 3:20] = 3e38
    x[0, 70] = torch.nan
    finite = torch.isfinite(hadamard.rotate(x, 32))
    assert not finite[0, :32].all()
    assert bool(finite[0, 32:64].all())
    assert not finite[0, 64:].any()


def test_signs_are_balanced_and_uncorrelated():
    signs = hadamard.signs(1 << 16, torch.device("cpu"))
    assert set(signs.tolist()) == {-1.0, 1.0}
    for lag in (0, 1, 2, 31, 32, 33, 64):
        other = torch.ones(1 << 16) if lag == 0 else signs.roll(lag)
        assert abs(float((signs * other).mean())) < 5 / 256
    for bit in range(32):  # of the words
        assert abs(float(signs[bit::32].mean())) < 5 / 2048**0.5


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 200), st.integers(0, 200))
def test_signs_depend_on_the_position_alone(n, more):
    device = torch.device("cpu")
    assert torch.equal(hadamard.signs(n + more, device)[:n], hadamard.signs(n, device))


def test_the_input_is_left_unchanged():
    x = bell(2, 64)
    before = x.clone()
    hadamard.unrotate(hadamard.rotate(x, 32), 32)
    hadamard.unrotate(x, 1)
    assert torch.equal(x, before)
