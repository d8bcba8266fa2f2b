"""EF21: a closed loop from zero, without exceptions for large changes."""

import pytest
import torch

from tests.schemes.links import WIDTH, Link, normal
from thinwire.codecs import codec
from thinwire.frame import Kind
from thinwire.schemes import Value, scheme


def test_the_receiver_computes_on_the_sum_of_what_was_sent():
    link, g = Link("ef21(topk:0.2)"), torch.zeros(2, WIDTH)
    coder = codec("topk:0.2")
    for step in range(5):
        x = normal(2, WIDTH, seed=step)
        change = x - g
        g = g + coder.decode(coder.encode(change), change.shape, change.dtype)
        assert link.step(x, [4, 5]).equal(g)  # also where the change is larger than the value
        assert link.kinds == [Kind.FIRST if step == 0 else Kind.CHANGE]
        assert len(set(link.digests)) == 1


def test_without_loss_it_is_exact_at_once():
    link = Link("ef21(raw)")
    x = normal(2, WIDTH)
    assert link.step(x, [1, 2]).equal(x)
    assert link.step(x, [1, 2]).equal(x)


def test_a_value_that_stays_is_learned():
    link, x = Link("ef21(topk:0.25)"), normal(2, WIDTH)
    errors = [float((link.step(x, [1, 2]) - x).norm()) for _ in range(4)]
    assert errors[0] > errors[1] > errors[2] > errors[3] == 0


def test_evaluation_is_dense():
    found = scheme("ef21(topk:0.05)")
    assert found.stateless() == Value(codec("int8"))


@pytest.mark.parametrize("spec", ["ef21(topk:0.1)", "delta(topk:0.5)", "delta(int2,ref=fp32)"])
def test_before_compression_references_are_filled(spec):
    link, x = Link(spec), normal(2, WIDTH)
    for seed in range(2):
        moved = x + 0.1 * normal(2, WIDTH, seed=seed)
        assert link.step(moved, [1, 2], dense=True).equal(moved)
        assert link.kinds == [Kind.DENSE]
        assert len(set(link.digests)) == 1
    later = moved + 0.01 * normal(2, WIDTH, seed=9)
    y = link.step(later, [1, 2])
    assert link.kinds == [Kind.CHANGE]
    assert float((y - later).norm() / later.norm()) < 0.02


def test_by_slot_both_ends_hold_a_reference_a_place():
    found = scheme("ef21(topk:0.1,key=slot)")
    assert not found.needs_keys
    assert not found.recalls
    assert found.keyed is not None
    assert found.keyed.shared
