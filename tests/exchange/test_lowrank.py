"""The arithmetic that all ranks share in PowerSGD."""

import pytest
import torch

from thinwire.exchange.lowrank import orthonormal, product, revived, total


@pytest.mark.parametrize("n", [1, 2, 3, 100, 1001])
def test_a_sum_is_the_sum(n: int) -> None:
    x = torch.arange(n, dtype=torch.float64)
    assert float(total(x)) == n * (n - 1) / 2
    assert torch.equal(x, torch.arange(n, dtype=torch.float64))


def test_columns_are_orthonormal_and_span_what_they_did() -> None:
    p = torch.randn(300, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p[:, 3] = p[:, 3] * 1e-5 + p[:, 1]  # nearly dependent
    base = orthonormal(p)
    assert torch.allclose(base.t() @ base, torch.eye(4, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(base @ (base.t() @ p), p, atol=1e-9)


def test_nothing_is_divided_by_nothing() -> None:
    p = torch.zeros(10, 3)
    assert torch.equal(orthonormal(p), p)
    p[:, 1] = 1
    p[:, 2] = 1
    base = orthonormal(p)
    assert torch.isfinite(base).all()
    assert torch.allclose((base * base).sum(0), torch.tensor([0.0, 1.0, 0.0]))


def test_a_product_is_the_product() -> None:
    g = torch.Generator().manual_seed(1)
    p, q = (torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (20, 31))
    assert torch.allclose(product(p, q), p @ q.t())


def test_a_column_that_vanished_comes_back() -> None:
    q = torch.ones(8, 2)
    q[:, 1] = 0
    found = revived(q, 3)
    assert torch.equal(found[:, 0], q[:, 0] / 2)  # columns are scaled by powers of two
    assert found[:, 1].abs().min() > 0
    assert torch.equal(found, revived(q, 3))
