"""AQ-SGD's change coding: what specs of the algorithm ask for, point by point."""

import dataclasses
from itertools import pairwise

import pytest
import torch

from tests.schemes.links import (
    WIDTH,
    Link,
    full,
    mixed_step,
    normal,
    off_the_wire,
    on_the_wire,
    visit,
    visits_of,
)
from thinwire.codecs import codec
from thinwire.codecs.keeping import KEEPINGS
from thinwire.errors import FrameError, NonFiniteError
from thinwire.frame import Kind
from thinwire.schemes import scheme

SPECS = [
    "delta(int4)",
    "delta(int2,first=int4)",
    "delta(int3:round=stochastic)",
    "delta(int1,first=bf16,ref=fp32)",
    "delta(int8:symmetric,first=fp16,ref=bf16)",
    "delta(int4:group=32,first=raw,ref=int4)",
    "delta(topk:0.2,first=int4,ref=bf16)",
    "delta(int2,second=int5,ref=fp32)",
]


def error(x, y):
    return float((x - y).norm() / x.norm())


def test_a_second_visit_may_have_a_codec_of_its_own():
    link, x = Link("delta(int2,second=int4)"), normal(4, 128)
    found: list[Kind] = []
    for n in range(4):
        link.step(x + 0.1 * normal(4, 128, seed=n), range(4))
        found.append(*link.kinds)
    assert found == [Kind.FIRST, Kind.SECOND, Kind.CHANGE, Kind.CHANGE]
    for end in (link.sender, link.receiver):
        end.store.drop([2])
    link.step(x, range(4))
    assert link.kinds == [Kind.FIRST, Kind.CHANGE]
    link.step(x + 0.1 * normal(4, 128, seed=9), range(4))
    assert link.kinds == [Kind.CHANGE, Kind.SECOND]


def test_a_second_visit_in_more_bits_leaves_a_smaller_error():
    x, errors = normal(4, 512), {}
    for spec in ("delta(int2)", "delta(int2,second=int4)", "delta(int4)"):
        link = Link(spec)
        link.step(x, range(4))
        moved = x + 0.5 * normal(4, 512, seed=1)
        errors[spec] = error(moved, link.step(moved, range(4)))
    narrow, wide_second, wide = errors.values()
    assert wide_second == wide < narrow / 3


def test_a_second_visit_that_is_too_far_off_is_sent_as_a_value_in_its_codec():
    link = Link("delta(int2,second=int8)")
    link.step(normal(4, 512), range(4))
    x = normal(4, 512, seed=1)
    assert error(x, link.step(x, range(4))) < 0.01
    assert link.kinds == [Kind.RESEED]


def test_a_codec_of_second_visits_that_is_that_of_later_ones_is_not_named():
    assert str(scheme("delta(int2,second=int2)")) == "delta(int2)"
    assert str(scheme("delta(int2,second=int4)")) == "delta(int2,second=int4)"


# The closed loop.


@pytest.mark.parametrize(
    ("spec", "factor"),
    [("delta(int4,ref=fp32)", 0.15), ("delta(int3,ref=fp32)", 0.35), ("delta(int2,ref=fp32)", 0.6)],
)
def test_the_error_of_a_constant_activation_shrinks_geometrically(spec, factor):
    link, x = Link(spec), normal(4, 512)
    errors = [error(x, link.step(x, range(4))) for _ in range(5)]
    for before, after in pairwise(errors):
        assert after <= max(factor * before, 1e-6)


@pytest.mark.parametrize("spec", SPECS)
def test_the_error_of_a_constant_activation_never_grows(spec):
    link, x = Link(spec), normal(4, 512)
    errors = [error(x, link.step(x, range(4))) for _ in range(30)]
    floor = 1.5 * min(
        errors[1:]
    )  # where what is kept is off by as much as a change brings it nearer
    for before, after in pairwise(errors):
        assert after <= max(before, floor, 1e-6)


def test_the_change_is_taken_against_the_reconstruction_not_the_last_value():
    link, x = Link("delta(int2,ref=fp32)"), normal(1, 512)
    first = link.step(x, [0])
    second = link.step(x, [0])
    change = codec("int2").encode(x - first)
    assert second.equal(first + codec("int2").decode(change, x.shape, x.dtype))


# One state at both ends.


@pytest.mark.parametrize("spec", SPECS)
def test_both_ends_hold_the_same_references_after_mixed_steps(spec):
    link, met = Link(spec), set()
    for number in range(1000 if spec == SPECS[0] else 100):
        step = mixed_step(number)
        visits = visits_of(number, step)
        link.begin(*visits)
        for k, (there, x) in enumerate(zip(visits, step[1], strict=True)):
            link.move(x, k, there)
            met.update(link.kinds)
        if number % 10 == 0:
            link.evaluate(normal(2, WIDTH))
        if number % 25 == 0:
            assert len(set(link.digests)) == 1
    assert len(set(link.digests)) == 1
    assert met >= {Kind.FIRST, Kind.CHANGE, Kind.VALUE}


@pytest.mark.parametrize("ref", KEEPINGS)
def test_the_receiver_computes_on_what_becomes_the_reference(ref):
    link, x = Link(f"delta(int4,ref={ref})"), normal(2, WIDTH)
    for k in range(3):
        found = link.step(x + 0.1 * normal(2, WIDTH, seed=k), [5, 6])
        kept = link.receiver.store.rows([5, 6])
        if (ref, k) != ("int8", 0):  # a first visit in the reference's own format stays as it is
            expected = KEEPINGS[ref].keep(found, None)
            assert all(a.equal(b) for a, b in zip(kept, expected, strict=True))
        if ref == "fp32" or (ref, k) == ("int8", 0):
            assert found.equal(KEEPINGS[ref].read(kept, None, WIDTH))


def test_what_the_receiver_computes_on_does_not_alias_the_state():
    link, x = Link("delta(int4)"), normal(2, WIDTH)
    for _ in range(2):
        link.step(x, [5, 6]).zero_()
        assert len(set(link.digests)) == 1


def test_the_senders_value_is_neither_changed_nor_kept():
    link, x = Link("delta(int4)"), normal(2, WIDTH)
    before = x.clone()
    link.step(x, [5, 6])
    assert x.equal(before)
    x.zero_()
    assert len(set(link.digests)) == 1


def test_state_travels_in_a_state_dict_of_plain_tensors():
    link, x = Link("delta(int4)"), normal(2, WIDTH)
    link.step(x, [5, 6])
    state = link.sender.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    other = Link("delta(int4)")
    other.sender.load_state_dict(state)
    other.receiver.load_state_dict(link.receiver.state_dict())
    assert other.digests == link.digests
    assert other.step(x + 0.01, [5, 6]).equal(link.step(x + 0.01, [5, 6]))
    assert other.kinds == [Kind.CHANGE]


# First visits.


def test_first_is_per_key_within_one_micro_batch():
    link, x = Link("delta(int4)"), normal(3, WIDTH)
    link.step(x[:2], [5, 6])
    there = full([6, 7, 5])
    link.begin(there)
    sections = link.sender.encode(x[[1, 2, 0]], 0, there)
    assert {s.kind: s.rows for s in sections} == {Kind.FIRST: [1], Kind.CHANGE: [0, 2]}


def test_a_first_visit_takes_the_first_codec():
    link, x = Link("delta(int2,first=int8)"), normal(2, WIDTH)
    coder = codec("int8")
    assert link.step(x, [5, 6]).equal(coder.decode(coder.encode(x), x.shape, x.dtype))


@pytest.mark.parametrize("how", ["a key met late", "a dropped key", "another length"])
def test_a_key_without_a_reference_is_never_coded_as_a_change(how):
    link, x = Link("delta(int2)"), normal(1, WIDTH)
    for _ in range(3):
        link.step(x, [5])
    key, value = 5, x
    if how == "a key met late":
        key = 6
    elif how == "a dropped key":
        link.sender.store.drop([5])
        link.receiver.store.drop([5])
    else:
        value = x[:, :50]
    found = link.step(value, [key])
    assert link.kinds == [Kind.FIRST]
    assert error(value, found) < 0.01  # int2 would be off by half
    assert len(set(link.digests)) == 1


def test_without_sample_ids_the_error_says_what_to_pass():
    there = visit(None, [WIDTH])
    with pytest.raises(ValueError, match="needs sample_ids: pass them to"):
        scheme("delta(int4)").sender().begin_step([there])


# Disagreement.


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_a_reference_lost_at_one_end_is_an_error_that_names_sample_and_versions(end):
    link, x = Link("delta(int4)"), normal(2, WIDTH)
    for _ in range(3):
        link.step(x, [5, 6])
    getattr(link, end).store.drop([6])
    before = link.receiver.digest()
    sent, held = (0, 3) if end == "sender" else (3, 0)
    with pytest.raises(FrameError, match=rf"sample 6: .* version {sent} .* version {held}"):
        link.step(x, [5, 6])
    assert link.receiver.digest() == before


def test_an_end_that_missed_a_visit_is_an_error_that_names_sample_and_versions():
    link, x = Link("delta(int4)"), normal(1, WIDTH)
    link.step(x, [5])
    there = full([5])
    link.sender.begin_step([there])
    link.sender.encode(x, 0, there)
    with pytest.raises(
        FrameError, match=r"sample 5: sent as CHANGE against version 2 .* version 1"
    ):
        link.step(x, [5])


def test_other_sample_ids_at_the_other_end_are_an_error():
    link, x = Link("delta(int4)"), normal(2, WIDTH)
    link.sender.begin_step([full([5, 6])])
    sections = link.sender.encode(x, 0, full([5, 6]))
    link.receiver.begin_step([full([6, 5])])
    with pytest.raises(FrameError, match="different sample ids"):
        link.receiver.decode(sections, 0, full([6, 5]))
    assert len(link.receiver.store) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"codec": "int3"}, "this end has delta"),
        ({"kind": Kind.ABSENT}, "does not fit"),
        ({"shape": (3, WIDTH)}, "2 rows were expected"),
        ({"rows": [0]}, "do not cover each of the 2 rows once"),
        ({"payload": torch.zeros(3, dtype=torch.uint8)}, "108 payload bytes, found 3"),
        ({"versions": None}, "version"),
        ({"versions": [7, 7]}, "version 7"),
        ({"keys": 1}, "different sample ids"),
    ],
    ids=str,
)
def test_sections_that_do_not_fit_are_refused_with_all_state_untouched(change, reason):
    link, x = Link("delta(int4)"), normal(2, WIDTH)
    link.step(x, [5, 6])
    there = full([5, 6])
    link.begin(there)
    (section,) = link.sender.encode(x, 0, there)
    before = link.receiver.digest()
    with pytest.raises(FrameError, match=reason):
        link.receiver.decode([dataclasses.replace(section, **change)], 0, there)
    assert link.receiver.digest() == before


# Once a visit.


def test_evaluation_leaves_the_state_untouched():
    link, x = Link("delta(int4)"), normal(2, WIDTH)
    link.step(x, [0, 1])
    before = link.digests
    link.evaluate(x + 1)
    assert link.digests == before


def test_a_second_occurrence_in_a_step_leaves_the_state_untouched():
    link, x = Link("delta(int4)"), normal(3, WIDTH)
    link.step(x[:1], [5])
    there = [full([5, 5]), full([5])]
    link.begin(*there)
    link.move(x[:2], 0, there[0])
    before = link.digests
    found = link.move(x[2:], 1, there[1])
    assert link.kinds == [Kind.VALUE]
    assert link.digests == before
    assert link.receiver.store.versions([5]) == [2]
    assert error(x[2:], found) < 0.01


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_leaves_all_state_untouched(value):
    link, x = Link("delta(int4)"), normal(3, WIDTH)
    link.step(x[:2], [5, 6])
    before = link.sender.digest()
    x[1, 7] = value  # a change; rows of other kinds are encoded around it
    there = full([5, 6, 7])
    link.sender.begin_step([there])
    with pytest.raises(NonFiniteError):
        link.sender.encode(x, 0, there)
    assert link.sender.digest() == before


# Falling back.


def test_a_change_with_more_energy_than_the_value_is_sent_as_a_value():
    link = Link("delta(int4)")
    link.step(normal(2, 512), [5, 6])
    unrelated = torch.stack([normal(512, seed=8), normal(2, 512)[1] + 0.01])
    there = full([5, 6], 512)
    link.begin(there)
    sections = link.sender.encode(unrelated, 0, there)
    assert {s.kind: s.rows for s in sections} == {Kind.CHANGE: [1], Kind.RESEED: [0]}
    link.receiver.decode(off_the_wire(on_the_wire(sections)), 0, there)
    assert len(set(link.digests)) == 1


def test_unrelated_values_are_never_worse_off_than_with_direct_coding():
    link, direct = Link("delta(int4)"), codec("int4")
    for k in range(5):
        x = normal(4, 512, seed=k)
        plain = direct.decode(direct.encode(x), x.shape, x.dtype)
        assert error(x, link.step(x, range(4))) <= error(x, plain) * 1.02


# Rows on their own.


def test_padding_neither_travels_nor_changes_the_reconstruction():
    x = normal(1, 60)
    found = []
    for width in (60, 96):
        link = Link("delta(int4)")
        padded = torch.full((1, width), 1e6)
        for k in range(3):
            padded[:, :60] = x + 0.1 * k
            there = visit([5], [60], width)
            link.begin(there)
            y = link.move(padded, 0, there)
            assert not y[:, 60:].any()
        found.append(y[:, :60])
    assert found[0].equal(found[1])


def test_a_sample_is_coded_alike_alone_and_in_company():
    alone, together = Link("delta(int4)"), Link("delta(int4)")
    x = normal(3, WIDTH)
    for k in range(3):
        a = alone.step(x[1:2] + 0.1 * k, [6])
        b = together.step(x + 0.1 * k, [5, 6, 7])
        assert a.equal(b[1:2])


def test_two_edges_of_a_stage_do_not_share_rows():
    a, b = Link("delta(int4)"), Link("delta(int4)")
    a.step(normal(1, WIDTH), [5])
    assert len(a.sender.store) == len(a.receiver.store) == 1
    assert len(b.sender.store) == len(b.receiver.store) == 0


def test_a_sample_without_valid_values_travels_as_nothing():
    link, x = Link("delta(int4)"), normal(2, WIDTH)
    for _ in range(2):
        there = visit([5, 6], [0, WIDTH])
        link.begin(there)
        found = link.move(x, 0, there)
        assert not found[0].any()
    assert len(set(link.digests)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype_comes_back_as_itself(dtype):
    link, x = Link("delta(int8)"), normal(2, 3, 32).to(dtype)
    for _ in range(2):
        found = link.step(x, [5, 6])
        assert found.dtype == dtype
        assert error(x.double(), found.double()) < 0.02


@pytest.mark.parametrize("spec", SPECS)
def test_the_global_generator_is_not_touched(spec):
    link = Link(spec)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for _ in range(2):
        link.step(normal(2, WIDTH), [5, 6])
    assert torch.get_rng_state().equal(before)


def test_no_payload_exceeds_the_declared_bound():
    link, x = Link("delta(int4,first=int8)"), normal(3, WIDTH)
    for _ in range(2):
        there = full([5, 6, 7])
        link.begin(there)
        size = sum(s.payload.numel() for s in link.sender.encode(x, 0, there))
        assert size <= 3 * link.scheme.row_nbytes(WIDTH, torch.float32)


def test_replaced_references_are_not_hoarded():
    link = Link("delta(int4)")
    for step in range(6):
        there = visit([1, 2], [WIDTH - step % 2 * 32] * 2)
        link.begin(there)
        link.move(normal(2, WIDTH, seed=step), 0, there)
    for end in (link.sender, link.receiver):
        assert all(len(spare) <= 2 for spare in end._spare.values())


@pytest.mark.parametrize("spec", ["delta(raw)", "delta(int4,first=topk:0.5)", "delta(topk:0.1)"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tensors_of_any_float_dtype_go_by_any_codec(spec, dtype):
    link, x = Link(spec), normal(3, 300).to(dtype)
    for step in range(4):
        y = link.step(x if step % 2 else -x, range(3))
        assert y.dtype == dtype
    assert link.sender.digest() == link.receiver.digest()


# How references are kept.


def drifting(spec: str, visits: int = 12) -> list[float]:
    """Errors of an activation that moves by a tenth of itself between two visits."""
    link, x = Link(spec), normal(4, 2048)
    found = []
    for k in range(visits):
        x = x + 0.1 * normal(4, 2048, seed=k + 1)
        found.append(error(x, link.step(x, range(4))))
    return found[2:]


def test_a_reference_in_int8_loses_nothing_that_a_change_in_4_bits_does_not():
    fine, coarse = (drifting(f"delta(int4,ref={ref})") for ref in ("bf16", "int8"))
    assert all(b <= 1.2 * a for a, b in zip(fine, coarse, strict=True))


def test_a_reference_in_int4_costs_accuracy_and_takes_half_of_int8():
    fine, coarse = (drifting(f"delta(int4,ref={ref})") for ref in ("int8", "int4"))
    assert sum(coarse) > 1.2 * sum(fine)
    assert KEEPINGS["int4"].nbytes(2048) < 0.55 * KEEPINGS["int8"].nbytes(2048)


def test_a_change_that_the_values_own_rounding_loses_is_a_flag():
    link, x = Link("delta(int4,first=raw,ref=fp32)"), normal(2, 512)
    assert link.step(x, [5, 6]).equal(x)
    there = full([5, 6], 512)
    link.begin(there)
    (section,) = link.sender.encode(x, 0, there)
    assert section.kind == Kind.SAME
    assert section.payload.numel() == 0
    assert link.receiver.decode(off_the_wire(on_the_wire([section])), 0, there).equal(x)
    assert len(set(link.digests)) == 1
    assert link.sender.store.versions([5, 6]) == [2, 2]


def test_only_the_rows_that_changed_travel():
    link, x = Link("delta(int4,first=raw,ref=fp32)"), normal(3, 512)
    link.step(x, [5, 6, 7])
    x[1] += 0.1 * normal(512, seed=3)
    there = full([5, 6, 7], 512)
    link.begin(there)
    sections = link.sender.encode(x, 0, there)
    assert {s.kind: s.rows for s in sections} == {Kind.CHANGE: [1], Kind.SAME: [0, 2]}
    found = link.receiver.decode(off_the_wire(on_the_wire(sections)), 0, there)
    assert found[[0, 2]].equal(x[[0, 2]])
    assert error(x, found) < 0.02
    assert len(set(link.digests)) == 1


def test_a_flag_with_a_payload_is_refused():
    link, x = Link("delta(int4,first=raw,ref=fp32)"), normal(2, 512)
    link.step(x, [5, 6])
    there = full([5, 6], 512)
    link.begin(there)
    (section,) = link.sender.encode(x, 0, there)
    changed = dataclasses.replace(section, payload=torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(FrameError, match="3 payload bytes where none belong"):
        link.receiver.decode([changed], 0, there)


@pytest.mark.parametrize("ref", KEEPINGS)
def test_a_first_visit_in_the_references_own_format_is_kept_as_it_came(ref):
    link, x = Link(f"delta(int4,first=int8,ref={ref})"), normal(2, 512)
    payload = codec("int8").encode(x)
    y = link.step(x, [5, 6])
    kept = link.receiver.store.rows([5, 6])
    expected = payload.view(2, -1) if ref == "int8" else KEEPINGS[ref].keep(y, None)
    assert all(a.equal(b) for a, b in zip(kept, expected, strict=True))


def test_a_value_beyond_bfloat16_is_refused_where_references_are_kept_so():
    link, x = Link("delta(int4,first=raw,ref=bf16)"), normal(1, 64)
    x[0, 3] = 3.4e38
    there = full([5], 64)
    link.begin(there)
    with pytest.raises(NonFiniteError):
        link.sender.encode(x, 0, there)
    assert len(link.sender.store) == 0


@pytest.mark.parametrize("ref", ["fp32", "int8"])
@pytest.mark.parametrize("row", [0, 1], ids=["a first visit", "twice in a step"])
def test_a_value_that_is_not_finite_is_an_error_in_exact_values_too(ref, row):
    link, x = Link(f"delta(int4,first=raw,ref={ref})"), normal(2, WIDTH)
    x[row, 5] = torch.nan
    there = full([3, 3])
    link.begin(there)
    with pytest.raises(NonFiniteError, match=rf"nan at index \({row}, 5\)"):
        link.sender.encode(x, 0, there)
    assert len(link.sender.store) == 0
    assert link.move(normal(2, WIDTH), 0, there).equal(normal(2, WIDTH))
