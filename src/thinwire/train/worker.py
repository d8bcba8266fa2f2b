"""One process of a run: its place, threads and process group, its runs, and how it fails."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import thinwire as tw
from thinwire.train import check, data, metrics, report
from thinwire.train.config import Config, ConfigError, DataConfig, PlanConfig, one_line, to_toml
from thinwire.train.loop import Place, train

COMPARED = {"fp32": PlanConfig("raw", "raw"), "bf16": PlanConfig("bf16", "bf16")}


@dataclass(frozen=True)
class Start:
    """How this process was started; ``fail`` passes on why it ends early."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    init_method: str
    fail: Callable[[dict[str, Any]], None]


def run_launched(config: Config, folder: Path, scratch: Path, rank: int, world_size: int) -> int:
    """Be the worker ``rank`` that ``launch`` started on this machine; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it isn't blocked: the starter ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start = Start(
        rank,
        world_size,
        local_rank=rank,
        local_world_size=world_size,
        init_method=f"file://{scratch / 'rendezvous'}",
        fail=lambda failure: metrics.write_json(scratch / f"error-{rank}.json", failure),
    )
    return _guarded(start, lambda: _run(config, folder, start))


def run_under_torchrun(config: Config) -> int:
    """Be one of the workers that torchrun started; returns the exit code."""
    start = Start(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        init_method="env://",
        fail=lambda failure: print(f"thinwire: error: {failure['message']}", file=sys.stderr),
    )

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the live line cleans up
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun says itself whom it stopped

    def checked_run() -> None:
        if start.rank == 0 and config.nproc not in (None, start.world_size):
            print(
                f"thinwire: --nproc {config.nproc} is ignored: torchrun set {start.world_size}",
                file=sys.stderr,
            )
        complete = check.resolved(config, start.world_size)
        check.check_plan(complete)
        folder = Path()  # only rank 0 writes
        if start.rank == 0:
            check.check_out(complete)
            folder = metrics.create_folder(complete)
        _run(complete, folder, start)

    return _guarded(start, checked_run)


def _guarded(start: Start, run: Callable[[], None]) -> int:
    """Run, and on a failure pass on one line and leave without waiting for any peer."""
    try:
        run()
        return 0
    except KeyboardInterrupt:
        print("thinwire: stopped", file=sys.stderr, flush=True)
        os._exit(130)
    except Exception as error:  # noqa: BLE001  every failure ends the process, with its reason
        failure = _failure(error, start.rank)
        if not failure["expected"]:
            traceback.print_exc()
        start.fail(failure)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure["code"])  # a process group with open messages may hang in its destructor


def _failure(error: Exception, rank: int) -> dict[str, Any]:
    """What the starting process needs to know of an error, and the line that is shown."""
    expected = isinstance(
        error, ValueError | tw.LinkError | tw.EngineError | OSError | torch.OutOfMemoryError
    )
    by_user = isinstance(error, ConfigError)
    text = one_line(error)
    if (lacking := _lacking_memory(error)) is not None:
        expected, text = True, lacking
    kind = "" if expected else f"{type(error).__name__}: "
    return {
        "message": text if by_user else f"rank {rank}: {kind}{text}",
        "code": 2 if by_user else 1,
        "expected": expected,
        "consequence": isinstance(error, tw.LinkError),
        "time": time.time(),
    }


def _lacking_memory(error: BaseException | None) -> str | None:
    """The line for a failed allocation on the CPU, for which torch has no exception of its own."""
    while error is not None:
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            asked = re.search(r"allocate (\d+) bytes", str(error))
            what = f"{int(asked[1]) / 1e9:,.1f} GB more" if asked else "more"
            return (
                f"out of memory: there is no room for {what}; lower --model.dim, --model.layers, "
                "--model.context or --train.batch"
            )
        error = error.__cause__ or error.__context__
    return None


def _end_with_parent() -> None:
    """Leave when the starting process is gone: its end of our stdin closes with it."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _run(config: Config, folder: Path, start: Start) -> None:
    """Join the others, check that all start from the same, and do one run or the compared ones."""
    # on any error torch logs the whole schedule, page after page; the error itself says more
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    torch.set_num_threads(config.threads or default_threads(config, start.local_world_size))
    place = Place(start.rank, start.world_size, _device(config.device, start.local_rank))
    text = data.load(config.data, config.model.context)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    screen = report.console(to_stderr=config.json, quiet=start.rank != 0)
    dist.init_process_group(
        "gloo",
        init_method=start.init_method,
        rank=start.rank,
        world_size=start.world_size,
        timeout=datetime.timedelta(seconds=config.pipeline.first_deadline),
    )
    _agree(config, text)
    if config.compare:
        document = _compare(config, text, place, folder, screen)
    else:
        document = train(config, text, place, folder, screen)
    if config.json and start.rank == 0:
        print(json.dumps(document, indent=2))
    dist.destroy_process_group()


def default_threads(config: Config, local_world_size: int) -> int:
    """An equal share of the cores; stages that share a process get what each alone would."""
    memory = config.link.transport == "memory"
    return max(1, _cores() // (config.num_stages if memory else local_world_size))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cuda":
        name = f"cuda:{local_rank % torch.cuda.device_count()}"
    device = torch.device(name)
    if device.type == "cuda":
        if device.index >= torch.cuda.device_count():
            raise ConfigError(f"--device {name}: there are {torch.cuda.device_count()} devices")
        torch.cuda.set_device(device)
    return device


def _agree(config: Config, text: data.Text) -> None:
    """Refuse to train where another rank read other settings or another text than rank 0."""
    shared = dataclasses.replace(config, device="cpu", data=DataConfig(seed=config.data.seed))
    digests = [hashlib.sha256(to_toml(shared).encode()).digest(), bytes.fromhex(text.sha256)]
    own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    for rank, other in enumerate(every):
        for part, what in ((slice(0, 32), "settings"), (slice(32, 64), "text")):
            if not torch.equal(other[part], every[0][part]):
                raise ConfigError(f"rank {rank} has other {what} than rank 0; give all the same")


def _compare(
    config: Config, text: data.Text, place: Place, folder: Path, screen: Console
) -> dict[str, Any]:
    """The run as configured, then uncompressed and in bf16, each in a folder of its own."""
    runs: dict[str, dict[str, Any]] = {}
    for name, plan in {"compressed": config.plan, **COMPARED}.items():
        screen.rule(f"{name}: forward {plan.forward}, backward {plan.backward}")
        one = dataclasses.replace(config, plan=plan)
        if place.rank == 0:
            (folder / name).mkdir()
            metrics.write_config(folder / name, one)
        runs[name] = train(one, text, place, folder / name, screen)
    document = {"runs": runs, "comparison": report.comparison(runs)}
    screen.rule()
    screen.print(report.comparison_table(runs))
    screen.print(report.comparison_sentence(document["comparison"], runs), soft_wrap=True)
    if place.rank == 0:
        metrics.write_json(folder / "comparison.json", document["comparison"])
    return document
