"""The time of many operations, taken so that a noisy machine treats them all alike.

Each round runs every operation once, in a new order, so that all see the same neighbours; before
each the caches are emptied, for what ran before not to matter. A median is taken over the rounds.
With one thread a time is the process's CPU time, which does not count waiting for a core.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import random
import resource
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

K = TypeVar("K", bound=Hashable)

_BUDGET_NS = 3_000_000_000  # of one operation over all rounds
_FEWEST = 3
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_USUAL_CACHE = 32 << 20
_LARGEST_CACHE = 256 << 20

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = -1


@dataclasses.dataclass(frozen=True)
class Task:
    """An operation to be timed, run ``often`` times in a round."""

    run: Callable[[], object]
    often: int = 1


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one run, the median and quartiles of ``samples``; median page faults."""

    ms: float
    ms_low: float
    ms_high: float
    samples: int
    page_faults: float


@dataclasses.dataclass
class _Series:
    task: Task
    rounds: int
    ns: list[int] = dataclasses.field(default_factory=list)
    faults: list[int] = dataclasses.field(default_factory=list)


def clock(threads: int) -> tuple[str, Callable[[], int]]:
    """What is measured with that many threads, in words, and the function that reads it in ns.

    Threads that wait for each other burn CPU time, so with several of them it is wall-clock time.
    """
    if threads == 1:
        return "process CPU time", time.process_time_ns
    return "wall-clock time", time.perf_counter_ns


def measure(
    tasks: Mapping[K, Task],
    rounds: int,
    now: Callable[[], int],
    progress: Callable[[str, bool], None],
) -> dict[K, Timing]:
    """Run each task in ``rounds`` rounds; slow ones in fewer, evenly spread, of at least three.

    ``progress`` gets a line to show, and whether it begins a stage.
    """
    empty_caches = _emptying(_cache_nbytes())
    series: dict[K, _Series] = {}
    for done, (key, task) in enumerate(tasks.items()):
        progress(f"warming up {done + 1} of {len(tasks)}", done == 0)
        task.run()  # makes what the task keeps
        estimate = max(1, _timed(task.run, now)[0]) * task.often
        series[key] = _Series(task, min(rounds, max(_FEWEST, _BUDGET_NS // estimate)))
    shuffle = random.Random(0).shuffle
    for turn in range(rounds):
        progress(f"round {turn + 1} of {rounds}", True)
        order = [s for s in series.values() if _takes_part(s, turn, rounds)]
        order = [s for s in order for _ in range(s.task.often)]
        shuffle(order)
        for one in order:
            empty_caches()
            ns, faults = _timed(one.task.run, now)
            one.ns.append(ns)
            one.faults.append(faults)
    return {key: _timing(one) for key, one in series.items()}


def _takes_part(one: _Series, turn: int, rounds: int) -> bool:
    return (turn + 1) * one.rounds // rounds > turn * one.rounds // rounds


def _timed(run: Callable[[], object], now: Callable[[], int]) -> tuple[int, int]:
    """Nanoseconds and page faults of one run."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = now()
    run()
    taken = now() - start
    return taken, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def _timing(one: _Series) -> Timing:
    ns = one.ns * 2 if len(one.ns) == 1 else one.ns
    low, middle, high = statistics.quantiles(ns, n=4, method="inclusive")
    faults = statistics.median(one.faults)
    return Timing(middle / 1e6, low / 1e6, high / 1e6, len(one.ns), faults)


def _cache_nbytes() -> int:
    """The size of the last cache of the first core, where Linux tells; else a usual one."""
    with contextlib.suppress(OSError, ValueError):
        kib = int(_CACHE.read_text().strip().removesuffix("K"))
        return min(kib << 10, _LARGEST_CACHE)
    return _USUAL_CACHE


def _emptying(nbytes: int) -> Callable[[], object]:
    """A function after which caches of ``nbytes`` hold nothing of use, and nothing to write back.

    It only reads: lines that it had written would be written back in the time of what follows.
    """
    other = torch.zeros(2 * nbytes // 4)
    return other.sum


def keep_heap() -> bool:
    """Have the C library keep what is freed, for the life of the process; False if it can't.

    Else each large output of an operation that allocates is fetched from the system, and its page
    faults cost up to three times as much as the operation. To be called before anything large is
    allocated.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
    return False


def give_back_heap() -> None:
    """Return freed memory to the system after all, between two sizes of tensors."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
