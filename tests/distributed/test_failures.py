"""What users see when something goes wrong: the reason, on every rank, soon, with nothing lost."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.distributed.pool import Pool
from tests.distributed.setup import LENGTH, Case, Stage, batch, build
from tests.distributed.worker import RankError
from thinwire.pipeline.agreement import check_deadline, check_numbers

DELTA = Case(num_stages=4, forward="delta(int4)", backward="int8")


class Poisoned(nn.Module):
    """A stage whose output turns bad in one of its forward calls."""

    def __init__(self, stage: Stage, call: int, value: float) -> None:
        super().__init__()
        self.stage, self.call, self.value, self.calls = stage, call, value, 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stage(x)
        self.calls += 1
        if self.calls - 1 == self.call:
            bad = torch.zeros_like(y)
            bad[0, 1, 2] = self.value
            y = y + bad
        return y


def train_with(
    rank: int, world_size: int, case: Case, poisoned: int, call: int, value: float
) -> dict[str, Any]:
    """Steps until an error; what it said, how long it took, and the references before and after."""
    modules: dict[int, nn.Module] = {
        poisoned: Poisoned(Stage(poisoned, case.num_stages), call, value)
    }
    stages, schedule, _ = build(rank, world_size, case, modules)
    plan = tw.Plan(case.forward, case.backward)
    pipeline = tw.Pipeline(schedule, stages, plan, deadline=30)
    before: dict[str, int] = {}
    digests = []
    for step in range(3):
        ids, x, y = batch(step)
        start = time.monotonic()
        before = pipeline.state_digests()
        parameters = [p.detach().clone() for s in stages for p in s.submod.parameters()]
        try:
            pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
        except (tw.NonFiniteError, tw.LinkError) as error:
            after = [p.detach() for s in stages for p in s.submod.parameters()]
            return {
                "type": type(error).__name__,
                "text": str(error),
                "kind": getattr(error, "kind", None),
                "seconds": time.monotonic() - start,
                "step": step,
                "before": before,
                "after": pipeline.state_digests(),
                "moved": not all(map(torch.equal, parameters, after)),
                "again": _again(pipeline, x, y, ids),
            }
        digests.append(before)
    return {"type": None}


def _again(pipeline: tw.Pipeline, x: Tensor, y: Tensor, ids: Tensor) -> str:
    try:
        pipeline.step(x, target=y, sample_ids=ids)
    except tw.LinkError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("forward", ["delta(int4)", "int8", "bf16", "raw"])
def test_a_bad_activation_stops_all_ranks_naming_stage_microbatch_and_tensor(
    pool: Pool, value: float, forward: str
) -> None:
    case = dataclasses.replace(DELTA, forward=forward)
    # micro-batch 2 of the second step, at stage 1 of 4
    found = pool.run(train_with, case, 1, 4 + 2, value, world_size=4)
    for outcome in found:
        assert outcome["step"] == 1
        assert "stage 1 (rank 1): activation of micro-batch 2, boundary tensor 0" in outcome["text"]
        assert outcome["seconds"] < 10
        assert not outcome["moved"]
    assert found[1]["type"] == "NonFiniteError"
    assert {found[r]["type"] for r in (0, 2, 3)} == {"PeerAborted"}
    assert {found[r]["kind"] for r in (0, 2, 3)} == {"NonFiniteError"}
    assert all("given up" in o["again"] for o in found)


def test_no_reference_is_updated_with_a_bad_activation(pool: Pool) -> None:
    # the first micro-batch of step 1: no later one of that link has been sent
    found = pool.run(train_with, DELTA, 1, 4, math.nan, world_size=4)
    name = "edge 1 forward 0"
    assert found[1]["after"][f"{name} sender"] == found[1]["before"][f"{name} sender"]
    assert found[2]["after"][f"{name} receiver"] == found[2]["before"][f"{name} receiver"]


class BadGradient(torch.autograd.Function):
    """The identity, whose gradient is infinite in one place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[0, 0, 0] = math.inf
        return grad


class BadBackward(nn.Module):
    """A stage whose input gradient is infinite once."""

    def __init__(self, stage: Stage, call: int) -> None:
        super().__init__()
        self.stage, self.call, self.calls = stage, call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.stage(BadGradient.apply(x) if self.calls - 1 == self.call else x)
        return y


def train_bad_backward(rank: int, world_size: int, case: Case) -> list[Any]:
    modules: dict[int, nn.Module] = {2: BadBackward(Stage(2, case.num_stages), 4 + 1)}
    stages, schedule, _ = build(rank, world_size, case, modules)
    pipeline = tw.Pipeline(schedule, stages, tw.Plan(case.forward, case.backward), deadline=30)
    for step in range(3):
        ids, x, y = batch(step)
        try:
            pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
        except tw.NonFiniteError as error:
            return [step, str(error)]
    return [None, ""]


def test_an_infinite_gradient_is_flagged_and_named_on_all_ranks(pool: Pool) -> None:
    for step, text in pool.run(train_bad_backward, DELTA, world_size=4):
        assert step == 1
        assert "stage 2 (rank 2): gradient of micro-batch 1, boundary tensor 0" in text


def train_and_lose(rank: int, world_size: int, how: str, deadline: float) -> None:
    """Rank 2 is lost in the third step."""
    case = dataclasses.replace(DELTA, steps=5)
    stages, schedule, _ = build(rank, world_size, case)
    plan = tw.Plan(case.forward, case.backward)
    pipeline = tw.Pipeline(schedule, stages, plan, deadline=deadline, first_deadline=20)
    for step in range(5):
        if step == 2 and rank == 2:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(deadline + 6)
            return
        ids, x, y = batch(step)
        pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)


def test_a_killed_peer_is_named_within_ten_seconds(pool: Pool) -> None:
    found = pool.run(train_and_lose, "kill", 30.0, world_size=4, raises=False)
    for rank in (0, 1, 3):
        error = found[rank]
        assert isinstance(error, RankError)
        assert error.type_name in ("LinkError", "PeerAborted")
        assert error.seconds < 15
        assert "rank 2" in error.message


def test_a_silent_peer_is_named_after_the_deadline(pool: Pool) -> None:
    found = pool.run(train_and_lose, "hang", 3.0, world_size=4, raises=False)
    for rank in (1, 3):
        error = found[rank]
        assert isinstance(error, RankError)
        assert "stage 2 (rank 2)" in error.message
        assert "within 3 s" in error.message


class Broken(nn.Module):
    """A stage that raises in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("a bug in the user's model")


def train_broken(rank: int, world_size: int, index: int) -> None:
    case = dataclasses.replace(DELTA, num_stages=world_size)
    stages, schedule, _ = build(rank, world_size, case, {index: Broken()})
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("int4", "int8"), deadline=30)
    ids, x, y = batch(0)
    pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)


@pytest.mark.parametrize("index", [0, 1, 3])
def test_an_exception_in_a_users_module_reaches_all_ranks_at_once(pool: Pool, index: int) -> None:
    found = pool.run(train_broken, index, world_size=4, raises=False)
    for rank, error in enumerate(found):
        assert isinstance(error, RankError)
        assert error.seconds < 10
        assert error.type_name == ("RuntimeError" if rank == index else "PeerAborted")
        assert "stage" in error.message.lower()


def wrong_inputs(rank: int, world_size: int) -> list[str]:
    """Wrong steps, each followed by a right one."""
    case = Case(forward="delta(int4)", backward="int8")
    stages, schedule, _ = build(rank, world_size, case)
    pipeline = tw.Pipeline(schedule, stages, tw.Plan(case.forward, case.backward), deadline=20)
    ids, x, y = batch(0)
    longer = torch.zeros(8, 13, dtype=torch.int64)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((longer,), {"target": longer, "sample_ids": ids}),
        ((torch.cat([x, x]),), {"target": torch.cat([y, y]), "sample_ids": torch.cat([ids, ids])}),
        ((x[:3],), {"target": y[:3], "sample_ids": ids[:3]}),
        ((x,), {"target": y}),
        ((x,), {"target": y, "sample_ids": ids[:5]}),
        ((x,), {"target": y, "sample_ids": ids, "lengths": torch.full((8,), 99)}),
        ((x, x), {"target": y, "sample_ids": ids}),
        ((x.numpy(),), {"target": y, "sample_ids": ids}),
        ((None,), {"target": y, "sample_ids": ids}),
        ((x,), {"target": y, "sample_ids": ids.tolist()}),
        ((x,), {"target": y, "sample_ids": ids, "lengths": [12] * 8}),
        ((x.float(),), {"target": y, "sample_ids": ids}),
        ((x.to("meta"),), {"target": y, "sample_ids": ids}),
        ((x,), {"target": y, "sample_ids": ids.to("meta")}),
        ((x,), {"target": y, "sample_ids": ids.to_sparse()}),
    ]
    found = []
    for inputs, known in wrong:
        try:
            pipeline.step(
                *(inputs if rank == 0 else ()),
                **known if rank == 0 else {"target": known["target"]},
            )
            found.append("no error")
        except ValueError as error:
            found.append(str(error))
        pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
    return found


def test_wrong_inputs_are_the_same_value_error_on_all_ranks_and_the_next_step_works(
    pool: Pool,
) -> None:
    first, second = pool.run(wrong_inputs, world_size=2)
    assert first == second
    expected = [
        "shape (8, 13)",
        "shape (16, 12)",
        "3 rows cannot fill 4",
        "needs sample_ids",
        "sample_ids must be int64",
        "lengths must be within",
        "takes 1 inputs",
        "a ndarray",
        "a NoneType",
        "not a list",
        "not a list",
        "torch.float32",
        "a meta tensor",
        "a meta tensor",
        "cannot be read",
    ]
    for text, part in zip(first, expected, strict=True):
        assert part in text


def other_ids(rank: int, world_size: int, agreed: int) -> None:
    """After some steps, the second rank's loader is one step ahead."""
    stages, schedule, _ = build(rank, world_size, Case())
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("delta(int4)", "int8"), deadline=20)
    for step in range(agreed + 1):
        ids, x, y = batch(step + (rank if step == agreed else 0))
        pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)


@pytest.mark.parametrize("agreed", [0, 2])
def test_loaders_that_disagree_on_the_samples_are_found_at_once(pool: Pool, agreed: int) -> None:
    first, second = pool.run(other_ids, agreed, world_size=2, raises=False)
    assert second.type_name == "ValueError"
    assert first.type_name == ("PeerAborted" if agreed else "ValueError")
    for error in (first, second):
        assert "rank 1 was given other sample_ids" in error.message


def disagree(rank: int, world_size: int, what: str) -> None:
    other = what if rank else ""
    case = Case(microbatches=8 if other == "microbatches" else 4)
    stages, schedule, _ = build(rank, world_size, case)
    if other == "loss":
        schedule = tw.build_schedule(case.schedule, stages, case.microbatches, None)
    plan = tw.Plan("int3" if other == "plan" else "int4", "int8")
    norm = 1.0 if other == "max_grad_norm" else None
    tw.Pipeline(schedule, stages, plan, max_grad_norm=norm, deadline=20, first_deadline=20)


@pytest.mark.parametrize("what", ["microbatches", "plan", "max_grad_norm", "loss"])
def test_ranks_that_were_configured_differently_are_refused_at_set_up(
    pool: Pool, what: str
) -> None:
    for error in pool.run(disagree, what, world_size=2, raises=False):
        assert error.type_name == "ValueError"
        assert what in error.message


class Larger(nn.Module):
    """A stage that returns more than it declared."""

    def __init__(self, stage: Stage, how: str) -> None:
        super().__init__()
        self.stage, self.how = stage, how

    def forward(self, x: Tensor) -> Any:
        y: Tensor = self.stage(x)
        return {
            "shape": torch.cat([y, y], -1),
            "narrow": y[..., :5],
            "dtype": y.argmax(-1, keepdim=True).expand_as(y),
            "count": (y, y),
        }[self.how]


def train_larger(rank: int, world_size: int, how: str) -> None:
    case = Case()
    stages, schedule, _ = build(rank, world_size, case, {0: Larger(Stage(0, 2), how)})
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("int4", "int8"), deadline=20)
    ids, x, y = batch(0)
    pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)


@pytest.mark.parametrize("how", ["shape", "narrow", "dtype", "count"])
def test_an_output_that_was_not_declared_is_refused_before_it_is_sent(pool: Pool, how: str) -> None:
    first, second = pool.run(train_larger, how, world_size=2, raises=False)
    assert first.type_name == "ValueError"
    assert "declared in output_args" in first.message
    assert second.type_name == "PeerAborted"


def step_or_eval(rank: int, world_size: int) -> None:
    """After a common step, one rank evaluates while the other trains."""
    stages, schedule, _ = build(rank, world_size, Case())
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("int4", "int8"), deadline=20)
    ids, x, y = batch(0)
    inputs = (x,) if rank == 0 else ()
    pipeline.step(*inputs, target=y, sample_ids=ids)
    if rank == 0:
        pipeline.step(*inputs, target=y, sample_ids=ids)
    else:
        pipeline.eval(*inputs, target=y)


def test_ranks_that_call_different_kinds_of_steps_are_told_at_once(pool: Pool) -> None:
    for error in pool.run(step_or_eval, world_size=2, raises=False):
        assert "another kind of step" in error.message
        assert error.seconds < 10


def survive(rank: int, world_size: int, victim: int, phase: str) -> tuple[str, float]:
    """One rank is killed in a step; the others catch the error and go on living."""

    class Killing(nn.Module):
        def __init__(self, stage: Stage) -> None:
            super().__init__()
            self.stage, self.calls = stage, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y: Tensor = self.stage(x)
            if self.calls == 4 + 2:
                if phase == "forward":
                    os.kill(os.getpid(), signal.SIGKILL)
                y.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))
            return y

    case = Case(num_stages=world_size)
    modules: dict[int, nn.Module] = {victim: Killing(Stage(victim, world_size))}
    stages, schedule, _ = build(rank, world_size, case, modules)
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("delta(int4)", "int8"), deadline=20)
    for step in range(3):
        ids, x, y = batch(step)
        start = time.monotonic()
        try:
            pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
        except tw.LinkError as error:
            found = (str(error), time.monotonic() - start)
            time.sleep(4)  # its connections stay open
            return found
    return "no error", 0.0


@pytest.mark.parametrize(("victim", "phase"), [(0, "forward"), (1, "backward"), (3, "forward")])
def test_survivors_tell_each_other_of_a_killed_rank(pool: Pool, victim: int, phase: str) -> None:
    found = pool.run(survive, victim, phase, world_size=4, raises=False)
    for rank in set(range(4)) - {victim}:
        text, seconds = found[rank]
        assert f"rank {victim}" in text
        assert seconds < 10


def fixed_shapes(rank: int, world_size: int) -> list[str]:
    """An edge that is off takes whole batches only, and says so on every rank."""
    stages, schedule, _ = build(rank, world_size, Case())
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("off", "off"), deadline=20)
    found = []
    for rows, length in ((8, 12), (7, 12), (8, 11), (8, 12)):
        ids, x, y = batch(0, rows, length)
        try:
            pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
            found.append("trained")
        except ValueError as error:
            found.append(str(error))
    return found


def test_an_edge_that_is_off_refuses_short_batches_on_every_rank(pool: Pool) -> None:
    first, second = pool.run(fixed_shapes, world_size=2)
    assert first == second
    assert [text == "trained" for text in first] == [True, False, False, True]
    assert "use raw there" in first[1]


@pytest.mark.parametrize("deadline", [0.0, -1.0, math.inf, 1e300])
def test_a_deadline_that_cannot_be_kept_is_refused(deadline: float) -> None:
    with pytest.raises(ValueError, match="deadline"):
        check_deadline(deadline)


def first_step(rank: int, world_size: int, what: str) -> None:
    """Something is wrong on the second rank in the very first step."""
    stages, schedule, _ = build(rank, world_size, Case())
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("int4", "int8"), deadline=20)
    ids, x, y = batch(0)
    lengths = torch.full((8,), LENGTH)
    with torch.set_grad_enabled(not (rank and what == "no_grad")):
        pipeline.step(
            *((x,) if rank == 0 else ()),
            target=y.to("meta") if rank and what == "meta target" else y,
            sample_ids=ids.to("meta") if rank and what == "meta ids" else ids,
            lengths=lengths - 1 if rank and what == "lengths" else lengths,
        )


@pytest.mark.parametrize("what", ["meta target", "meta ids", "no_grad", "lengths"])
def test_what_is_wrong_on_one_rank_in_the_first_step_is_told_to_all(pool: Pool, what: str) -> None:
    for error in pool.run(first_step, what, world_size=2, raises=False):
        assert error.type_name == "ValueError"
        assert "rank 1" in error.message
        assert error.seconds < 10


@pytest.mark.parametrize(
    "setting",
    [{"max_grad_norm": -1.0}, {"max_grad_norm": math.nan}, {"window": 2.5}, {"seed": "a"}],
)
def test_settings_that_are_no_sensible_numbers_are_refused(setting: dict[str, Any]) -> None:
    numbers: dict[str, Any] = {"window": 8, "seed": 0, "max_grad_norm": None} | setting
    with pytest.raises(ValueError, match=next(iter(setting))):
        check_numbers(**numbers)


SURVIVOR = """
import os, signal, sys
import torch.distributed as dist
import thinwire as tw
from tests.distributed.setup import Case, batch, build

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=4)
stages, schedule, _ = build(rank, 4, Case(num_stages=4))
pipeline = tw.Pipeline(schedule, stages, tw.Plan("int4", "int8"), deadline=20)
for step in range(3):
    if step == 2 and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    ids, x, y = batch(step)
    try:
        pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
    except tw.LinkError:
        sys.exit(7)
"""


def test_survivors_of_a_killed_rank_leave_with_their_own_exit_code(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SURVIVOR, str(rank), str(tmp_path / "meet")],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    found = [(p.communicate(timeout=90)[1], p.returncode) for p in processes]
    assert [code for _, code in found] == [-signal.SIGKILL, 7, 7, 7]
    assert not any("terminate called" in text for text, _ in found)
