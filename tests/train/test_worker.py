"""One process of a run: its share of the cores, and what it says of its failures."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from thinwire.train import check, worker
from thinwire.train.config import Config, LinkConfig


def failed_allocation() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15, dtype=torch.uint8)
    return caught.value


def test_a_failed_allocation_is_a_line_that_says_what_was_asked_for() -> None:
    failure = worker._failure(failed_allocation(), rank=1, to_lower="--model.dim")
    assert failure["expected"]
    assert failure["message"].startswith("rank 1: out of memory: there is no room for 1,000,000.0")
    assert "lower --model.dim" in failure["message"]


def test_a_failed_allocation_is_found_below_the_errors_that_it_led_to() -> None:
    outer = RuntimeError("stage 0 failed in forward")
    outer.__cause__ = failed_allocation()
    assert "out of memory" in worker._failure(outer, 0, "--model.dim")["message"]


@pytest.mark.parametrize(("cores", "threads"), [(8, 4), (2, 1), (1, 1)])
def test_stages_in_one_process_get_the_threads_of_as_many_processes(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_cores", lambda: cores)
    memory = dataclasses.replace(Config(), link=LinkConfig(transport="memory"))
    assert worker.default_threads(check.resolved(memory), 1) == threads
    assert worker.default_threads(check.resolved(Config()), 2) == threads
