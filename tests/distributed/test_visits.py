"""A sample is visited once a step, however the step is computed and whatever becomes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from tests.distributed.pool import Pool
from tests.distributed.setup import Case, Stage, barrier, batch, build, parameter_hash

CASE = Case("1F1B", 2, forward="delta(int4)", backward="int4", steps=6)


class Recomputed(nn.Module):
    """A stage whose activations are computed again in the backward pass."""

    def __init__(self, stage: nn.Module, recompute: bool) -> None:
        super().__init__()
        self.stage, self.recompute, self.calls = stage, recompute, 0

    def count(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.stage(x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            y: Tensor = checkpoint(self.count, x, use_reentrant=False)
            return y
        return self.count(x)


class Overflowing(torch.autograd.Function):
    """Identity whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * torch.inf


@dataclasses.dataclass
class Found:
    losses: list[float]
    parameters: str
    digest: int
    versions: dict[int, int]
    calls: int


def train(
    rank: int,
    world_size: int,
    recompute: bool = False,
    every: int = 1,
    overflow: int = -1,
    scale: float | None = None,
    case: Case = CASE,
) -> Found:
    """Steps of which every ``every``-th is followed by the optimizer's; in step ``overflow`` the
    gradient is not finite."""
    module = Recomputed(Stage(rank, 2), recompute)
    stages, schedule, _ = build(rank, world_size, case, {rank: module})
    pipeline = tw.Pipeline(schedule, stages, tw.Plan(case.forward, case.backward), deadline=20)
    optimizer = torch.optim.SGD(module.parameters(), lr=CASE.lr)
    losses = []
    for step in range(case.steps):
        ids, x, y = batch(step)
        hook = None
        if step == overflow and rank == 1:
            hook = module.stage.get_submodule("block").register_forward_hook(
                lambda _, __, found: Overflowing.apply(found)
            )
        inputs = (x,) if rank == 0 else ()
        result = pipeline.step(*inputs, target=y, sample_ids=ids, loss_scale=scale)
        losses.append(result.loss)
        assert result.overflow == (step == overflow)
        if hook is not None:
            hook.remove()
        if step % every == every - 1 and not result.overflow:
            optimizer.step()
            optimizer.zero_grad()
    keys = sorted(visits()) if case.forward != "raw" else []
    store = pipeline._remembered.stores[0][1] if keys else None
    found = Found(
        losses,
        parameter_hash(module),
        0 if store is None else store.digest(),
        {} if store is None else dict(zip(keys, store.versions(keys), strict=True)),
        module.calls,
    )
    pipeline.close()
    return found


def visits() -> dict[int, int]:
    """How often each sample comes."""
    ids = torch.cat([batch(step)[0] for step in range(CASE.steps)]).tolist()
    return {key: ids.count(key) for key in sorted(set(ids))}


def test_recomputed_activations_are_no_second_visit(pool: Pool) -> None:
    plain = pool.run(train, world_size=2)
    recomputed = pool.run(train, recompute=True, world_size=2)
    for one, other in zip(plain, recomputed, strict=True):
        assert other.calls == 2 * one.calls
        assert dataclasses.replace(other, calls=one.calls) == one
    assert [one.versions for one in plain] == [visits()] * 2


def test_accumulated_gradients_leave_a_visit_a_step(pool: Pool) -> None:
    first, second = pool.run(train, every=3, world_size=2)
    assert first.digest == second.digest
    assert first.versions == second.versions == visits()


def test_a_step_whose_gradient_overflows_is_a_visit_at_both_ends(pool: Pool) -> None:
    first, second = pool.run(train, overflow=2, scale=256.0, world_size=2)
    assert first.digest == second.digest
    assert first.versions == second.versions == visits()
    assert first.losses == second.losses


def test_an_overflow_leaves_what_was_accumulated_before_it(pool: Pool) -> None:
    case = dataclasses.replace(CASE, forward="raw", backward="raw", steps=3)
    first, second = pool.run(train, overflow=1, scale=2.0, every=3, case=case, world_size=2)
    assert first.losses == second.losses
    shorter = pool.run(left_out, case, world_size=2)
    assert [first.parameters, second.parameters] == shorter


def left_out(rank: int, world_size: int, case: Case) -> str:
    """The parameters after steps 0 and 2 alone."""
    module = Stage(rank, 2)
    stages, schedule, _ = build(rank, world_size, case, {rank: module})
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("raw", "raw"), deadline=20)
    for step in (0, 2):
        _, x, y = batch(step)
        pipeline.step(*((x,) if rank == 0 else ()), target=y, loss_scale=2.0)
    torch.optim.SGD(module.parameters(), lr=case.lr).step()
    pipeline.close()
    return parameter_hash(module)


def test_a_power_of_two_as_scale_changes_no_bit(pool: Pool) -> None:
    case = dataclasses.replace(CASE, forward="raw", backward="raw")
    plain = pool.run(train, case=case, world_size=2)
    assert pool.run(train, scale=1024.0, case=case, world_size=2) == plain


def scaled_wrongly(rank: int, world_size: int, scales: list[Any]) -> None:
    try:
        train(rank, world_size, scale=scales[rank])
    finally:
        barrier()  # a rank that is done first would close the other's connection


@pytest.mark.parametrize(
    ("scales", "what"),
    [
        ([0.0, 0.0], "loss_scale=0.0: a finite number above 0, or None"),
        ([10**400, 10**400], "a finite number above 0, or None"),
        (["2", "2"], "loss_scale='2': a finite number"),
        ([2.0, 4.0], "rank 1 was given another loss_scale than the first stage's rank"),
    ],
)
def test_a_scale_that_makes_no_sense_is_the_same_error_everywhere(
    pool: Pool, scales: list[Any], what: str
) -> None:
    for error in pool.run(scaled_wrongly, scales, world_size=2, raises=False):
        assert error.type_name == "ValueError"
        assert what in error.message
