"""What coding loses, as the sender finds it out: beside what the receiver gets."""

import pytest
import torch

from tests.schemes.links import WIDTH, Link, normal, visit
from thinwire.edge.fidelity import Fidelity

SPECS = [
    "raw",
    "int4",
    "topk:0.1/int8",
    "delta(int4)",
    "delta(int2,first=int4,ref=bf16)",
    "ef21(topk:0.2)",
    "ef(topk:0.1)",
    "efmixed(topk:0.2)",
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dense", [False, True])
def test_the_sender_knows_what_the_receiver_has(spec, dense):
    link = Link(spec)
    link.sender.measuring = True
    for step in range(4):
        x = normal(1, WIDTH) + 0.3 * normal(3, WIDTH, seed=step) * torch.tensor([[1], [1], [40]])
        there = visit([1, 2, 2], [WIDTH, 40, 40], step=step)
        link.begin(there, dense=dense)
        y = link.move(x, 0, there)
        link.sender.end_step()
        sent = link.sender.sent
        assert sent is not None
        for row, n in enumerate(there.lengths):
            assert torch.allclose(sent.view(3, -1)[row, :n], y[row, :n], rtol=1e-6, atol=1e-6)


def test_what_was_measured_is_not_kept_beyond_the_step():
    link = Link("delta(int4)")
    link.step(normal(2, WIDTH), [1, 2])
    assert link.sender.sent is None


def test_the_numbers():
    x = torch.tensor([[3.0, 4.0, 99.0], [0.0, 0.0, 12.0]])
    y = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 12.0]])
    fidelity = Fidelity()
    fidelity.add(x, y, [2, 3])
    report = fidelity.report()
    assert report["relative_error"] == pytest.approx(4 / 13)
    assert report["cosine"] == pytest.approx((9 + 144) / (13 * (9 + 144) ** 0.5))
    assert report["outlier_ratio"] == pytest.approx(12 / (169 / 5) ** 0.5)


def test_nothing_has_no_numbers():
    fidelity = Fidelity()
    fidelity.add(torch.zeros(2, 3), torch.zeros(2, 3), None)
    assert set(fidelity.report().values()) == {None}


def test_measuring_changes_nothing():
    plain, measured = Link("delta(int3)"), Link("delta(int3)")
    measured.sender.measuring = True
    for step in range(3):
        x = normal(2, WIDTH, seed=step)
        assert plain.step(x, [1, 2]).equal(measured.step(x, [1, 2]))
    assert plain.digests == measured.digests
