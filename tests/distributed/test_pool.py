"""The worker pool does what distributed tests rely on."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pool, WorkerError


def sum_of_ranks(rank: int, world_size: int) -> float:
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return total.item()


def scaled(rank: int, world_size: int, tensor: torch.Tensor, *, factor: int) -> torch.Tensor:
    return tensor * factor + rank


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def fail_on_rank_1(rank: int, world_size: int) -> str:
    if rank == 1:
        raise KeyError("the culprit")
    return "fine"


def fail_while_the_other_waits(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("the culprit")
    dist.barrier()


def hang_on_rank_0(rank: int, world_size: int) -> None:
    while rank == 0:
        time.sleep(0.1)


def kill_rank_1(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def exit_with_2(rank: int, world_size: int) -> None:
    raise SystemExit(2)


def start_a_process(rank: int, world_size: int) -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def capability(rank: int, world_size: int) -> str:
    return torch.backends.cpu.get_cpu_capability()


def threads(rank: int, world_size: int) -> int:
    return torch.get_num_threads()


def is_running(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie, which only awaits its parent, does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_a_process_group(pool: Pool, world_size: int) -> None:
    total = float(sum(range(world_size)))
    assert pool.run(sum_of_ranks, world_size=world_size) == [total] * world_size


def test_arguments_and_results_are_tensors_too(pool: Pool) -> None:
    first, second = pool.run(scaled, torch.arange(3), factor=2)
    assert (first.tolist(), second.tolist()) == ([0, 2, 4], [1, 3, 5])


def test_two_ranks_are_the_first_two_of_four(pool: Pool) -> None:
    assert pool.run(process_id, world_size=4)[:2] == pool.run(process_id) == pool.pids[:2]


def test_a_rank_has_one_thread(pool: Pool) -> None:
    assert pool.run(threads) == [1, 1]


def test_a_failure_is_reported_with_its_traceback(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 1: KeyError.*in fail_on_rank_1"):
        pool.run(fail_on_rank_1)


def test_a_failure_ends_the_run_of_a_waiting_peer(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match="the culprit"):
        pool.run(fail_while_the_other_waits)
    assert time.monotonic() - start < 30


def test_failures_can_be_results(pool: Pool) -> None:
    fine, failure = pool.run(fail_on_rank_1, raises=False)
    assert (fine, failure.type_name, failure.message) == ("fine", "KeyError", "'the culprit'")


def test_an_exit_can_be_a_result(pool: Pool) -> None:
    exits = pool.run(exit_with_2, raises=False)
    assert [(e.type_name, e.message) for e in exits] == [("SystemExit", "2")] * 2


def test_a_hang_is_killed_and_shown(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 0: Hang.*in hang_on_rank_0"):
        pool.run(hang_on_rank_0, timeout=2)


def test_the_pool_works_after_a_hang(pool: Pool) -> None:
    with pytest.raises(WorkerError):
        pool.run(hang_on_rank_0, timeout=2)
    assert pool.run(sum_of_ranks) == [1.0, 1.0]


def test_a_worker_that_dies_is_reported(pool: Pool) -> None:
    survivor, dead = pool.run(kill_rank_1, raises=False)
    assert (survivor, dead.type_name, dead.message) == ("survived", "WorkerDied", "exit code -9")


def test_a_killed_worker_is_replaced(pool: Pool) -> None:
    before = pool.run(process_id)
    os.kill(before[1], signal.SIGKILL)
    after = pool.run(process_id)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_env_is_set_before_torch_is_imported(pool: Pool) -> None:
    first, second = pool.run(capability, env=[{"ATEN_CPU_CAPABILITY": "default"}, {}])
    assert (first, second) == ("DEFAULT", torch.backends.cpu.get_cpu_capability())


def test_a_local_function_is_refused(pool: Pool) -> None:
    with pytest.raises(ValueError, match="top level"):
        pool.run(lambda rank, world_size: None)


def test_nothing_runs_after_close() -> None:
    with Pool() as pool:
        started = pool.run(start_a_process, world_size=1) + pool.pids
        assert all(map(is_running, started))
    assert not any(map(is_running, started))
