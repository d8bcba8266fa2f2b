"""Error feedback: what is lost comes later, once, and only to its own sample."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schemes.links import WIDTH, Link, full, normal, off_the_wire, on_the_wire, visit
from thinwire.codecs import codec
from thinwire.errors import FrameError, NonFiniteError, SpecError
from thinwire.frame import Kind, Section
from thinwire.schemes import Value, scheme

SPECS = [
    "ef(topk:0.1)",
    "ef(topk:0.1/int8)",
    "ef(int4)",
    "ef(int4:round=stochastic,residual=bf16)",
    "efmixed(topk:0.2)",
    "efmixed(topk:0.25/bf16)",
]


@pytest.mark.parametrize("spec", SPECS)
def test_what_was_sent_and_what_is_left_is_what_was_given(spec):
    if "bf16" in spec:
        spec = spec.replace("residual=bf16", "residual=fp32")
    link, keys = Link(spec), [3, 8]
    given, sent = torch.zeros(2, WIDTH).double(), torch.zeros(2, WIDTH).double()
    for step in range(20):
        x = normal(2, WIDTH, seed=step)
        given += x
        sent += link.step(x, keys)
    left = torch.stack(link.sender.store.rows(keys)).double()
    assert float((sent + left - given).abs().max()) < 1e-4
    assert float(left.abs().max()) > 0.1  # a part of it is left indeed


def test_residuals_help_their_own_sample_alone():
    link, x = Link("ef(topk:0.1)"), normal(2, WIDTH)
    link.step(x, [1, 2])
    coder = codec("topk:0.1")
    plain = coder.decode(coder.encode(x), x.shape, x.dtype)
    assert link.step(x, [3, 4]).equal(plain)  # others have none
    again = link.step(x, [2, 1])  # each with that of the other value
    lost = x - plain
    total = x + lost[[1, 0]]
    assert again.equal(coder.decode(coder.encode(total), x.shape, x.dtype))


def test_by_slot_a_residual_stays_in_its_place_of_the_batch():
    found = scheme("ef(topk:0.1,key=slot)")
    assert found.keyed is not None
    assert found.keyed.by == "slot"
    assert not found.needs_keys


def test_a_step_that_does_not_count_leaves_no_trace():
    one, other = Link("ef(topk:0.1)"), Link("ef(topk:0.1)")
    x = normal(2, WIDTH)
    for link in (one, other):
        link.step(x, [1, 2])
    one.step(normal(2, WIDTH, seed=5), [1, 2], counts=False)
    assert one.step(x, [1, 2]).equal(other.step(x, [1, 2]))
    assert one.sender.store.digest() == other.sender.store.digest()


def test_a_value_that_is_not_finite_leaves_the_residual():
    link, x = Link("ef(topk:0.1)"), normal(2, WIDTH)
    link.step(x, [1, 2])
    before = link.sender.store.digest()
    x[1, 4] = torch.inf
    with pytest.raises(NonFiniteError, match=r"inf at index \(1, 4\)"):
        link.step(x, [1, 2], counts=False)
    link.sender.end_step()
    assert link.sender.store.digest() == before


def test_the_second_of_two_occurrences_in_a_step_goes_without_feedback():
    link, x = Link("ef(topk:0.1)"), normal(3, WIDTH)
    link.step(x, [1, 2, 3])
    coder = codec("topk:0.1")
    y = link.step(x, [1, 1, 2])
    plain = coder.decode(coder.encode(x), x.shape, x.dtype)
    assert y[1].equal(plain[1])
    assert not y[0].equal(plain[0])
    assert len(link.sender.store) == 3


def test_a_sample_of_another_length_begins_anew():
    link = Link("ef(topk:0.1)")
    link.step(normal(2, WIDTH), [1, 2])
    x, there = normal(2, WIDTH, seed=1), visit([1, 2], [40, WIDTH])
    link.begin(there)
    y = link.move(x, 0, there)
    coder = codec("topk:0.1")
    part = coder.decode(coder.encode(x[:1, :40]), (1, 40), x.dtype)
    assert y[0, :40].equal(part[0])
    assert not y[0, 40:].any()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_micro_batches_in_any_order_give_the_same(data):
    """Two steps of two micro-batches, the second in two orders."""
    spec = data.draw(st.sampled_from(SPECS))
    seed = data.draw(st.integers(0, 99))
    found = []
    for order in ([0, 1], [1, 0]):
        link = Link(spec)
        ys = {}
        for step in range(2):
            parts = [full([1, 2]), full([7])]
            link.begin(*parts)
            for k in order:
                ys[k] = link.move(normal(len(parts[k].lengths), WIDTH, seed=seed + k), k, parts[k])
            link.sender.end_step()
            assert step in (0, 1)
        found.append([ys[0], ys[1]])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


def test_mixed_feedback_keeps_half_of_the_share_for_each():
    link, x = Link("efmixed(topk:0.25)"), normal(2, WIDTH)
    first = link.step(x, [1, 2])
    assert link.kinds == [Kind.VALUE]
    assert (first != 0).sum() == 2 * WIDTH // 4
    lost = x - first
    moved = normal(2, WIDTH, seed=1)
    y = link.step(moved, [1, 2])
    assert link.kinds == [Kind.VALUE, Kind.RESIDUAL]
    half = codec("topk:0.125")
    one, other = (half.decode(half.encode(v), v.shape, v.dtype) for v in (moved, lost))
    assert y.equal(one + other)


def test_mixed_feedback_of_a_batch_in_part_known():
    link, x = Link("efmixed(topk:0.25)"), normal(2, WIDTH)
    link.step(x, [1, 2])
    y = link.step(normal(3, WIDTH, seed=1), [2, 9, 1])
    assert link.kinds == [Kind.VALUE, Kind.VALUE, Kind.RESIDUAL]
    assert y.shape == (3, WIDTH)
    assert (y[1] != 0).sum() == WIDTH // 4


def test_a_residual_without_its_value_is_refused():
    link = Link("efmixed(topk:0.25)")
    for _ in range(2):
        link.begin(full([1, 2]))
        sections = link.sender.encode(normal(2, WIDTH), 0, full([1, 2]))
        link.sender.end_step()
    value, rest = sections

    def refused(*parts: Section) -> None:
        with pytest.raises((FrameError, ValueError)):
            link.receiver.decode(off_the_wire(on_the_wire(parts)), 0, full([1, 2]))

    refused(value)
    refused(rest)
    refused(value, rest, rest)
    rest.rows = [0]
    refused(value, rest)


def test_only_topk_has_a_share_to_halve():
    with pytest.raises(SpecError, match="halves the share of topk, and int4 has none"):
        scheme("efmixed(int4)")


@pytest.mark.parametrize("spec", SPECS)
def test_evaluation_is_plain_and_moves_nothing(spec):
    link, x = Link(spec), normal(2, WIDTH)
    link.step(x, [1, 2])
    before = link.sender.store.digest()
    coder = getattr(link.scheme, "codec")  # noqa: B009  of its own kind
    assert link.scheme.stateless() == Value(coder)
    found = link.evaluate(x)
    if not coder.stochastic:
        assert found.equal(coder.decode(coder.encode(x), x.shape, x.dtype))
    assert link.sender.store.digest() == before


def test_before_compression_values_travel_as_they_are_and_nothing_is_lost():
    link, x = Link("ef(topk:0.1)"), normal(2, WIDTH)
    link.step(x, [1, 2])
    assert link.step(x, [1, 2], dense=True).equal(x)
    assert len(link.sender.store) == 0
    coder = codec("topk:0.1")
    assert link.step(x, [1, 2]).equal(coder.decode(coder.encode(x), x.shape, x.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    link, x = Link("ef(topk:0.1)"), normal(2, WIDTH).to(dtype)
    total, sent = 2 * x.double(), torch.zeros(2, WIDTH).double()
    for _ in range(2):
        y = link.step(x, [1, 2])
        assert y.dtype == dtype
        sent += y.double()
    left = torch.stack(link.sender.store.rows([1, 2])).double()
    assert float((sent + left - total).abs().max()) < 1e-6


def test_residuals_are_kept_as_asked():
    link = Link("ef(topk:0.1,residual=int8)")
    link.step(normal(2, WIDTH), [1, 2])
    assert link.sender.store.nbytes < 2 * (WIDTH + 8)


def test_state_can_be_saved():
    one, other, x = Link("ef(topk:0.1)"), Link("ef(topk:0.1)"), normal(2, WIDTH)
    one.step(x, [1, 2])
    other.sender.load_state_dict(one.sender.state_dict())
    assert one.step(x, [1, 2]).equal(other.step(x, [1, 2]))


@pytest.mark.parametrize("spec", SPECS)
def test_a_batch_may_be_cut_into_micro_batches_anyhow(spec):
    """Rows are coded with their own residuals, whatever stands beside them."""
    whole, cut = Link(spec), Link(spec)
    for step in range(3):
        x = normal(6, WIDTH, seed=step)
        keys = [3, 1, 4, 15, 9, 2]
        seeds = torch.arange(6) + 10 * step
        one = full(keys)._replace(seeds=seeds)
        whole.begin(one)
        y = whole.move(x, 0, one)
        whole.sender.end_step()
        parts = [full(keys[a:b])._replace(seeds=seeds[a:b]) for a, b in ((0, 1), (1, 4), (4, 6))]
        cut.begin(*parts)
        found = [cut.move(part, k, parts[k]) for k, part in enumerate(x.split([1, 3, 2]))]
        cut.sender.end_step()
        assert torch.cat(found).equal(y)
