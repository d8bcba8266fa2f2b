"""Schedules by name, and the check of torch's hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import pipelining

import thinwire as tw
from thinwire.pipeline import engine


def test_the_hooks_of_this_torch_are_those_that_we_override() -> None:
    engine.check_hooks()


def test_a_changed_hook_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: Any, chunk: int) -> None: ...

    monkeypatch.setattr(pipelining.PipelineStage, "get_fwd_recv_ops", changed)
    with pytest.raises(tw.EngineError, match=r"PipelineStage.get_fwd_recv_ops takes") as error:
        engine.check_hooks()
    assert "\n" not in str(error.value)


def test_an_engine_of_fixed_shapes_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch 2.6 to 2.10 compare each micro-batch with the first one's shape
    monkeypatch.setattr(pipelining.PipelineStage, "_validate_fwd_input", None, raising=False)
    with pytest.raises(tw.EngineError, match=r"one fixed shape only; install torch 2") as error:
        engine.check_hooks()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "near"), [("interleaved1f1b", "Interleaved1F1B"), ("GPype", "GPipe"), ("zbv", "ZBV")]
)
def test_an_unknown_schedule_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=near):
        tw.stages_of_rank(name, 0, 2, 2)


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "held"),
    [
        ("GPipe", 3, 3, [[0], [1], [2]]),
        ("Interleaved1F1B", 2, 4, [[0, 2], [1, 3]]),
        ("ZBV", 2, 4, [[0, 3], [1, 2]]),
        ("LoopedBFS", 1, 3, [[0, 1, 2]]),
    ],
)
def test_each_rank_holds_its_stages(
    schedule: str, ranks: int, stages: int, held: list[list[int]]
) -> None:
    assert [tw.stages_of_rank(schedule, r, ranks, stages) for r in range(ranks)] == held


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages"), [("GPipe", 2, 4), ("ZBV", 2, 2), ("LoopedBFS", 2, 3)]
)
def test_stages_that_do_not_fit_the_ranks_are_refused(
    schedule: str, ranks: int, stages: int
) -> None:
    with pytest.raises(ValueError, match=f"not {stages}|{stages} stages"):
        tw.stages_of_rank(schedule, 0, ranks, stages)


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("1F1B", 3), ("Interleaved1F1B", 9), ("GPipe", 0)]
)
def test_microbatches_that_do_not_fit_are_refused_up_front(
    schedule: str, microbatches: int
) -> None:
    with pytest.raises(ValueError, match="micro-batches"):
        engine.check_microbatches(schedule, 4, 4, microbatches)


def test_data_parallel_modules_are_refused_under_a_split_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Wrapped(torch.nn.Linear):
        pass

    monkeypatch.setattr(engine, "DistributedDataParallel", Wrapped)
    with pytest.raises(ValueError, match="use Interleaved1F1B"):
        engine.check_modules("ZBV", [Wrapped(2, 2)])
    engine.check_modules("1F1B", [Wrapped(2, 2)])
