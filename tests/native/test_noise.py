"""The noise of stochastic rounding: uniform, addressed by seed and position, ISA-free."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.native import noise

SEEDS = st.integers(-(2**63), 2**63 - 1)


def uniform(seed: int, n: int) -> torch.Tensor:
    return noise.uniform(torch.tensor([seed], dtype=torch.int64), n)[0]


def slow_uniform(seed: int, position: int) -> float:
    """The same hash in Python's integers."""

    def mix(x: int, key: int = 0) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15 ^ key
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    low, high = seed & 0xFFFFFFFF, (seed >> 32 & 0xFFFFFFFF) ^ 0x9E3779B9
    first = mix(low ^ mix(high))
    return (mix(position ^ first, mix(first ^ high)) >> 8) * 2.0**-24


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_noise_is_the_described_integer_hash(seed):
    assert uniform(seed, 50).tolist() == [slow_uniform(seed, i) for i in range(50)]


def test_noise_is_equal_on_every_device(device):
    seeds = torch.arange(-3, 3, dtype=torch.int64) * 2**40
    assert torch.equal(noise.uniform(seeds.to(device), 1000).cpu(), noise.uniform(seeds, 1000))


def test_noise_lies_in_zero_to_one_without_one():
    values = noise.uniform(torch.arange(64), 4096)
    assert values.dtype == torch.float32
    assert float(values.min()) >= 0.0
    assert float(values.max()) < 1.0


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 300), st.integers(0, 300))
def test_noise_at_a_position_does_not_depend_on_the_length(seed, n, more):
    assert torch.equal(uniform(seed, n + more)[:n], uniform(seed, n))


def test_noise_is_uniform_over_positions_and_over_seeds():
    values = noise.uniform(torch.arange(512), 512).double()
    sigma = (1 / 12 / 512) ** 0.5
    for dim in (0, 1):
        # 512 means, each within 5 standard errors, and with the right spread themselves
        means = values.mean(dim)
        assert float((means - 0.5).abs().max()) < 5 * sigma
        assert 0.8 < float(means.std()) / sigma < 1.2
    counts = torch.histc(values, 64, 0, 1)
    chi2 = float(((counts - 4096).square() / 4096).sum())
    assert chi2 < 63 + 5 * (2 * 63) ** 0.5


def test_neighbouring_seeds_and_positions_are_uncorrelated():
    centred = noise.uniform(torch.arange(257), 257).double() - 0.5
    limit = 5 / 12 / 256
    assert abs(float((centred[1:] * centred[:-1]).mean())) < limit
    assert abs(float((centred[:, 1:] * centred[:, :-1]).mean())) < limit


def test_every_bit_of_the_seed_counts():
    draws = {tuple(uniform(1 << bit if bit < 63 else -(2**63), 4).tolist()) for bit in range(64)}
    assert len(draws) == 64
