"""Error feedback, shared masks and warm starts between real processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.distributed.pool import Pool
from tests.distributed.setup import Case, batch, build, parameter_hash

SLOT = "ef21(topk:0.3,key=slot)", "ef(topk:0.2,key=slot)"


@dataclasses.dataclass
class Found:
    losses: list[float]
    parameters: list[str]
    bits: list[float]


def train(
    rank: int,
    world_size: int,
    plan: tuple[str, str],
    transport: str = "gloo",
    stages: int = 2,
    ids: bool = True,
    dense: int = 0,
    scale: float | None = None,
    left_out: int | None = None,
    spoiled: int | None = None,
) -> Found:
    """Six steps, ``dense`` of them before compression; batch ``left_out`` is not there at all,
    and in batch ``spoiled`` the gradient overflows."""
    case = Case("1F1B" if transport == "gloo" else "Interleaved1F1B", stages)
    made, schedule, _ = build(rank, world_size, case)
    memory = tw.MemoryTransport() if transport == "memory" else None
    pipeline = tw.Pipeline(schedule, made, tw.Plan(*plan), transport=memory, deadline=20)
    parameters = [p for stage in made for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    losses = []
    for number in range(6):
        if number == left_out:
            continue
        keys, x, y = batch(number)
        hook: Any = None
        last = next((s for s in made if s.is_last), None)
        if number == spoiled and last is not None:
            hook = last.submod.register_full_backward_pre_hook(lambda _, g: (g[0] * torch.inf,))
        inputs = (x,) if any(s.is_first for s in made) else ()
        result = pipeline.step(
            *inputs,
            target=y,
            sample_ids=keys if ids else None,
            dense=number < dense,
            loss_scale=scale,
        )
        if hook is not None:
            hook.remove()
        assert result.overflow == (number == spoiled)
        if not result.overflow:
            losses.append(result.loss)
            optimizer.step()
        optimizer.zero_grad()
    bits = [link["bits_per_value"] for link in pipeline.link_reports()]
    found = Found(losses, [parameter_hash(s.submod) for s in made], bits)
    pipeline.close()
    return found


PLANS = [
    ("topk:0.3", "ef(topk:0.1)"),
    ("ef(topk:0.3/int8)", "topk:0.3,mask=shared"),
    ("ef21(topk:0.2)", "efmixed(topk:0.2/bf16)"),
    ("delta(int4)", "ef(int4:round=stochastic)"),
]


@pytest.mark.parametrize("plan", PLANS)
def test_in_one_process_it_is_the_same_to_the_bit(plan: tuple[str, str], pool: Pool) -> None:
    apart = pool.run(train, plan, world_size=2)
    (together,) = pool.run(train, plan, transport="memory", world_size=1)
    assert apart[0].losses == apart[1].losses == together.losses
    assert [one.parameters[0] for one in apart] == together.parameters
    assert apart[0].bits == together.bits


def test_by_slot_no_sample_ids_are_needed(pool: Pool) -> None:
    without = pool.run(train, SLOT, ids=False, world_size=2)
    assert pool.run(train, SLOT, world_size=2) == without


def test_a_step_that_overflows_leaves_no_residual(pool: Pool) -> None:
    plan = ("topk:0.3", "ef(topk:0.1)")
    shorter = pool.run(train, plan, scale=4.0, left_out=2, world_size=2)
    spoiled = pool.run(train, plan, scale=4.0, spoiled=2, world_size=2)
    assert [one.losses for one in spoiled] == [one.losses for one in shorter]
    assert [one.parameters for one in spoiled] == [one.parameters for one in shorter]


@pytest.mark.parametrize(
    "plan", [("ef21(topk:0.1)", "ef(topk:0.1)"), ("topk:0.1", "topk:0.1,mask=shared")]
)
def test_before_compression_it_is_the_uncompressed_run(plan: tuple[str, str], pool: Pool) -> None:
    exact = pool.run(train, ("raw", "raw"), world_size=2)
    warm = pool.run(train, plan, dense=6, world_size=2)
    assert [(one.losses, one.parameters) for one in warm] == [
        (one.losses, one.parameters) for one in exact
    ]
    part = pool.run(train, plan, dense=4, world_size=2)
    assert part[0].losses[:5] != exact[0].losses[:5]
    assert part[0].losses[:4] == exact[0].losses[:4]


def test_ranks_that_begin_to_compress_at_different_steps_are_told(pool: Pool) -> None:
    for error in pool.run(apart, world_size=2, raises=False):
        assert error.type_name == "ValueError"
        assert "rank 1 was given another dense than the first stage's rank" in error.message


def apart(rank: int, world_size: int) -> None:
    train(rank, world_size, PLANS[0], dense=rank)


def measured(rank: int, world_size: int, plan: tuple[str, str], transport: str) -> list[Any]:
    """What coding lost in the second of three steps, which alone is measured."""
    case = Case("Interleaved1F1B", 2)
    made, schedule, _ = build(rank, world_size, case)
    memory = tw.MemoryTransport() if transport == "memory" else None
    pipeline = tw.Pipeline(schedule, made, tw.Plan(*plan), transport=memory, deadline=20)
    found = []
    for number in range(3):
        keys, x, y = batch(number)
        inputs = (x,) if any(s.is_first for s in made) else ()
        pipeline.step(*inputs, target=y, sample_ids=keys, measure=number == 1)
        found.append(pipeline.fidelity_reports())
    pipeline.close()
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_all_ranks_learn_what_coding_loses_on_each_link(plan: tuple[str, str], pool: Pool) -> None:
    one, other = pool.run(measured, plan, "gloo", world_size=2)
    (together,) = pool.run(measured, plan, "memory", world_size=1)
    assert one == other == together
    assert one[0] == one[2] == []
    assert [(link["edge"], link["direction"]) for link in one[1]] == [
        (0, "forward"),
        (0, "backward"),
    ]
    for link in one[1]:
        assert 0 < link["relative_error"] < 1.2
        assert 0.3 < link["cosine"] < 1
        assert link["outlier_ratio"] > 1
