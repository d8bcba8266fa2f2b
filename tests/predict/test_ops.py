"""What both ends expect is computed alike by every level of the kernels and by their twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.native import library as native
from thinwire.predict import Table
from thinwire.predict.ops import ops

LEVELS = native.levels()


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Vectors of any scale, with the odd zero, and ids of which a table lacks some."""
    seed = draw(st.integers(0, 1 << 30))
    generator = torch.Generator().manual_seed(seed)
    n, width = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    scale = 2.0 ** draw(st.integers(-40, 40))
    x = scale * torch.randn(n, width, generator=generator)
    x[draw(st.integers(0, n - 1))] = 0.0
    x[:, draw(st.integers(0, width - 1))] *= draw(st.sampled_from([1.0, -0.0, 1e4]))
    size = draw(st.integers(1, 9))
    return {
        "x": x,
        "ids": [torch.randint(size + 2, (n,), generator=generator) for _ in range(2)],
        "tables": [scale * torch.randn(size, width, generator=generator) for _ in range(2)],
        "size": size,
        "unit": draw(st.integers(-60, 60)),
        "generator": generator,
    }


def results(problem: dict[str, Any]) -> list[Tensor]:
    x, ids, tables = problem["x"], problem["ids"], problem["tables"]
    found, generator = ops(x), torch.Generator().manual_seed(5)
    expected = found.expect(ids, tables)
    codes, scales = found.centre(ids, tables, x)
    plain = found.centre([], [], x)
    summed = x.clone()
    powers = 2.0 ** torch.randint(-5, 5, (x.shape[1],), generator=generator).float()
    found.add(summed, codes, scales, powers)
    gains = torch.randint(256, (len(x),), generator=generator) / 64
    stood = [found.stand(base, expected, gains) for base in (None, x)]
    sums = torch.zeros(problem["size"], x.shape[1], dtype=torch.int32)
    counts = torch.randint(1100, (problem["size"],), generator=generator).to(torch.int32)
    values = problem["tables"][0].clone()
    learned: list[Tensor] = []
    for _ in range(2):
        there = ids[0] % problem["size"]
        rest = x.clone()
        most = found.learn(sums, counts, values, there, rest, problem["unit"], True)
        assert most is not None
        learned += [rest, most]
    assert found.learn(sums, counts, values, there, x, problem["unit"], False) is None
    everything = [expected, codes, scales, *plain, summed, *stood, found.largest(x)]
    return [*everything, *learned, sums, counts, values]


@given(problems())
def test_every_level_and_the_twin_are_equal_to_the_bit(problem: dict[str, Any]) -> None:
    with native.forced("eager"):
        twin = results(problem)
    for level in LEVELS:
        with native.forced(level):
            for number, (one, other) in enumerate(zip(twin, results(problem), strict=True)):
                assert one.dtype == other.dtype
                assert torch.equal(one.view(torch.int32), other.view(torch.int32)), (level, number)


@given(problems())
def test_gains_are_weighed_alike_at_every_level(problem: dict[str, Any]) -> None:
    x, e = problem["x"], problem["tables"][0][:1].expand(problem["x"].shape).contiguous()
    base = 0.5 * x.flip(0)
    with native.forced("eager"):
        exact = ops(x).weigh(x, base, e), ops(x).weigh(x, None, e)
    first: list[Tensor] = []
    for level in LEVELS:
        with native.forced(level):
            found = ops(x).weigh(x, base, e), ops(x).weigh(x, None, e)
        first = first or list(found)
        for one, other, near in zip(first, found, exact, strict=True):
            assert torch.equal(one, other)
            slack = 1e-4 * (x.abs() + base.abs() + e.abs()).double().square().sum(1, keepdim=True)
            assert bool(((one - near).abs() <= slack).all())


@pytest.mark.parametrize("level", ["eager", *LEVELS])
def test_sums_of_many_visits_stay_within_their_bits(level: str) -> None:
    table, n = Table(1, 3), 30_000
    x = torch.full((n, 3), -1.0)
    with native.forced(level):
        table.learn(torch.zeros(1, dtype=torch.int64), x[:1], torch.ones(1))
        x = 15 * x
        largest = table.learn(torch.zeros(n, dtype=torch.int64), x, torch.ones(n), rest=True)
    assert torch.allclose(table.values, torch.full((1, 3), -15.0), rtol=0.01)
    assert largest is not None
    assert torch.equal(largest, x.abs().amax(1))
