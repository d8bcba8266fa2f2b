"""A pipeline on each device that there is: packed bytes cross over the CPU transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire as tw
from tests.distributed.pool import Pool
from tests.distributed.setup import Case, Stage, batch, boundary


def train_on(rank: int, world_size: int, device: str, forward: str, backward: str) -> Any:
    """Losses of some steps and an evaluation, and the references' hash."""
    case = Case(forward=forward, backward=backward)
    module = Stage(rank, 2).to(device)
    stage = tw.PipelineStage(module, rank, 2, device, **boundary(rank, 2, 2))
    schedule = tw.build_schedule(case.schedule, [stage], case.microbatches, tw.TokenLoss())
    pipeline = tw.Pipeline(schedule, [stage], tw.Plan(forward, backward), deadline=30)
    optimizer = torch.optim.SGD(module.parameters(), lr=case.lr)
    losses = []
    for step in range(6):
        ids, x, y = (t.to(device) for t in batch(step % 2))
        inputs = (x,) if rank == 0 else ()
        losses.append(pipeline.step(*inputs, target=y, sample_ids=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(pipeline.eval(*inputs, target=y, codec=False).loss)
    role = "sender" if rank == 0 else "receiver"
    return losses, pipeline.state_digests()[f"edge 0 forward 0 {role}"]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [("raw", "raw"), ("delta(int4)", "int8"), ("delta(int2)", "int4:round=stochastic")],
)
def test_two_stages_train_on_the_device_and_agree_on_their_references(
    pool: Pool, device: torch.device, forward: str, backward: str
) -> None:
    first, second = pool.run(train_on, str(device), forward, backward, world_size=2)
    assert first == second
    assert first[0][-1] < first[0][0]
