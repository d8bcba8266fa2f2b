"""What we ask of torch's pipelining engine: its schedules by name, and a check of its hooks."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import EngineError
from thinwire.spec import nearest

#: The release that the tests run on.
TESTED_TORCH = "2.13.0"

SCHEDULES: dict[str, type[Any]] = {
    "GPipe": schedules.ScheduleGPipe,
    "1F1B": schedules.Schedule1F1B,
    "Interleaved1F1B": schedules.ScheduleInterleaved1F1B,
    "LoopedBFS": schedules.ScheduleLoopedBFS,
    "InterleavedZeroBubble": schedules.ScheduleInterleavedZeroBubble,
    "ZBV": schedules.ScheduleZBVZeroBubble,
}
#: One stage a rank.
SINGLE = ("GPipe", "1F1B")
#: Schedules that split the backward pass, which bypasses the hooks of DDP and FSDP2.
_SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBV")

#: Each has a channel of its own on each link.
MOST_MICROBATCHES = 1 << 16

_HOOKS = {
    "get_fwd_recv_ops": ["fwd_chunk_id"],
    "get_bwd_recv_ops": ["bwd_chunk_id"],
    "get_fwd_send_ops": ["fwd_chunk_id"],
    "get_bwd_send_ops": ["bwd_chunk_id"],
    "forward_one_chunk": ["fwd_chunk_id", "args", "kwargs"],
    "backward_one_chunk": ["bwd_chunk_id", "loss"],
    "set_local_fwd_input": ["prev_stage_outputs", "mb_index"],
    "set_local_bwd_input": ["next_stage_bwd_outputs", "mb_index"],
    "get_local_bwd_output": ["mb_index"],
}


def check_hooks() -> None:
    """Raise EngineError, in one line, if this torch's engine lacks something that we rely on."""
    for name, wanted in _HOOKS.items():
        hook = getattr(pipelining.PipelineStage, name, None)
        found = list(inspect.signature(hook).parameters)[1:] if hook is not None else None
        if found is None or found[: len(wanted)] != wanted:
            _refuse(f"PipelineStage.{name} takes {found}, {wanted} is expected")
    step = inspect.signature(schedules.ScheduleGPipe.step).parameters
    made = inspect.signature(schedules.ScheduleGPipe).parameters
    if not hasattr(schedules.ScheduleGPipe, "eval") or "return_outputs" not in step:
        _refuse("its schedules cannot evaluate")
    if "scale_grads" not in made:
        _refuse("its schedules have no word on dividing gradients")
    if hasattr(pipelining.PipelineStage, "_validate_fwd_input"):
        _refuse("its stages accept one fixed shape only")


def _refuse(why: str) -> typing.NoReturn:
    raise EngineError(
        f"torch {torch.__version__} has another pipelining engine than thinwire's pipelines are "
        f"written for: {why}; install torch {TESTED_TORCH} (codecs work with this one too)"
    )


def check_name(name: str) -> None:
    """Raise ValueError, with the nearest match, if no schedule has this name."""
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}{nearest(name, SCHEDULES)}")


def stages_of_rank(schedule: str, rank: int, world_size: int, num_stages: int) -> list[int]:
    """The stages that a rank holds: ``rank + k * world_size``, or the two arms of ZBV's V.

    Raises ValueError where the schedule cannot spread the stages over the ranks.
    """
    check_name(schedule)
    if num_stages % world_size or num_stages < world_size:
        raise ValueError(
            f"{num_stages} stages cannot be spread over {world_size} ranks; "
            f"use a multiple of {world_size}"
        )
    if schedule in SINGLE and num_stages != world_size:
        raise ValueError(
            f"{schedule} has one stage a rank: {world_size} stages for {world_size} ranks, "
            f"not {num_stages}; Interleaved1F1B takes more"
        )
    if schedule == "ZBV":
        if num_stages != 2 * world_size:
            raise ValueError(
                f"ZBV has two stages a rank: {2 * world_size} stages for {world_size} ranks, "
                f"not {num_stages}"
            )
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, world_size))


def check_microbatches(schedule: str, num_stages: int, ranks: int, n_microbatches: int) -> None:
    """Raise ValueError where the schedule needs another number of micro-batches."""
    check_name(schedule)
    if not 1 <= n_microbatches <= MOST_MICROBATCHES:
        raise ValueError(
            f"{n_microbatches} micro-batches; 1 to {MOST_MICROBATCHES} can be numbered"
        )
    if schedule == "1F1B" and n_microbatches < num_stages:
        raise ValueError(
            f"1F1B needs at least as many micro-batches as stages: {n_microbatches} < "
            f"{num_stages}; use more micro-batches, or GPipe"
        )
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, n_microbatches // ranks)
        if n_microbatches % rounds:
            raise ValueError(
                f"{schedule} on {ranks} ranks cannot divide {n_microbatches} micro-batches into "
                f"{rounds} rounds; use a multiple of {ranks}"
            )


def build_schedule(
    name: str,
    stages: Sequence[Any],
    n_microbatches: int,
    loss_fn: Callable[..., torch.Tensor] | None,
) -> Any:
    """torch's schedule of this name over the local ``stages``; gradients are not divided.

    Raises ValueError on an unknown name, on numbers of stages or micro-batches that the schedule
    does not take, and on DDP or FSDP2 under a split backward (silently wrong in torch).
    """
    check_name(name)
    stages = list(stages)
    first = stages[0]
    expected = stages_of_rank(name, first.group_rank, first.group_size, first.num_stages)
    found = [s.stage_index for s in stages]
    if found != expected:
        raise ValueError(
            f"{name}: rank {first.group_rank} should hold stages {expected}, not {found}"
        )
    check_microbatches(name, first.num_stages, first.group_size, n_microbatches)
    check_modules(name, [s.submod for s in stages])
    target: Any = stages[0] if name in SINGLE else stages
    return SCHEDULES[name](target, n_microbatches, loss_fn=loss_fn, scale_grads=False)


def check_modules(name: str, modules: Sequence[nn.Module]) -> None:
    """Refuse data-parallel wrappers where torch would leave their gradients unreduced."""
    for module in modules:
        if name in _SPLIT_BACKWARD and isinstance(module, (DistributedDataParallel, FSDPModule)):
            raise ValueError(
                f"{name} splits the backward pass, which leaves the gradients of "
                f"{type(module).__name__} unreduced; use Interleaved1F1B, or reduce after the step"
            )


def schedule_name(schedule: Any) -> str:
    """The name of a schedule object; ValueError for one that is not supported."""
    for name, cls in SCHEDULES.items():
        if type(schedule) is cls:
            return name
    raise ValueError(
        f"schedule {type(schedule).__name__} is not supported; use one of {', '.join(SCHEDULES)}"
    )


def microbatches_of(schedule: Any) -> int:
    """How many micro-batches a schedule object runs; torch has no public name for it."""
    return typing.cast(int, schedule._n_microbatches)


def loss_of(schedule: Any) -> Any:
    """The loss function that a schedule object was given."""
    return schedule._loss_fn
