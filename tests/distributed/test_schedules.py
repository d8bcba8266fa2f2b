"""Every schedule trains on our stages exactly as on torch's own."""

from __future__ import annotations

import dataclasses

import pytest

from tests.distributed.pool import Pool
from tests.distributed.setup import Case, merged, run, without_run

ON_TWO = [
    ("GPipe", 2),
    ("1F1B", 2),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 4),
    ("LoopedBFS", 4),
    ("InterleavedZeroBubble", 4),
    ("ZBV", 4),
]
ON_FOUR = [
    ("GPipe", 4),
    ("1F1B", 4),
    ("Interleaved1F1B", 4),
    ("Interleaved1F1B", 8),
    ("LoopedBFS", 8),
    ("InterleavedZeroBubble", 8),
    ("ZBV", 8),
]
LAYOUTS = [(s, n, 2) for s, n in ON_TWO] + [(s, n, 4) for s, n in ON_FOUR]


@pytest.mark.parametrize(("schedule", "num_stages", "ranks"), LAYOUTS)
def test_raw_is_bit_identical_to_torchs_own_stage(
    pool: Pool, schedule: str, num_stages: int, ranks: int
) -> None:
    case = Case(schedule, num_stages)
    stock = pool.run(run, dataclasses.replace(case, transport="stock"), world_size=ranks)
    ours = pool.run(run, case, world_size=ranks)
    assert merged(ours) == merged(stock)
    last = next(o for o in stock if o.losses)
    assert all(o.losses == last.losses for o in ours)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "ranks"), [x for x in LAYOUTS if x[1:] in ((4, 2), (4, 4))]
)
def test_an_edge_that_is_off_uses_torchs_operations_and_sends_no_message(
    pool: Pool, schedule: str, num_stages: int, ranks: int
) -> None:
    case = Case(schedule, num_stages, forward="off", backward="off", steps=3)
    stock = pool.run(run, dataclasses.replace(case, transport="stock"), world_size=ranks)
    ours = pool.run(run, case, world_size=ranks)
    assert merged(ours) == merged(stock)
    assert [link["edge"] for link in ours[0].links] == [-1]  # control traffic alone


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("raw", "raw"),
        ("delta(int4)", "int8"),
        ("delta(int2,first=int4)", "int4:round=stochastic"),
    ],
)
def test_memory_and_gloo_give_bit_identical_runs_and_equal_byte_counts(
    pool: Pool, schedule: str, forward: str, backward: str
) -> None:
    case = Case(schedule, 2, forward=forward, backward=backward, steps=8)
    gloo = pool.run(run, case, world_size=2)
    memory = pool.run(run, dataclasses.replace(case, transport="memory"), world_size=1)
    assert memory[0].losses == gloo[0].losses
    assert merged(memory) == merged(gloo)
    assert memory[0].links[:-1] == gloo[0].links[:-1]  # the last is control: none in one process


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_both_ends_of_each_link_hold_the_same_references(pool: Pool, schedule: str) -> None:
    case = Case(schedule, 4, forward="delta(int3)", backward="delta(int6)", steps=9)
    outcomes = pool.run(run, case, world_size=4)
    digests = {k: v for o in outcomes for k, v in o.digests.items()}
    for edge in range(3):
        for direction in ("forward", "backward"):
            name = f"edge {edge} {direction} 0"
            assert digests[f"{name} sender"] == digests[f"{name} receiver"] != 0


def test_compressed_runs_are_the_same_under_all_schedules(pool: Pool) -> None:
    found = set()
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B"):
        case = Case(schedule, 2, forward="delta(int4)", backward="int8:round=stochastic")
        outcomes = pool.run(run, case, world_size=2)
        found.add((tuple(outcomes[0].losses), tuple(sorted(merged(outcomes).items()))))
    assert len(found) == 1


def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not(pool: Pool) -> None:
    case = Case(forward="int4:round=stochastic", backward="int4:round=stochastic")
    first, second = (pool.run(run, case, world_size=2) for _ in range(2))
    other = pool.run(run, dataclasses.replace(case, seed=1), world_size=2)
    assert without_run(first) == without_run(second)
    assert merged(other) != merged(first)
