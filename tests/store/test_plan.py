"""Which samples are seen for the first time: both ends reach the same answer on their own."""

from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from thinwire.store import Members, Visit, plan_step

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


# A bounded store.

UNKEPT = Visit.UNKEPT


def one_by_one(keys: list[int], capacity: int, size: int = 1) -> tuple[list[Visit], set[int]]:
    """Visits of ``keys``, one a step, and who is a member at the end."""
    members, found = Members(capacity, lambda n: n), []
    lengths: dict[int, int] = {}
    for key in keys:
        step = [([key], [size])]
        plan = plan_step(lengths, step, members)
        for gone in plan.evicted:
            lengths.pop(gone, None)
        members.advance(step, plan)
        if plan.visits[0][0] == FIRST:
            lengths[key] = size
        members.used = sum(lengths.values())
        assert members.used <= capacity
        found += plan.visits[0]
    return found, set(lengths)


@given(held, steps, st.integers(0, 12))
def test_a_bounded_plan_leaves_its_arguments_alone_too(lengths, microbatches, capacity):
    members = Members(capacity, lambda n: n + 1)
    members.used = sum(n + 1 for n in lengths.values())
    members.last = dict.fromkeys(lengths, 0)
    members.now = 1000
    before = deepcopy((lengths, microbatches, vars(members)))
    first = plan_step(lengths, microbatches, members)
    assert plan_step(lengths, microbatches, members) == first
    assert (lengths, microbatches, vars(members)) == before
    assert not {k for keys, _ in microbatches for k in keys} & set(first.evicted)


def test_members_stay_while_all_samples_come_again_and_again():
    visits, members = one_by_one([0, 1, 2, 3] * 5, capacity=2)
    assert visits == [FIRST, FIRST, UNKEPT, UNKEPT] + [AGAIN, AGAIN, UNKEPT, UNKEPT] * 4
    assert members == {0, 1}


def test_members_that_do_not_come_any_more_make_room():
    old, new = [0, 1, 2, 3] * 3, [10, 11, 12, 13] * 6
    visits, members = one_by_one(old + new, capacity=2)
    assert members < {10, 11, 12, 13}
    assert len(members) == 2
    assert visits.count(AGAIN) > 4


def test_members_that_never_came_again_make_room_in_the_end():
    _, members = one_by_one(list(range(200)), capacity=4)
    assert max(members) > 4
    assert len(members) == 4


def test_a_sample_larger_than_the_store_is_never_kept():
    assert one_by_one([1, 1, 1], capacity=4, size=5) == ([UNKEPT] * 3, set())


def test_a_member_of_another_length_that_no_longer_fits_stays_as_it_was():
    members = Members(4, lambda n: n)
    members.used, members.last = 4, {1: 0, 2: 0}
    plan = plan_step({1: 2, 2: 2}, [([1], [3])], members)
    assert plan.visits == [[UNKEPT]]
    assert plan.evicted == []
