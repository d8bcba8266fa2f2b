"""Frozen stages: for samples that were seen before, nothing is computed and nothing is sent."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.distributed.pool import Pool, WorkerError
from tests.distributed.setup import (
    BATCH,
    DIM,
    LENGTH,
    SAMPLES,
    VOCAB,
    Case,
    Stage,
    build,
    parameter_hash,
    transport_of,
)

pytestmark = pytest.mark.timeout(100)

#: First visits arrive exactly, and are remembered so: later ones change nothing.
EXACT = "delta(int4,first=raw,ref=fp32)"
EPOCH = SAMPLES // BATCH


class Counted(nn.Module):
    """A stage that counts its forwards in training and in evaluation."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage, self.calls, self.evaluations = stage, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        else:
            self.evaluations += 1
        y: Tensor = self.stage(x)
        return y


@dataclasses.dataclass
class Found:
    """What a rank saw of a run."""

    losses: list[float]
    parameters: dict[int, str]
    calls: dict[int, list[int]]  # of each stage, after each step
    sent: list[dict[str, tuple[int, int, int]]]  # messages, bytes and rested, after each step
    digests: dict[str, int]


def samples(ids: Iterable[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, tokens, targets): each sample's tokens follow from its id."""
    numbers = torch.tensor(list(ids))
    rows = [
        torch.randint(VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(int(i)))
        for i in numbers
    ]
    tokens = torch.stack(rows)
    return numbers, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def epochs(number: int) -> list[list[int]]:
    """The samples of each step, in the order that each epoch shuffles."""
    found = []
    for epoch in range(number):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        found += [order[k * BATCH : (k + 1) * BATCH] for k in range(EPOCH)]
    return found


class Trainer:
    """A rank's part of a run with frozen stages."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        case: Case,
        wrap: Any = None,
        **kwargs: Any,
    ) -> None:
        self.modules: dict[int, Counted] = {}
        for index in tw.stages_of_rank(case.schedule, rank, world_size, case.num_stages):
            stage: nn.Module = Stage(index, case.num_stages, index < case.frozen)
            if wrap is not None and index < case.frozen:
                stage = wrap(stage)
            self.modules[index] = Counted(stage)
        self.stages, schedule, _ = build(rank, world_size, case, dict(self.modules))
        plan = tw.Plan(case.forward, case.backward)
        kwargs = {"transport": transport_of(case), "deadline": 20, **kwargs}
        self.pipeline = tw.Pipeline(schedule, self.stages, plan, **kwargs)
        self.first = any(s.is_first for s in self.stages)
        self.last = any(s.is_last for s in self.stages)
        parameters = [p for s in self.stages for p in s.submod.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(parameters, lr=case.lr) if parameters else None
        self.losses: list[float] = []
        self.calls: dict[int, list[int]] = {index: [] for index in self.modules}
        self.sent: list[dict[str, tuple[int, int, int]]] = []

    def step(
        self,
        ids: Iterable[int],
        lengths: Tensor | None = None,
        changed: Tensor | None = None,
        next_ids: Iterable[int] | None = None,
    ) -> None:
        """One step; ``changed``: other inputs than those that belong to the ids."""
        numbers, x, y = samples(ids)
        x = x if changed is None else changed
        if lengths is not None:
            padding = torch.arange(LENGTH) >= lengths[:, None]
            x, y = x.masked_fill(padding, 0), y.masked_fill(padding, -100)
            longest = int(lengths.max())
            x, y = x[:, :longest].contiguous(), y[:, :longest].contiguous()
        given: dict[str, Any] = {"sample_ids": numbers, "lengths": lengths} if self.first else {}
        if next_ids is not None and self.first:
            given["next_sample_ids"] = torch.tensor(list(next_ids))
        inputs = (x,) if self.first else ()
        result = self.pipeline.step(*inputs, target=y if self.last else None, **given)
        self.losses.append(result.loss)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        for index, module in self.modules.items():
            self.calls[index].append(module.calls)
        self.sent.append(
            {
                f"{c.edge} {c.direction}": (c.training.messages, c.training.bytes, c.rested)
                for c in self.pipeline.link_counters()
                if c.edge >= 0
            }
        )

    def found(self) -> Found:
        hashes = {index: parameter_hash(module) for index, module in self.modules.items()}
        digests = self.pipeline.state_digests()
        self.pipeline.close()
        return Found(self.losses, hashes, self.calls, self.sent, digests)


def train(rank: int, world_size: int, case: Case, **kwargs: Any) -> Found:
    trainer = Trainer(rank, world_size, case, **kwargs)
    for ids in epochs(3):
        trainer.step(ids)
    return trainer.found()


def both(pool: Pool, case: Case, ranks: int) -> tuple[list[Found], list[Found]]:
    """The same run with and without skipping."""
    on = pool.run(train, case, world_size=ranks)
    return on, pool.run(train, case, world_size=ranks, skip_frozen=False)


def alike(one: list[Found], other: list[Found]) -> bool:
    """Whether two runs have the same losses and the same parameters, to the bit."""
    return [(f.losses, f.parameters) for f in one] == [(f.losses, f.parameters) for f in other]


CASES = [
    ("GPipe", 2, 2, 1),
    ("1F1B", 2, 2, 1),
    ("Interleaved1F1B", 2, 2, 1),
    ("Interleaved1F1B", 4, 2, 2),
    ("LoopedBFS", 4, 2, 3),
    ("InterleavedZeroBubble", 4, 2, 1),
    ("InterleavedZeroBubble", 4, 2, 3),
    ("ZBV", 4, 2, 1),
    ("ZBV", 4, 2, 2),
    ("ZBV", 4, 2, 3),
    ("1F1B", 4, 4, 2),
    ("GPipe", 4, 4, 3),
    ("ZBV", 8, 4, 4),
]


@pytest.mark.parametrize(("schedule", "num_stages", "ranks", "frozen"), CASES)
def test_skipping_changes_no_bit_where_references_are_exact(
    pool: Pool, schedule: str, num_stages: int, ranks: int, frozen: int
) -> None:
    case = Case(schedule, num_stages, forward=EXACT, backward="int8", frozen=frozen)
    on, off = both(pool, case, ranks)
    assert alike(on, off)
    assert on[0].losses[-1] < on[0].losses[0]
    assert sum(c[-1] for f in on for c in f.calls.values()) < sum(
        c[-1] for f in off for c in f.calls.values()
    )


@pytest.mark.parametrize(
    ("schedule", "frozen"), [("Interleaved1F1B", 1), ("Interleaved1F1B", 3), ("LoopedBFS", 2)]
)
def test_both_ends_in_one_process_skip_as_two_processes_do(
    pool: Pool, schedule: str, frozen: int
) -> None:
    gloo = Case(schedule, 4, forward=EXACT, backward="int8", frozen=frozen)
    two = pool.run(train, gloo, world_size=4 if schedule == "GPipe" else 2)
    (one,) = pool.run(train, dataclasses.replace(gloo, transport="memory"), world_size=1)
    assert one.losses == two[0].losses
    assert one.parameters == {k: v for f in two for k, v in f.parameters.items()}
    assert one.sent[-1] == {k: v for f in two for k, v in f.sent[-1].items()}


@pytest.mark.parametrize("frozen", [1, 2])
def test_from_the_second_epoch_on_frozen_stages_compute_and_send_nothing(
    pool: Pool, frozen: int
) -> None:
    case = Case("1F1B", 4, forward="delta(int4)", backward="int8", frozen=frozen)
    found = pool.run(train, case, world_size=4)
    parts = case.microbatches
    for index, rank in enumerate(found):
        once = index < frozen
        assert rank.calls[index] == [parts * min(k, EPOCH if once else 99) for k in range(1, 10)]
        for edge in {index} & set(range(3)):
            messages, size, rested = rank.sent[-1][f"{edge} forward"]
            assert messages == parts * EPOCH * (1 if once else 3)
            assert size == rank.sent[EPOCH - 1 if once else -1][f"{edge} forward"][1]
            assert rested == (2 * parts * EPOCH if once else 0)
        if index:
            messages, size, _ = rank.sent[-1][f"{index - 1} backward"]
            assert (messages, size > 0) == ((0, False) if index <= frozen else (36, True))
    digests = {k: v for f in found for k, v in f.digests.items()}
    for edge in range(3):
        assert (
            digests[f"edge {edge} forward 0 sender"] == digests[f"edge {edge} forward 0 receiver"]
        )


def test_a_v_of_frozen_stages_skips_the_arm_that_hands_over_in_its_process(pool: Pool) -> None:
    # stages 1 and 2 share a rank: nothing is remembered between them, and stage 2 rests
    case = Case("ZBV", 4, forward=EXACT, backward="int8", frozen=3)
    zero, one = pool.run(train, case, world_size=2)
    assert [zero.calls[0][-1], one.calls[1][-1], one.calls[2][-1]] == [12, 12, 12]
    # with two frozen, what stage 1 hands over is needed: it computes on what it remembers
    zero, one = pool.run(train, dataclasses.replace(case, frozen=2), world_size=2)
    assert [zero.calls[0][-1], one.calls[1][-1]] == [12, 36]


def test_with_default_references_a_later_visit_computes_on_what_is_remembered(pool: Pool) -> None:
    case = Case("Interleaved1F1B", 2, forward="delta(int4)", backward="int8", frozen=1)
    on, off = both(pool, case, 2)
    assert on[0].losses[:EPOCH] == off[0].losses[:EPOCH]
    assert on[0].losses != off[0].losses
    assert on[0].losses == pytest.approx(off[0].losses, abs=1e-2)


def test_without_skip_frozen_everything_runs_and_is_sent(pool: Pool) -> None:
    case = Case("Interleaved1F1B", 2, forward=EXACT, backward="int8", frozen=1)
    first, _ = pool.run(train, case, world_size=2, skip_frozen=False)
    assert first.calls[0][-1] == 36
    assert first.sent[-1]["0 forward"][0] == 36
    assert first.sent[-1]["0 forward"][2] == 0


@pytest.mark.parametrize("forward", ["raw", "int8"])
def test_a_scheme_that_remembers_nothing_sends_at_each_visit(pool: Pool, forward: str) -> None:
    case = Case("Interleaved1F1B", 2, forward=forward, backward="int8", frozen=1)
    first, _ = pool.run(train, case, world_size=2)
    assert (first.calls[0][-1], first.sent[-1]["0 forward"][0]) == (36, 36)


def disagreeing(rank: int, world_size: int, case: Case) -> None:
    Trainer(rank, world_size, case, skip_frozen=rank == 0)


def test_ranks_that_disagree_on_skipping_are_refused(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="rank 1 has skip_frozen False, rank 0 True"):
        pool.run(disagreeing, Case(frozen=1), world_size=2)


def test_weights_behind_frozen_stages_get_their_gradients_under_all_schedules(pool: Pool) -> None:
    # torch's split backward loses them where a stage's inputs need no gradient
    found = []
    for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBV"):
        case = Case(name, 4, forward="raw", backward="raw", frozen=1)
        found.append(pool.run(train, case, world_size=2)[0].losses)
    assert found[1] == pytest.approx(found[0], abs=1e-5)
    assert found[2] == pytest.approx(found[0], abs=1e-5)


# What is not constant.


class Functional(nn.Module):
    """A stage that drops without a module that says so."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.stage(x), 0.1, self.training)


class Normed(nn.Module):
    """A stage with a batch norm, in training mode or not."""

    def __init__(self, stage: nn.Module, evaluating: bool = False) -> None:
        super().__init__()
        self.stage, self.norm = stage, nn.BatchNorm1d(LENGTH).requires_grad_(False)
        if evaluating:
            self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.stage(x))
        return y


class Counting(nn.Module):
    """A stage that changes a buffer of its own."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stage(x) + 0.01 * self.count
        if self.training:
            self.count += 1
        return y


def dropping(stage: nn.Module) -> nn.Module:
    return nn.Sequential(stage, nn.Dropout(0.1))


def without_dropping(stage: nn.Module) -> nn.Module:
    return nn.Sequential(stage, nn.Dropout(0.0), nn.Dropout(0.5).eval())


def normed_in_evaluation(stage: nn.Module) -> nn.Module:
    return Normed(stage, evaluating=True)


@pytest.mark.parametrize("wrap", [dropping, Functional, Normed, Counting])
def test_a_stage_that_does_not_compute_the_same_again_runs_at_each_visit(
    pool: Pool, wrap: Any
) -> None:
    case = Case("Interleaved1F1B", 2, forward="delta(int4)", backward="int8", frozen=1)
    found = pool.run(train, case, world_size=2, wrap=wrap)
    assert found[0].calls[0][-1] == 36
    assert found[0].sent[-1]["0 forward"][2] == 0


@pytest.mark.parametrize("wrap", [without_dropping, normed_in_evaluation])
def test_a_module_that_is_switched_off_does_not_keep_its_stage_from_resting(
    pool: Pool, wrap: Any
) -> None:
    case = Case("Interleaved1F1B", 2, forward="delta(int4)", backward="int8", frozen=1)
    found = pool.run(train, case, world_size=2, wrap=wrap)
    assert found[0].calls[0][-1] == 12


class Second(nn.Module):
    """Functional dropout in the second of several stages alone."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage, self.drops = stage, isinstance(stage.embed, nn.Identity)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.stage(x), 0.1 if self.drops else 0.0, self.training)


def test_a_stage_that_draws_does_not_keep_those_before_it_from_resting(pool: Pool) -> None:
    case = Case("1F1B", 4, forward="delta(int4)", backward="int8", frozen=2)
    found = pool.run(train, case, world_size=4, wrap=Second)
    assert [found[k].calls[k][-1] for k in range(3)] == [12, 36, 36]


# Which samples rest.


def mixed(rank: int, world_size: int, num_stages: int, frozen: int) -> Any:
    case = Case("Interleaved1F1B", num_stages, forward=EXACT, backward="int8", frozen=frozen)
    trainer = Trainer(rank, world_size, case)
    trainer.step(range(8))
    trainer.step([0, 1, 2, 8, 4, 5, 6, 7])  # 8 is new
    trainer.step([0, 0, 1, 2, 4, 5, 8, 7])  # 0 comes twice
    _, x, _ = samples(range(8))
    x[5] = x[0]
    trainer.step(range(8), changed=x)  # 3 comes again after a step; 5 has another input
    trainer.step(range(8), changed=x)
    return trainer.found().calls


def test_only_micro_batches_with_something_new_run(pool: Pool) -> None:
    found = pool.run(mixed, 2, 1, world_size=2)
    assert found[0][0] == [4, 5, 6, 7, 7]


def test_a_changed_input_runs_through_all_frozen_stages(pool: Pool) -> None:
    found = pool.run(mixed, 4, 3, world_size=4)
    assert [found[k][k] for k in range(3)] == [[4, 5, 6, 7, 7]] * 3
    assert found[3][3] == [4, 8, 12, 16, 20]


def padded(rank: int, world_size: int, skip: bool) -> Any:
    case = Case("Interleaved1F1B", 4, forward=EXACT, backward="int8", frozen=2)
    trainer = Trainer(rank, world_size, case, skip_frozen=skip)
    for ids in epochs(3):
        trainer.step(ids, lengths=torch.tensor(ids) % (LENGTH - 3) + 1)
    return trainer.found()


def test_rows_of_any_length_rest_too(pool: Pool) -> None:
    on = pool.run(padded, True, world_size=4)
    off = pool.run(padded, False, world_size=4)
    assert on[0].losses == pytest.approx(off[0].losses, abs=1e-5)
    assert [on[k].calls[k][-1] for k in range(4)] == [12, 12, 36, 36]


def bounded(rank: int, world_size: int) -> Any:
    """A store that holds half of the samples."""
    case = Case("Interleaved1F1B", 2, forward=EXACT, backward="int8", frozen=1, microbatches=8)
    storage = tw.Storage(ram=4 * LENGTH * DIM * SAMPLES // 2)
    trainer = Trainer(rank, world_size, case, references=storage)
    for ids in epochs(2):
        trainer.step(ids)
    return trainer.found()


def test_samples_that_are_not_remembered_are_sent_again(pool: Pool) -> None:
    first, second = pool.run(bounded, world_size=2)
    assert first.calls[0][EPOCH - 1 :] == [24, *first.calls[0][EPOCH:]]
    assert first.calls[0][-1] == 36
    assert first.sent[-1]["0 forward"][2] == 12
    assert first.losses == second.losses


def on_disk(rank: int, world_size: int, folder: str | None) -> Any:
    case = Case("Interleaved1F1B", 2, forward=EXACT, backward="int8", frozen=1)
    storage = None
    if folder is not None:
        storage = tw.Storage(ram=4 * LENGTH * DIM * 3 * BATCH, folder=Path(folder, str(rank)))
    trainer = Trainer(rank, world_size, case, references=storage)
    steps = epochs(3)
    for ids, next_ids in zip(steps, [*steps[1:], None], strict=True):
        trainer.step(ids, next_ids=next_ids)
    return trainer.found()


def test_what_rests_may_be_remembered_on_disk(pool: Pool, tmp_path: Path) -> None:
    disk = pool.run(on_disk, str(tmp_path), world_size=2)
    assert alike(disk, pool.run(on_disk, None, world_size=2))
    assert disk[0].calls[0][-1] == 12


def evaluated(rank: int, world_size: int) -> Any:
    case = Case("Interleaved1F1B", 4, forward="delta(int4)", backward="int8", frozen=2)
    trainer = Trainer(rank, world_size, case)
    _, x, y = samples(range(8))
    found = []
    for ids in [range(8), range(8), range(8)]:
        trainer.step(ids)
        for codec in (False, True):
            inputs = (x,) if trainer.first else ()
            target = y if trainer.last else None
            found.append(trainer.pipeline.eval(*inputs, target=target, codec=codec).loss)
    module = next(iter(trainer.modules.values()))
    return found, module.calls, module.evaluations


def test_evaluation_runs_all_stages(pool: Pool) -> None:
    found = pool.run(evaluated, world_size=4)
    assert [calls for _, calls, _ in found] == [4, 4, 12, 12]
    assert [evaluations for _, _, evaluations in found] == [24] * 4
    losses = found[0][0]
    assert losses[4] < losses[0]
    assert losses[0] == pytest.approx(losses[1], abs=1e-2)
    assert losses[0] != losses[1]


# What must not be changed.


def change(module: nn.Module, how: str) -> None:
    weight = next(module.parameters())
    if how == "load":
        module.load_state_dict(module.state_dict())
    elif how == "write":
        with torch.no_grad():
            weight.add_(1)
    elif how == "replace":
        weight.data = weight.data.clone()
    elif how == "unfreeze":
        module.requires_grad_(True)


def changed(rank: int, world_size: int, how: str, early: bool) -> Any:
    case = Case("1F1B", 4, forward="delta(int4)", backward="int8", frozen=2)
    trainer = Trainer(rank, world_size, case)
    if rank == 1 and early:
        change(trainer.modules[1], how)
    trainer.step(range(8))
    if rank == 1 and not early:
        change(trainer.modules[1], how)
    trainer.step(range(8))
    return trainer.found().calls


@pytest.mark.parametrize("how", ["load", "write", "replace", "unfreeze"])
def test_a_frozen_stage_that_is_changed_is_refused(pool: Pool, how: str) -> None:
    found = pool.run(changed, how, False, world_size=4, raises=False)
    assert found[1].type_name == "ValueError"
    for error in found:
        assert "stage 1 was frozen, and what it computed is remembered" in error.message
        assert "make a new pipeline" in error.message
    assert {error.type_name for error in found} == {"ValueError", "PeerAborted"}


def test_weights_may_be_loaded_before_the_first_step(pool: Pool) -> None:
    found = pool.run(changed, "load", True, world_size=4)
    assert [found[k][k] for k in range(4)] == [[4, 4], [4, 4], [4, 8], [4, 8]]


def test_a_stage_that_is_unfrozen_before_the_first_step_is_refused(pool: Pool) -> None:
    found = pool.run(changed, "unfreeze", True, world_size=4, raises=False)
    for error in found:
        assert error.type_name == "ValueError"
        assert "now it has parameters to train: make a new pipeline" in error.message


# While others are at work.


class Late(nn.Module):
    """A last stage that takes its time from the second step on, or fails there."""

    def __init__(self, stage: nn.Module, fails: bool) -> None:
        super().__init__()
        self.stage, self.fails, self.calls = stage, fails, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 4:
            time.sleep(0.4)
            if self.fails:
                raise ValueError("this stage has had enough")
        y: Tensor = self.stage(x)
        return y


def behind(rank: int, world_size: int, fails: bool) -> Any:
    case = Case("1F1B", 2, forward=EXACT, backward="int8", frozen=1)
    trainer = Trainer(rank, world_size, case, deadline=1)
    if rank == 1:
        trainer.modules[1].stage = Late(trainer.modules[1].stage, fails)
    for _ in range(2):
        trainer.step(range(8))
    return trainer.found().losses


def test_a_stage_at_rest_waits_for_the_whole_step_of_the_others(pool: Pool) -> None:
    # 1.6 s without a message, with a deadline of 1 s a message
    first, second = pool.run(behind, False, world_size=2)
    assert first == second


def test_a_stage_at_rest_hears_of_a_failure(pool: Pool) -> None:
    found = pool.run(behind, True, world_size=2, raises=False)
    assert found[0].type_name == "PeerAborted"
    assert "this stage has had enough" in found[0].message
    assert found[0].seconds < 20
