"""Tables: means by id, learned alike at both ends in whatever order."""

from __future__ import annotations

import pytest
import torch

from thinwire.predict import Table


def learn(table: Table, ids: torch.Tensor, x: torch.Tensor) -> None:
    table.learn(ids, x.contiguous(), x.abs().amax(1))


def data(n: int, size: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(size, (n,), generator=generator)
    centres = torch.randn(size, width, generator=generator)
    return ids, centres[ids] + 0.1 * torch.randn(n, width, generator=generator)


def test_a_table_finds_the_mean_of_each_id() -> None:
    ids, x = data(20_000, 10, 6)
    table = Table(10, 6)
    assert not table.values.any()
    learn(table, ids, x)
    means = torch.stack([x[ids == k].mean(0) for k in range(10)])
    assert torch.allclose(table.values, means, atol=5e-3)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e6])
def test_the_order_does_not_matter(scale: float) -> None:
    ids, x = data(3000, 7, 5)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(5))
    one, other = Table(7, 5), Table(7, 5)
    for step in range(4):
        learn(one, ids, scale * x * (step + 1))
        learn(other, ids[order], scale * x[order] * (step + 1))
        assert torch.equal(one.values, other.values)


def test_what_was_seen_late_outweighs_what_was_seen_long_ago() -> None:
    table = Table(1, 1)
    ids = torch.zeros(1000, dtype=torch.int64)
    for _ in range(10):
        learn(table, ids, torch.ones(1000, 1))
    for _ in range(5):
        learn(table, ids, -torch.ones(1000, 1))
    assert table.values.item() < -0.9


def test_values_may_become_much_larger_or_smaller() -> None:
    table, ids = Table(2, 3), torch.tensor([0, 1] * 50)
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(2)) + torch.tensor([3.0, -2, 1])
    for factor in (1.0, 1e-4, 1e5, 0.0, 1e-3):
        for _ in range(400):
            learn(table, ids, factor * x)
        means = torch.stack([factor * x[ids == k].mean(0) for k in range(2)])
        assert torch.allclose(table.values, means, atol=0.05 * factor + 1e-7, rtol=0.05)


def test_a_table_goes_on_from_its_state() -> None:
    ids, x = data(500, 6, 4)
    one = Table(6, 4)
    learn(one, ids, x)
    other = Table(6, 4)
    other.load_state_dict({k: v.clone() for k, v in one.state_dict().items()})
    for table in (one, other):
        learn(table, ids, 2 * x)
    assert torch.equal(one.values, other.values)
    empty = Table(6, 4)
    empty.load_state_dict(Table(6, 4).state_dict())
    assert not empty.values.any()
    with pytest.raises(ValueError, match="another size"):
        Table(6, 5).load_state_dict(one.state_dict())
    learn(one, ids[:0], x[:0])
    assert torch.equal(one.values, other.values)
