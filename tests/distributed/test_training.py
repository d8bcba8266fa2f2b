"""What a pipelined run computes: the same as one process, whatever crosses its edges."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.distributed.pool import Pool
from tests.distributed.setup import (
    DIM,
    LENGTH,
    Case,
    Stage,
    batch,
    build,
    merged,
    parameter_hash,
    run,
)


def one_process(case: Case) -> tuple[list[float], list[nn.Module]]:
    """The same run in plain torch: losses and stages."""
    modules: list[nn.Module] = [Stage(i, case.num_stages) for i in range(case.num_stages)]
    parameters = [p for m in modules for p in m.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=case.lr, momentum=0.9)
    losses = []
    for step in range(case.steps):
        _, x, y = batch(step)
        for module in modules:
            x = module(x)
        loss = nn.functional.cross_entropy(x.flatten(0, 1), y.flatten())
        loss.backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(parameters, case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, modules


@pytest.mark.parametrize("clip", [None, 0.5])
def test_four_stages_equal_one_process_with_global_clipping(pool: Pool, clip: float | None) -> None:
    case = Case("1F1B", 4, clip=clip, steps=8)
    expected, _ = one_process(case)
    found = pool.run(run, case, world_size=4)
    assert found[0].losses == pytest.approx(expected, abs=2e-5)


def padded_run(rank: int, world_size: int, microbatches: int, forward: str) -> list[Any]:
    """Losses and gradient norms on rows of unequal length."""
    case = Case(microbatches=microbatches, forward=forward)
    stages, schedule, _ = build(rank, world_size, case)
    pipeline = tw.Pipeline(schedule, stages, tw.Plan(forward, "raw"), deadline=20)
    found = []
    for step in range(3):
        ids, x, y = batch(step)
        lengths = ids % LENGTH + 1
        padding = torch.arange(LENGTH) >= lengths[:, None]
        y = y.masked_fill(padding, -100)
        x = x.masked_fill(padding, step)  # whatever lies in the padding
        result = pipeline.step(
            *((x,) if rank == 0 else ()), target=y, sample_ids=ids, lengths=lengths
        )
        found.append((result.loss, result.grad_norm, result.tokens, int(lengths.sum())))
        for p in (p for s in stages for p in s.submod.parameters()):
            p.grad = None
    return found


def test_the_loss_is_weighted_by_tokens_whatever_the_microbatches(pool: Pool) -> None:
    found = [pool.run(padded_run, n, "raw", world_size=2)[0] for n in (2, 4, 8)]
    for other in found[1:]:
        for (loss, norm, tokens, valid), expected in zip(other, found[0], strict=True):
            assert loss == pytest.approx(expected[0], abs=1e-5)
            assert norm == pytest.approx(expected[1], rel=1e-4)
            assert tokens == expected[2] == valid


def test_what_lies_in_the_padding_changes_nothing(pool: Pool) -> None:
    # padded_run fills it with another token in each step: the 8-bit scales must not see it
    coded = pool.run(padded_run, 4, "int8", world_size=2)[0]
    exact = pool.run(padded_run, 4, "raw", world_size=2)[0]
    for (a, *_), (b, *_) in zip(coded, exact, strict=True):
        assert a == pytest.approx(b, abs=2e-3)


def repeated(rank: int, world_size: int) -> list[Any]:
    """A sample twice in one step and in consecutive steps."""
    stages, schedule, _ = build(rank, world_size, Case())
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("delta(int4)", "int8"), deadline=20)
    ids, x, y = batch(0)
    twice = torch.tensor([0, 1, 2, 0, 0, 3, 4, 1])
    for _ in range(3):
        pipeline.step(*((x[twice],) if rank == 0 else ()), target=y[twice], sample_ids=ids[twice])
    digests = pipeline.state_digests()
    kinds = pipeline.link_reports()[0]["kinds"]
    values = {k: v["values"] // (LENGTH * DIM) for k, v in kinds.items()}
    return [digests[f"edge 0 forward 0 {'sender' if rank == 0 else 'receiver'}"], values]


def test_a_sample_twice_in_a_step_is_sent_as_a_value_the_second_time(pool: Pool) -> None:
    first, second = pool.run(repeated, world_size=2)
    assert first == second
    # five samples, three repeats a step; parameters do not move, so changes stay small
    assert first[1] == {"first": 5, "change": 10, "value": 9}


class Dropping(nn.Module):
    """A stage with dropout, whose masks come from the global generator."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stage(x)
        self.seen = torch.get_rng_state()
        return nn.functional.dropout(y, 0.1, self.training)


def with_dropout(rank: int, world_size: int, forward: str) -> Any:
    case = Case()
    module = Dropping(Stage(rank, 2))
    stages, schedule, _ = build(rank, world_size, case, {rank: module})
    pipeline = tw.Pipeline(schedule, stages, tw.Plan(forward, "int4:round=stochastic"), deadline=20)
    torch.manual_seed(7 + rank)
    for step in range(3):
        ids, x, y = batch(step)
        pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
    return module.seen.tolist()


def test_dropout_masks_are_the_same_with_compression_on_and_off(pool: Pool) -> None:
    plain = pool.run(with_dropout, "raw", world_size=2)
    coded = pool.run(with_dropout, "delta(int4:round=stochastic)", world_size=2)
    assert plain == coded


class Watching(nn.Module):
    """A stage that keeps what it was given, and the gradient that it got for its output."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.grads: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x.detach().clone())
        y: Tensor = self.stage(x)
        self.outputs.append(y.detach().clone())
        if y.requires_grad:
            y.register_hook(lambda g: self.grads.append(g.detach().clone()))
        return y


def watch(rank: int, world_size: int, forward: str, backward: str) -> Any:
    module = Watching(Stage(rank, 2))
    stages, schedule, _ = build(rank, world_size, Case(), {rank: module})
    pipeline = tw.Pipeline(schedule, stages, tw.Plan(forward, backward), deadline=20)
    ids, x, y = batch(0)
    for _ in range(2):
        pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
        end = stages[0].next or stages[0].previous
        link = end.outgoing if rank == 0 else end.incoming
    store = link.states[0].store if "delta" in forward else None
    held = store.read(ids.tolist()).view(8, LENGTH, DIM) if store else None
    grads = {n: p.grad for n, p in module.named_parameters()}
    return module.inputs, module.outputs, module.grads, held, grads


def test_the_receiver_computes_on_the_updated_reference(pool: Pool) -> None:
    (_, _, _, sent, _), (inputs, _, _, held, _) = pool.run(
        watch, "delta(int4,ref=fp32)", "int8", world_size=2
    )
    assert torch.equal(sent, held)
    assert torch.equal(torch.cat(inputs[4:]), held)  # the second step's four micro-batches


def test_the_sender_backpropagates_through_its_exact_activation(pool: Pool) -> None:
    # the gradient that stage 0 receives, applied to its exact forward, gives its parameter gradient
    (_, _, grads, _, found), _ = pool.run(watch, "delta(int2)", "int8", world_size=2)
    _, x, _ = batch(0)
    module = Stage(0, 2)
    for step in range(2):
        for k in range(4):
            rows = slice(2 * k, 2 * k + 2)
            module(x[rows]).backward(grads[4 * step + k])
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, found[f"stage.{name}"])


def test_a_transfer_without_loss_leaves_all_gradients_bit_identical(pool: Pool) -> None:
    raw = pool.run(run, Case(steps=4), world_size=2)
    # the first visit in raw and a change in raw: m + (x - m) is not always x, so first visits only
    case = Case(steps=3, forward="delta(raw,first=raw)", backward="raw")
    assert merged(pool.run(run, case, world_size=2)) == merged(
        pool.run(run, dataclasses.replace(case, forward="raw"), world_size=2)
    )
    assert all(math.isfinite(x) for x in raw[0].losses)


def frozen_run(rank: int, world_size: int, frozen: int, num_stages: int) -> Any:
    modules: dict[int, nn.Module] = {frozen: Stage(frozen, num_stages, frozen=True)}
    case = Case("Interleaved1F1B", num_stages)
    stages, schedule, _ = build(rank, world_size, case, modules)
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("delta(int4)", "int8"), deadline=20)
    before = parameter_hash(stages[0].submod)
    parameters = [p for s in stages for p in s.submod.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05) if parameters else None
    losses = []
    for step in range(4):
        ids, x, y = batch(0)
        result = pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
        losses.append(result.loss)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        assert step >= 0
    return losses, parameter_hash(stages[0].submod) == before


@pytest.mark.parametrize("frozen", [0, 1, 3])
def test_a_stage_without_trainable_parameters_trains_the_others(pool: Pool, frozen: int) -> None:
    found = pool.run(frozen_run, frozen, 4, world_size=4)
    assert found[0][0][-1] < found[0][0][0]
    assert [unchanged for _, unchanged in found] == [r == frozen for r in range(4)]


def twice_used(rank: int, world_size: int, schedule_name: str) -> Any:
    """A weight used twice in a stage, under a split backward."""

    class Twice(nn.Module):
        def __init__(self, stage: Stage) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.stage.block(self.stage.block(self.stage.embed(x)))
            z: Tensor = self.stage.head(y)
            return z

    indices = tw.stages_of_rank(schedule_name, rank, world_size, 4)
    modules: dict[int, nn.Module] = {i: Twice(Stage(i, 4)) for i in indices}
    stages, schedule, _ = build(rank, world_size, Case(schedule_name, 4), modules)
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("raw", "raw"), deadline=20)
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    ids, x, y = batch(0)
    pipeline.step(
        *((x,) if first else ()), target=y if last else None, sample_ids=ids if first else None
    )
    return {f"{s.stage_index}.{n}": p.grad for s in stages for n, p in s.submod.named_parameters()}


def test_a_weight_used_twice_gets_its_whole_gradient_under_zero_bubble(pool: Pool) -> None:
    found = [
        {k: v for part in pool.run(twice_used, name, world_size=2) for k, v in part.items()}
        for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBV")
    ]
    for other in found[1:]:
        for name, grad in found[0].items():
            assert torch.allclose(other[name], grad, atol=1e-7), name


def many_pipelines(rank: int, world_size: int) -> Any:
    """Open files after some pipelines were made, used and closed, and after twice as many."""
    found = []
    for turn in range(8):
        stages, schedule, _ = build(rank, world_size, Case())
        pipeline = tw.Pipeline(schedule, stages, tw.Plan("delta(int4)", "int8"), deadline=20)
        ids, x, y = batch(0)
        pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
        pipeline.close()
        pipeline.close()
        if turn in (3, 7):
            found.append(len(list(pathlib.Path("/proc/self/fd").iterdir())))
    return found


def test_a_closed_pipeline_leaves_no_connection_behind(pool: Pool) -> None:
    for after_four, after_eight in pool.run(many_pipelines, world_size=2):
        assert after_eight <= after_four
