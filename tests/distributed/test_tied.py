"""Parameters that two stages share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.distributed.pool import Pool
from tests.distributed.setup import (
    DIM,
    LENGTH,
    VOCAB,
    Case,
    Stage,
    batch,
    build,
)


class Tied(nn.Module):
    """First stage with an embedding, or last with a head that shares its weight."""

    def __init__(self, index: int, weight: nn.Parameter) -> None:
        super().__init__()
        self.body = Stage(index, 4)
        self.body.embed = self.body.head = nn.Identity()
        self.weight, self.index = weight, index

    def forward(self, x: Tensor) -> Tensor:
        if self.index == 0:
            x = nn.functional.embedding(x, self.weight)
        y: Tensor = self.body(x)
        return nn.functional.linear(y, self.weight) if self.index == 3 else y


def tied_run(rank: int, world_size: int, steps: int) -> Any:
    torch.manual_seed(5)
    weight = nn.Parameter(torch.randn(VOCAB, DIM) * 0.3)
    modules: dict[int, nn.Module] = {0: Tied(0, weight), 3: Tied(3, weight)}
    case = Case("1F1B", 4)
    stages, schedule, _ = build(rank, world_size, case, modules)
    pipeline = tw.Pipeline(
        schedule,
        stages,
        tw.Plan("delta(int4)", "int8"),
        max_grad_norm=0.5,
        deadline=20,
        tied={"embedding": weight} if rank in (0, 3) else None,
    )
    parameters = [p for s in stages for p in s.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    norms, losses = [], []
    for step in range(steps):
        ids, x, y = batch(step)
        result = pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
        norms.append(result.grad_norm)
        losses.append(result.loss)
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach(), norms, losses


def test_a_tied_embedding_and_head_are_equal_after_a_hundred_steps(pool: Pool) -> None:
    found = pool.run(tied_run, 100, world_size=4)
    assert torch.equal(found[0][0], found[3][0])
    assert found[0][2][-1] < found[0][2][0]


def test_a_tied_gradient_counts_once_in_the_norm(pool: Pool) -> None:
    _, norms, _ = pool.run(tied_run, 1, world_size=4)[0]
    torch.manual_seed(5)
    weight = nn.Parameter(torch.randn(VOCAB, DIM) * 0.3)
    modules = [Tied(0, weight), Stage(1, 4), Stage(2, 4), Tied(3, weight)]
    _, x, y = batch(0)
    for module in modules:
        x = module(x)
    nn.functional.cross_entropy(x.flatten(0, 1), y.flatten()).backward()
    everything = {id(p): p for m in modules for p in m.parameters()}
    gradients = [p.grad.flatten() for p in everything.values() if p.grad is not None]
    norm = float(torch.cat(gradients).norm())
    assert norms[0] == pytest.approx(norm, rel=0.02)  # the links are compressed


def tied_in(rank: int, world_size: int, dtype: torch.dtype) -> bool:
    """A step with a large tied parameter of another dtype."""

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.weight = nn.Parameter((torch.randn(400, DIM) * 0.1).to(dtype))

        def forward(self, x: Tensor) -> Tensor:
            if rank == 0:
                return nn.functional.embedding(x, self.weight).float()
            return nn.functional.linear(x.to(dtype), self.weight).float()

    module = Ends()
    hidden = torch.empty(2, LENGTH, DIM, device="meta", requires_grad=True)
    tokens = torch.empty(2, LENGTH, dtype=torch.int64, device="meta")
    logits = torch.empty(2, LENGTH, 400, device="meta", requires_grad=True)
    stage = tw.PipelineStage(
        module,
        rank,
        2,
        "cpu",
        input_args=hidden if rank else tokens,
        output_args=logits if rank else hidden,
    )
    schedule = tw.build_schedule("1F1B", [stage], 4, tw.TokenLoss())
    pipeline = tw.Pipeline(schedule, [stage], tied={"w": module.weight}, deadline=20)
    ids, x, y = batch(0)
    pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
    return bool(module.weight.grad is not None and module.weight.grad.abs().sum() > 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tied_parameters_may_have_any_float_dtype(pool: Pool, dtype: torch.dtype) -> None:
    assert all(pool.run(tied_in, dtype, world_size=2))


def shared_in_a_v(rank: int, world_size: int, schedule_name: str, clip: float | None) -> Any:
    """One parameter in the first and the last of four stages, clipped; its gradient and norm."""
    torch.manual_seed(5)
    weight = nn.Parameter(torch.randn(VOCAB, DIM) * 0.3)
    modules: dict[int, nn.Module] = {0: Tied(0, weight), 3: Tied(3, weight)}
    stages, schedule, _ = build(rank, world_size, Case(schedule_name, 4), modules)
    holds = any(s.stage_index in (0, 3) for s in stages)
    pipeline = tw.Pipeline(
        schedule,
        stages,
        tw.Plan("raw", "raw"),
        max_grad_norm=clip,
        deadline=20,
        tied={"embedding": weight} if holds else None,
    )
    ids, x, y = batch(0)
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    known: dict[str, Any] = {"sample_ids": ids} if first else {}
    result = pipeline.step(*((x,) if first else ()), target=y if last else None, **known)
    return result.grad_norm, weight.grad if holds else None


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_parameter_in_two_stages_of_a_rank_counts_and_is_clipped_once(
    pool: Pool, clip: float | None
) -> None:
    in_a_v = pool.run(shared_in_a_v, "ZBV", clip, world_size=2)[0]
    apart = pool.run(shared_in_a_v, "1F1B", clip, world_size=4)[0]
    assert in_a_v[0] == pytest.approx(apart[0], rel=1e-5)
    assert torch.allclose(in_a_v[1], apart[1], atol=1e-7)


def accumulate(rank: int, world_size: int, frozen: bool) -> Any:
    """The tied gradient after two steps without zero_grad, and the sum of each step's own."""
    torch.manual_seed(5)
    weight = nn.Parameter(torch.randn(VOCAB, DIM) * 0.3, requires_grad=not frozen)
    modules: dict[int, nn.Module] = {0: Tied(0, weight), 3: Tied(3, weight)}
    stages, schedule, _ = build(rank, world_size, Case("1F1B", 4), modules)
    tied = {"embedding": weight} if rank in (0, 3) else None
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("raw", "raw"), tied=tied, deadline=20)
    parts: list[Tensor | None] = []
    for clear in (True, True, False, False):
        if clear or len(parts) == 2:
            weight.grad = None
        ids, x, y = batch(len(parts) % 2)
        pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
        parts.append(None if weight.grad is None else weight.grad.clone())
    return parts


def test_tied_gradients_accumulate_over_steps(pool: Pool) -> None:
    first, second, _, both = pool.run(accumulate, False, world_size=4)[0]
    assert torch.allclose(both, first + second, atol=1e-7)


def test_a_frozen_tied_parameter_gets_no_gradient(pool: Pool) -> None:
    assert pool.run(accumulate, True, world_size=4)[0] == [None] * 4
