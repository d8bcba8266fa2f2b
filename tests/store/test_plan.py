"""Which samples are seen for the first time: both ends reach the same answer on their own."""

from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from thinwire.store import Visit, plan_step

FIRST, AGAIN, REPEAT = Visit.FIRST, Visit.AGAIN, Visit.REPEAT

held = st.dictionaries(st.integers(0, 8), st.integers(0, 3))
rows = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=6)
steps = st.lists(rows.map(lambda r: ([k for k, _ in r], [n for _, n in r])), max_size=4)


@given(held, steps)
def test_the_plan_depends_on_its_arguments_alone_and_leaves_them_alone(lengths, microbatches):
    before = deepcopy((lengths, microbatches))
    assert plan_step(lengths, microbatches) == plan_step(dict(lengths), list(microbatches))
    assert (lengths, microbatches) == before


@given(held, steps)
def test_every_row_of_every_micro_batch_has_a_visit(lengths, microbatches):
    plan = plan_step(lengths, microbatches).visits
    assert [len(visits) for visits in plan] == [len(keys) for keys, _ in microbatches]


@given(held, steps)
def test_a_key_moves_its_reference_at_most_once_a_step(lengths, microbatches):
    plan = plan_step(lengths, microbatches).visits
    moved = [
        key
        for (keys, _), visits in zip(microbatches, plan, strict=True)
        for key, visit in zip(keys, visits, strict=True)
        if visit != REPEAT
    ]
    assert len(moved) == len(set(moved))


@given(held, steps)
def test_a_change_is_only_planned_against_a_reference_of_the_same_length(lengths, microbatches):
    plan = plan_step(lengths, microbatches).visits
    for (keys, sizes), visits in zip(microbatches, plan, strict=True):
        for key, n, visit in zip(keys, sizes, visits, strict=True):
            if visit == AGAIN:
                assert lengths[key] == n


def test_a_key_without_reference_is_seen_for_the_first_time():
    assert plan_step({1: 4}, [([1, 2], [4, 4])]).visits == [[AGAIN, FIRST]]


def test_a_key_of_another_length_is_seen_for_the_first_time():
    assert plan_step({1: 4}, [([1], [3])]).visits == [[FIRST]]


def test_a_second_occurrence_is_a_repeat_within_and_across_micro_batches():
    assert plan_step({1: 4}, [([1, 1], [4, 4]), ([2], [4]), ([2, 1], [4, 4])]).visits == [
        [AGAIN, REPEAT],
        [FIRST],
        [REPEAT, REPEAT],
    ]
