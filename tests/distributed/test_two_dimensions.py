"""Replicas of a pipeline: each rank averages gradients with those that hold the same stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.distributed.pool import Pool, WorkerError
from tests.distributed.setup import Case, Stage, batch, boundary, parameter_hash

pytestmark = pytest.mark.timeout(120)


def build(rank: int, case: Case, spec: str, double: bool = False, **options: Any) -> Any:
    """(replica, pipeline, reducer, optimizer) of one of 2 x 2 ranks."""
    replica, place = divmod(rank, 2)
    groups = [dist.new_group([2 * r, 2 * r + 1]) for r in range(2)]
    across = [dist.new_group([p, p + 2]) for p in range(2)]
    stages = []
    for index in tw.stages_of_rank(case.schedule, place, 2, case.num_stages):
        torch.manual_seed(index)
        module = Stage(index, case.num_stages)
        example: dict[str, Any] = boundary(index, case.num_stages, 2)
        if double:
            module.double()
            example = {
                k: v.double().requires_grad_() if v.is_floating_point() else v
                for k, v in example.items()
            }
        stages.append(
            tw.PipelineStage(
                module,
                index,
                case.num_stages,
                torch.device("cpu"),
                group=groups[replica],
                **example,
            )
        )
    schedule = tw.build_schedule(case.schedule, stages, case.microbatches, tw.TokenLoss())
    parameters = [p for s in stages for p in s.submod.named_parameters(prefix=str(s.stage_index))]
    reducer = tw.GradientReducer(parameters, across[place], spec, deadline=20)
    pipeline = tw.Pipeline(
        schedule,
        stages,
        tw.Plan(case.forward, case.backward),
        max_grad_norm=case.clip,
        deadline=20,
        reducer=reducer,
        **options,
    )
    optimizer = torch.optim.SGD([p for _, p in parameters], lr=0.05, momentum=0.9)
    return replica, pipeline, reducer, optimizer


def run(rank: int, world: int, case: Case, spec: str) -> tuple[list[float], dict[int, str]]:
    replica, pipeline, _, optimizer = build(rank, case, spec)
    losses = []
    for step in range(case.steps):
        ids, x, y = batch(2 * step + replica)
        result = pipeline.step(x, target=y, sample_ids=ids)
        losses.append(result.grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    hashes = {s.stage_index: parameter_hash(s.submod) for s in pipeline.stages}
    return losses, hashes


CASES = [
    Case("Interleaved1F1B", 2, forward="delta(int4)", backward="int8", clip=0.5),
    Case("InterleavedZeroBubble", 4, forward="int8", backward="int8"),
    Case("ZBV", 4),
    Case("GPipe", 2, forward="tile", backward="int6"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.schedule)
@pytest.mark.parametrize("spec", ["raw", "ef(int4:symmetric)"])
def test_replicas_of_a_pipeline_stay_the_same(pool: Pool, case: Case, spec: str) -> None:
    found = pool.run(run, case, spec, world_size=4)
    for place in range(2):
        assert found[place][1] == found[place + 2][1]
    assert found[0][0] == found[2][0] == found[3][0]  # norms


def unequal(rank: int, world: int, schedule: str) -> dict[str, Any]:
    """Replicas with unequal numbers of valid targets, in float64."""
    case = Case(schedule, 2 if schedule == "1F1B" else 4)
    replica, pipeline, _, optimizer = build(rank, case, "raw", double=True)
    for step in range(10):
        parts = [batch(2 * step + r) for r in range(2)]
        parts[1][2][3:] = -100
        count = sum(int((y != -100).sum()) for _, _, y in parts)
        ids, x, y = parts[replica]
        pipeline.step(x, target=y, sample_ids=ids, count=count)
        optimizer.step()
        optimizer.zero_grad()
    return {
        f"{s.stage_index}.{k}": v.clone()
        for s in pipeline.stages
        for k, v in s.submod.state_dict().items()
    }


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_without_loss_two_replicas_are_one_process_on_all_data(pool: Pool, schedule: str) -> None:
    found = pool.run(unequal, schedule, world_size=4)
    stages = []
    for index in range(2 if schedule == "1F1B" else 4):
        torch.manual_seed(index)
        stages.append(Stage(index, 2 if schedule == "1F1B" else 4).double())
    model = nn.Sequential(*stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(10):
        (_, x, y), (_, x2, y2) = batch(2 * step), batch(2 * step + 1)
        y2[3:] = -100
        output = model(torch.cat([x, x2])).flatten(0, 1)
        nn.functional.cross_entropy(output, torch.cat([y, y2]).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = model.state_dict()
    for one in found:
        for name, value in one.items():
            assert float((value - expected[name]).abs().max()) < 1e-9, name


def overflowing(rank: int, world: int) -> tuple[list[bool], dict[int, str], bool]:
    """A loss scale that overflows in one replica."""
    case = Case("1F1B", 2)
    replica, pipeline, reducer, optimizer = build(rank, case, "ef(int4:symmetric)")
    found, before, same = [], {}, True
    for step in range(4):
        ids, x, y = batch(2 * step + replica)
        before = reducer.state_dict()
        if step == 2 and rank == 1:
            bad = next(iter(pipeline.stages[0].submod.parameters()))
            hook = bad.register_hook(lambda g: g * float("inf"))
        result = pipeline.step(x, target=y, sample_ids=ids, loss_scale=2.0**10)
        if step == 2 and rank == 1:
            hook.remove()
        found.append(result.overflow)
        if result.overflow:
            after = reducer.state_dict()
            same = all(torch.equal(before[k], after[k]) for k in before if k != "steps")
        else:
            optimizer.step()
        optimizer.zero_grad()
    return found, {s.stage_index: parameter_hash(s.submod) for s in pipeline.stages}, same


def test_an_overflow_in_one_stage_of_one_replica_skips_the_step_in_all(pool: Pool) -> None:
    found = pool.run(overflowing, world_size=4)
    assert [one[0] for one in found] == [[False, False, True, False]] * 4
    assert found[0][1] == found[2][1]
    assert found[1][1] == found[3][1]
    assert all(one[2] for one in found)


def failing(rank: int, world: int) -> None:
    case = Case("1F1B", 2)
    replica, pipeline, _, _ = build(rank, case, "int8")
    ids, x, y = batch(replica)
    if rank == 3:
        pipeline.stages[0].submod.forward = lambda *_: 1 / 0
    pipeline.step(x, target=y, sample_ids=ids)


def test_what_ends_one_replica_ends_all(pool: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(failing, world_size=4)
    errors = caught.value.errors
    assert set(errors) == {0, 1, 2, 3}
    messages = [errors[r].message for r in range(3)]  # rank 3 has it in torch's words
    assert all("division by zero" in one for one in messages), messages
    assert max(e.seconds for e in errors.values()) < 15
