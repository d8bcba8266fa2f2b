"""Error feedback, shared masks and warm starts between real processes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from tests.distributed.pool import Pool
from tests.distributed.setup import Case, Stage, batch, build, parameter_hash

SLOT = "ef21(topk:0.3,key=slot)", "ef(topk:0.2,key=slot)"


@dataclasses.dataclass
class Found:
    losses: list[float]
    parameters: list[str]
    bits: list[float]
    values: list[dict[str, int]]  # by kind, of each link


def train(
    rank: int,
    world_size: int,
    plan: tuple[str, str],
    transport: str = "gloo",
    stages: int = 2,
    ids: bool = True,
    dense: int = 0,
    scale: float | tuple[float, ...] | None = None,
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
            loss_scale=scale[number % len(scale)] if isinstance(scale, tuple) else scale,
        )
        if hook is not None:
            hook.remove()
        assert result.overflow == (number == spoiled)
        if not result.overflow:
            losses.append(result.loss)
            optimizer.step()
        optimizer.zero_grad()
    links = pipeline.link_reports()
    bits = [link["bits_per_value"] for link in links]
    kinds = [link["kinds"] for link in links if link["direction"] != "control"]
    values = [{name: kind["values"] for name, kind in one.items()} for one in kinds]
    found = Found(losses, [parameter_hash(s.submod) for s in made], bits, values)
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


def test_what_was_lost_before_counts_as_no_further_values(pool: Pool) -> None:
    raw, mixed = (
        pool.run(train, (name, "raw"), world_size=2)[0].values
        for name in ("raw", "efmixed(topk:0.2)")
    )
    assert [sum(kinds.values()) for kinds in mixed] == [sum(kinds.values()) for kinds in raw]
    assert any("residual" in kinds for kinds in mixed)


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
    assert [list(kinds) for kinds in warm[0].values] == [["dense"], ["dense"]]
    part = pool.run(train, plan, dense=4, world_size=2)
    assert all(kinds["dense"] == 2 * sum(kinds.values()) / 3 for kinds in part[0].values)
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


class Recomputed(nn.Module):
    """A stage whose activations are computed again in the backward pass, if asked for."""

    def __init__(self, stage: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.stage, self.reentrant = stage, reentrant

    def forward(self, x: Tensor) -> Tensor:
        run: Any = self.stage
        if self.reentrant is not None and self.training:
            # torch's reentrant way needs an input with a gradient; tokens have none
            reentrant = self.reentrant and x.dtype.is_floating_point
            run = functools.partial(checkpoint, self.stage, use_reentrant=reentrant)
        y: Tensor = run(x)
        return y


def recompute(rank: int, world_size: int, reentrant: bool | None) -> tuple[list[float], Any]:
    """Losses, and what the sender of gradients has left."""
    module = Recomputed(Stage(rank, 2), reentrant)
    made, schedule, _ = build(rank, world_size, Case("1F1B", 2), {rank: module})
    plan = tw.Plan("ef(topk:0.3)", "ef(topk:0.2)")
    pipeline = tw.Pipeline(schedule, made, plan, deadline=20)
    losses = []
    for number in range(4):
        keys, x, y = batch(number)
        inputs = (x,) if rank == 0 else ()
        losses.append(pipeline.step(*inputs, target=y, sample_ids=keys).loss)
    stores = [store.digest() for _, store in pipeline._remembered.stores]
    pipeline.close()
    return losses, stores


def test_recomputed_activations_leave_the_same_residuals(pool: Pool) -> None:
    plain = pool.run(recompute, None, world_size=2)
    assert all(len(stores) == 1 for _, stores in plain)
    assert pool.run(recompute, False, world_size=2) == plain
    assert pool.run(recompute, True, world_size=2) == plain


def uneven(rank: int, world_size: int) -> list[float]:
    """Batches of eight, five and eight rows, told apart by slot."""
    made, schedule, _ = build(rank, world_size, Case("1F1B", 2))
    pipeline = tw.Pipeline(schedule, made, tw.Plan(*SLOT), deadline=20)
    losses = []
    for number, rows in enumerate((8, 5, 8)):
        _, x, y = batch(number, rows)
        inputs = (x,) if rank == 0 else ()
        losses.append(pipeline.step(*inputs, target=y).loss)
    digests = pipeline.state_digests()
    pipeline.close()
    assert len(digests) == 2
    return losses


def test_batches_of_several_sizes_go_by_slot(pool: Pool) -> None:
    one, other = pool.run(uneven, world_size=2)
    assert one == other
    assert len(one) == 3


@pytest.mark.parametrize(
    "backward",
    [
        *("ef(int4)", "efmixed(topk:0.3)", "ef(topk:0.3,key=slot)", "ef21(int4)"),
        *("delta(int4)", "int4", "predicted(int4,by=position)"),
    ],
)
def test_a_loss_scale_may_change_from_step_to_step(backward: str, pool: Pool) -> None:
    same = pool.run(train, ("raw", backward), scale=1.0, world_size=2)
    other = pool.run(train, ("raw", backward), scale=(1024.0, 1.0, 2.0**-4), world_size=2)
    assert [one.losses for one in other] == [one.losses for one in same]
    assert [one.parameters for one in other] == [one.parameters for one in same]


@pytest.mark.parametrize("backward", ["int8", "int4", "topk:0.2/int8", "ef(topk:0.1)", "tile"])
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(backward: str, pool: Pool) -> None:
    plain = pool.run(train, ("raw", backward), world_size=2)
    assert pool.run(train, ("raw", backward), scale=2.0**12, world_size=2) == plain


def passed_back(rank: int, world_size: int) -> Any:
    """The gradient that leaves the second stage, and that which enters the first."""
    made, schedule, _ = build(rank, world_size, Case("1F1B", 2, microbatches=2))
    pipeline = tw.Pipeline(schedule, made, tw.Plan("int2", "raw"), deadline=20)
    seen: list[Tensor] = []
    keys, x, y = batch(0)
    if rank == 0:
        made[0].submod.block.register_full_backward_pre_hook(lambda _, g: seen.append(g[0].clone()))
    else:
        made[0].submod.block.register_full_backward_hook(lambda _, i, __: seen.append(i[0].clone()))
    pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=keys)
    pipeline.close()
    return seen


def test_the_gradient_passes_a_forward_codec_as_it_is(pool: Pool) -> None:
    into, out_of = pool.run(passed_back, world_size=2)
    assert len(into) == len(out_of) == 2
    assert all(one.equal(other) for one, other in zip(into, out_of, strict=True))
    assert float(into[0].abs().max()) > 0
