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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import thinwire as tw
from thinwire import plugins
from thinwire.train import check, comparison, extend, home, metrics, report
from thinwire.train.asked import Asked
from thinwire.train.build import Place, planned
from thinwire.train.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    PlanConfig,
    RefConfig,
)
from thinwire.train.home import Home
from thinwire.train.loop import train
from thinwire.train.scoring import score
from thinwire.train.spelling import to_toml
from thinwire.train.stop import (
    Stop,
    Stopped,
    at_once_line,
    phase_writer,
    resume_command,
    say,
    stopped_line,
    torchrun_command,
)
from thinwire.train.streams import lasting
from thinwire.train.task import Data
from thinwire.train.tasks import task_of
from thinwire.train.words import one_line

COMPARED = {"fp32": PlanConfig("raw", "raw"), "bf16": PlanConfig("bf16", "bf16")}


@dataclass(frozen=True)
class Start:
    """How this process was started, and with what it is resumed.

    ``fail`` passes on why it ends early; ``stop`` knows whether it was asked to. ``to_lower``: the
    settings to lower where memory is short.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    init_method: str
    fail: Callable[[dict[str, Any]], None]
    resume_command: Callable[[Path], str]
    stop: Stop
    to_lower: str


@lasting()
def run_launched(
    config: Config,
    folder: Path,
    resumed: bool,
    asked: Mapping[str, Any] | None,
    scratch: Path,
    rank: int,
    world_size: int,
) -> int:
    """Be the worker ``rank`` that ``launch`` started on this machine; returns the exit code.

    ``asked``: the fields of ``scoring.Asked`` where the run is to be evaluated, not trained.
    """
    note = phase_writer(scratch) if rank == 0 else None
    start = Start(
        rank,
        world_size,
        local_rank=rank,
        local_world_size=world_size,
        init_method=f"file://{scratch / 'rendezvous'}",
        fail=lambda failure: metrics.write_json(scratch / f"error-{rank}.json", failure),
        resume_command=resume_command,
        stop=Stop(note),
        to_lower=task_of(config).to_lower,
    )
    threading.Thread(target=_listen, args=(start.stop,), daemon=True).start()
    # the starter passes an interrupt on; some supervisors send SIGTERM to all processes at once
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: start.stop.ask(number))
    what = None if asked is None else Asked(**{**asked, "codecs": tuple(asked["codecs"])})

    def run() -> None:
        extend.load(config.plugin, quiet=True)  # the starter has said what is not loaded
        _run(config, folder, resumed, start, what)

    return _guarded(start, run)


def run_under_torchrun(config: Config, resume_from: Path | None, asked: Asked | None = None) -> int:
    """Be one of the workers that torchrun started; returns the exit code.

    ``resume_from``: the folder of the run to go on with, or to evaluate; None for a new one.
    """
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world_size = int(os.environ["WORLD_SIZE"])
    start = Start(
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_world_size=local_world_size,
        init_method="env://",
        fail=lambda failure: print(f"thinwire: error: {failure['message']}", file=sys.stderr),
        resume_command=lambda folder: torchrun_command(folder, world_size, local_world_size),
        stop=Stop(),
        to_lower=task_of(config).to_lower,
    )
    start.stop.watch()

    def checked_run() -> None:
        if start.rank == 0 and config.nproc not in (None, start.world_size):
            print(
                f"thinwire: --nproc {config.nproc} is ignored: torchrun set {start.world_size}",
                file=sys.stderr,
            )
        complete = check.resolved(config, start.world_size)
        check.check_plan(complete, quiet=start.rank != 0)
        data = task_of(complete).load(complete)
        complete = planned(complete, data, report.note(config, quiet=start.rank != 0))
        folder = resume_from
        if folder is None and start.rank == 0:
            check.check_out(complete)
            folder = home.create(complete)
        _run(complete, folder, resume_from is not None, start, asked)

    return _guarded(start, checked_run)


def _guarded(start: Start, run: Callable[[], None]) -> int:
    """Run, and on a failure pass on one line and leave without waiting for any peer."""
    stop = start.stop
    try:
        run()
        return 0
    except Stopped as stopped:
        number = stop.number or signal.SIGINT  # another rank was asked
        if start.rank == 0:
            assert stop.folder is not None
            say(stopped_line(number, stopped, start.resume_command(stop.folder)))
        return 128 + number
    except KeyboardInterrupt:
        phase = None
        if start.rank == 0 and stop.phase is not None and stop.folder is not None:
            phase = stop.phase, stop.folder
        say(at_once_line(signal.SIGINT, phase, start.resume_command))
        os._exit(130)
    except (Exception, SystemExit) as error:  # noqa: BLE001  every failure ends it, with a reason
        failure = _failure(error, start.rank, start.to_lower)
        if not failure["expected"]:
            traceback.print_exc()
        start.fail(failure)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure["code"])  # a process group with open messages may hang in its destructor


def _failure(error: Exception | SystemExit, rank: int, to_lower: str) -> dict[str, Any]:
    """What the starting process needs to know of an error, and the line that is shown.

    ``to_lower``: settings, where memory is short.
    """
    expected = isinstance(
        error, ValueError | tw.LinkError | tw.EngineError | OSError | torch.OutOfMemoryError
    )
    by_user = isinstance(error, ConfigError)
    text = one_line(error)
    if (lacking := _lacking_memory(error, to_lower)) is not None:
        expected, text = True, lacking
    kind = "" if expected else f"{type(error).__name__}: "
    return {
        "message": text if by_user else f"rank {rank}: {kind}{text}",
        "code": 2 if by_user else 1,
        "expected": expected,
        "consequence": isinstance(error, tw.LinkError),
        "time": time.time(),
    }


def _lacking_memory(error: BaseException | None, to_lower: str) -> str | None:
    """The line for a failed allocation on the CPU, for which torch has no exception of its own."""
    while error is not None:
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            asked = re.search(r"allocate (\d+) bytes", str(error))
            what = f"{int(asked[1]) / 1e9:,.1f} GB more" if asked else "more"
            return f"out of memory: there is no room for {what}; lower {to_lower}"
        error = error.__cause__ or error.__context__
    return None


def _listen(stop: Stop) -> None:
    """Pass on the signals that the starting process writes into our stdin, as numbers.

    Leave when it is gone: its end closes with it.
    """
    while number := os.read(0, 1):
        stop.ask(number[0])
    os._exit(1)


def _run(
    config: Config, folder: Path | None, resumed: bool, start: Start, asked: Asked | None
) -> None:
    """Join the others, check that all start from the same, and do one run, or the compared ones,
    or evaluate one.

    ``folder``: that of the run, on rank 0 and on all where it is ``resumed``.
    """
    # on any error torch logs the whole schedule, page after page; the error itself says more
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    torch.set_num_threads(config.threads or default_threads(config, start.local_world_size))
    device = _device(config.device, start.local_rank)
    place = Place(start.rank, start.world_size, device, start.local_world_size)
    data = task_of(config).load(config)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    screen = report.console(to_stderr=config.json, quiet=start.rank != 0)
    dist.init_process_group(
        "gloo",
        init_method=start.init_method,
        rank=start.rank,
        world_size=start.world_size,
        timeout=datetime.timedelta(seconds=config.pipeline.first_deadline),
    )
    _agree(config, data)
    if asked is not None:
        assert folder is not None
        own_home = home.visit(config, folder, start.rank, start.local_rank)
    elif resumed:
        assert folder is not None
        own_home = home.resume(config, folder, start.rank, start.local_rank)
    else:
        own_home = home.begin(config, folder, start.rank, start.local_rank)
    try:
        if asked is not None:
            document = score(config, data, place, own_home, asked, screen)
        elif config.compare:
            document = _compare(config, data, place, own_home, screen, start.stop)
        else:
            document = train(config, data, place, own_home, screen, start.stop)
        if config.json and start.rank == 0:
            print(json.dumps(document, indent=2))
        dist.destroy_process_group()
    except Stopped:
        dist.destroy_process_group()
        raise


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


def _agree(config: Config, data: Data) -> None:
    """Refuse to train where another rank has other settings, data or plugins than rank 0."""
    shared = dataclasses.replace(
        config,
        device="cpu",
        data=dataclasses.replace(config.data, path=None, validation=DataConfig.validation),
        checkpoint=CheckpointConfig(config.checkpoint.every),
        ref=RefConfig(),
        plugin=(),
    )
    digests = {
        "settings": hashlib.sha256(to_toml(shared).encode()).digest(),
        task_of(config).noun: bytes.fromhex(data.sha256),
        "plugins": plugins.digest(config.plugin),
    }
    own = torch.frombuffer(bytearray(b"".join(digests.values())), dtype=torch.uint8).view(-1, 32)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    for rank, other in enumerate(every):
        for part, what in enumerate(digests):
            if not torch.equal(other[part], every[0][part]):
                raise ConfigError(f"rank {rank} has other {what} than rank 0; give all the same")


def _compare(
    config: Config, data: Data, place: Place, own_home: Home, screen: Console, stop: Stop
) -> dict[str, Any]:
    """The run as configured, then uncompressed and in bf16, each in a folder of its own."""
    runs: dict[str, dict[str, Any]] = {}
    parts = config.checkpoint.dir
    for name, plan in {"compressed": config.plan, **COMPARED}.items():
        screen.rule(f"{name}: forward {plan.forward}, backward {plan.backward}")
        one = dataclasses.replace(
            config,
            plan=plan,
            compare=False,
            checkpoint=CheckpointConfig(
                config.checkpoint.every, None if parts is None else str(Path(parts) / name)
            ),
        )
        own = home.sub_folder(own_home, name, one, place.rank)
        runs[name] = train(one, data, place, own, screen, stop)
    document = {"runs": runs, "comparison": comparison.compared(runs)}
    screen.rule()
    screen.print(comparison.table(runs))
    screen.print(comparison.sentence(document["comparison"], runs), soft_wrap=True)
    if place.rank == 0:
        metrics.write_json(own_home.folder / "comparison.json", document["comparison"])
    return document
