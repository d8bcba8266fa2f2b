"""Evaluation, and batches and sequences of any size, between training steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire as tw
from tests.distributed.pool import Pool
from tests.distributed.setup import (
    Case,
    Stage,
    batch,
    build,
    transport_of,
)


def evaluate(rank: int, world_size: int, num_stages: int, microbatches: int) -> list[float]:
    """Validation losses with the codec off and on, before, between and after training steps."""
    case = Case("Interleaved1F1B", num_stages, microbatches)
    stages, schedule, _ = build(rank, world_size, case)
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("delta(int4)", "int8"), deadline=20)
    parameters = [p for s in stages for p in s.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    _, vx, vy = batch(99, rows=7 if microbatches < 8 else 8)
    found = []
    for step in range(3):
        for codec in (False, True):
            before = pipeline.state_digests()
            result = pipeline.eval(*((vx,) if rank == 0 else ()), target=vy, codec=codec)
            assert pipeline.state_digests() == before
            assert all(s.submod.training for s in stages)
            found.append(result.loss)
        ids, x, y = batch(step)
        pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_evaluation_works_before_and_between_steps_and_leaves_references_untouched(
    pool: Pool,
) -> None:
    found = pool.run(evaluate, 2, 4, world_size=2)
    assert found[0] == found[1]
    for off, on in zip(found[0][::2], found[0][1::2], strict=True):
        assert off != on
        assert off == pytest.approx(on, abs=0.01)


def evaluate_on(rank: int, world_size: int, schedule: str, transport: str) -> float:
    case = Case(schedule, 4, 4, transport=transport)
    stages, built, _ = build(rank, world_size, case)
    plan = tw.Plan("raw", "raw")
    pipeline = tw.Pipeline(built, stages, plan, transport=transport_of(case), deadline=20)
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    ids, x, y = batch(0)
    known: dict[str, Any] = {"sample_ids": ids} if first else {}
    inputs = (x,) if first else ()
    for _ in range(2):
        evaluated = pipeline.eval(*inputs, target=y if last else None).loss
        trained = pipeline.step(*inputs, target=y if last else None, **known).loss
        assert evaluated == pytest.approx(trained, abs=1e-6)
    return trained


@pytest.mark.parametrize(
    ("schedule", "transport"),
    [
        ("ZBV", "gloo"),
        ("LoopedBFS", "gloo"),
        ("InterleavedZeroBubble", "gloo"),
        ("Interleaved1F1B", "memory"),
        ("LoopedBFS", "memory"),
    ],
)
def test_evaluation_works_where_neighbours_share_a_rank(
    pool: Pool, schedule: str, transport: str
) -> None:
    found = pool.run(evaluate_on, schedule, transport, world_size=1 if transport == "memory" else 2)
    assert len(set(found)) == 1


def test_validation_loss_depends_neither_on_microbatches_nor_on_ranks(pool: Pool) -> None:
    by_microbatches = [pool.run(evaluate, 4, n, world_size=2)[0][0] for n in (2, 4)]
    by_ranks = pool.run(evaluate, 4, 4, world_size=4)[0][0]
    assert [*by_microbatches, by_ranks] == pytest.approx([by_ranks] * 3, abs=1e-6)


def changing_shapes(rank: int, world_size: int, schedule_name: str) -> list[float]:
    """Whole and short batches, shorter and full sequences, micro-batches of one row."""
    case = Case(schedule_name, 2)
    stages, schedule, _ = build(rank, world_size, case)
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("delta(int4)", "int8"), deadline=20)
    losses = []
    for step, (rows, length) in enumerate([(8, 12), (7, 12), (8, 5), (4, 12), (6, 1), (8, 12)]):
        ids, x, y = batch(step, rows, length)
        result = pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
        assert result.tokens == rows * length
        losses.append(result.loss)
        evaluated = pipeline.eval(*((x,) if rank == 0 else ()), target=y, codec=False)
        assert evaluated.tokens == rows * length
        assert evaluated.loss == pytest.approx(result.loss, abs=0.01)
    digests = pipeline.state_digests()
    return [*losses, digests[f"edge 0 forward 0 {'sender' if rank == 0 else 'receiver'}"]]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_short_batches_and_sequences_of_any_length_train_and_evaluate(
    pool: Pool, schedule: str
) -> None:
    first, second = pool.run(changing_shapes, schedule, world_size=2)
    assert first == second


def modes(rank: int, world_size: int) -> list[bool]:
    """Whether each module of a stage trains, before and after an evaluation."""
    module = Stage(rank, 2)
    module.block.norm.eval()
    stages, schedule, _ = build(rank, world_size, Case(), {rank: module})
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("raw", "raw"), deadline=20)
    before = [m.training for m in module.modules()]
    _, x, y = batch(0)
    pipeline.eval(*((x,) if rank == 0 else ()), target=y)
    return [before == [m.training for m in module.modules()], all(before)]


def test_evaluation_gives_each_module_its_own_mode_back(pool: Pool) -> None:
    assert pool.run(modes, world_size=2) == [[True, False]] * 2
