"""Starts a run: the processes of its stages on this machine, or under torchrun this one alone.

Outside torchrun the starting process checks everything that can be checked, starts the workers,
and stays to see them end. When one fails the others get some seconds to end by themselves, since
they usually learn of it; then they are stopped, and one line says what went wrong first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from thinwire.train import check
from thinwire.train import config as configuration
from thinwire.train.config import Config

_GRACE_S = 8.0  # a dead peer is seen in under a second, a silent one takes its deadline
_STOP_S = 3.0
_POLL_S = 0.05
_TAIL_LINES = 40


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


def train(config: Config) -> int:
    """Check the configuration, run it, and return the exit code."""
    if under_torchrun():
        from thinwire.train.worker import run_under_torchrun

        return run_under_torchrun(config)
    config = check.resolved(config)
    check.check_out(config)
    check.check_plan(config)
    from thinwire.train import data, metrics

    data.load(config.data, config.model.context)
    folder = metrics.create_folder(config)
    with _stopping_in_order(), tempfile.TemporaryDirectory(prefix="thinwire-") as scratch:
        return _run_workers(config, folder, Path(scratch))


@dataclass
class _Worker:
    """A worker process and how it ended."""

    rank: int
    process: subprocess.Popen[bytes]
    ended_at: float | None = None
    stopped: bool = False  # by us, because another had failed

    @property
    def failed(self) -> bool:
        return self.ended_at is not None and self.process.returncode != 0 and not self.stopped


def _run_workers(config: Config, folder: Path, scratch: Path) -> int:
    job = {"settings": _flat(config), "folder": str(folder), "world_size": config.nproc}
    (scratch / "job.json").write_text(json.dumps(job), encoding="utf-8")
    workers: list[_Worker] = []
    try:
        with _signals_held():
            for rank in range(config.nproc or 1):  # one by one: a failure leaves earlier to stop
                workers += [_Worker(rank, _start(rank, scratch))]
        _wait(workers)
    finally:
        _stop(workers)
        _show_cursor()
    failed = [worker for worker in workers if worker.failed]
    return _explain(failed, scratch) if failed else 0


def _flat(config: Config) -> dict[str, Any]:
    """All settings under their dotted names, as ``configuration.build`` takes them."""
    values: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            values.update({f"{name}.{inner}": v for inner, v in value.items()})
        else:
            values[name] = value
    return values


def _start(rank: int, scratch: Path) -> subprocess.Popen[bytes]:
    """Start a worker. Its stdin is a pipe that closes when this process is gone, however it went.

    Rank 0 speaks for all: the others' stderr is kept aside, to be shown if they fail.
    """
    command = [sys.executable, "-m", "thinwire", "_worker", str(scratch), str(rank)]
    if rank == 0:
        return subprocess.Popen(command, stdin=subprocess.PIPE)
    with (scratch / f"stderr-{rank}").open("wb") as kept:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=kept
        )


@contextlib.contextmanager
def _stopping_in_order() -> Iterator[None]:
    """Let an interrupt and SIGTERM raise, so that what was started is ended and cleared away."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _end_on_sigterm}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_on_sigterm(number: int, frame: FrameType | None) -> NoReturn:
    print("thinwire: stopped by SIGTERM", file=sys.stderr)
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Block interrupts: processes started meanwhile never see them, ours come afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _show_cursor() -> None:
    """A worker that was ended has left the terminal without one."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write("\x1b[?25h")
            stream.flush()


def _wait(workers: list[_Worker]) -> None:
    """Return when all have ended, or some seconds after one has failed."""
    give_up_at: float | None = None
    while any(worker.ended_at is None for worker in workers):
        now = time.monotonic()
        for worker in workers:
            if worker.ended_at is None and worker.process.poll() is not None:
                worker.ended_at = now
        if give_up_at is None and any(worker.failed for worker in workers):
            give_up_at = now + _GRACE_S
        if give_up_at is not None and now >= give_up_at:
            return
        time.sleep(_POLL_S)


def _stop(workers: list[_Worker]) -> None:
    """End those that still run: SIGTERM, and SIGKILL if that doesn't help."""
    running = [worker for worker in workers if worker.process.poll() is None]
    for worker in running:
        worker.stopped = True
        worker.process.terminate()
    for worker in running:
        try:
            worker.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
    for worker in workers:
        if worker.process.stdin is not None:
            worker.process.stdin.close()


def _explain(failed: list[_Worker], scratch: Path) -> int:
    """Print one line on what failed first; returns the exit code.

    A worker that lost its link is a consequence where another one has a reason of its own.
    """
    reasons = {worker.rank: _reason(worker, scratch) for worker in failed}
    first = min(
        failed, key=lambda w: (reasons[w.rank]["consequence"], reasons[w.rank]["time"], w.rank)
    )
    reason = reasons[first.rank]
    if not reason["expected"]:
        kept = scratch / f"stderr-{first.rank}"
        if kept.exists():
            tail = kept.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
            print("\n".join(tail), file=sys.stderr)
    print(f"thinwire: error: {reason['message']}", file=sys.stderr)
    return int(reason["code"])


def _reason(worker: _Worker, scratch: Path) -> dict[str, Any]:
    """What the worker wrote on its failure; if it couldn't, what its exit status tells."""
    written = scratch / f"error-{worker.rank}.json"
    if written.exists():
        reason: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
        return reason
    code = worker.process.returncode
    how = f"exited with code {code}"
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    return {
        "message": f"rank {worker.rank} {how}",
        "code": 1,
        "expected": False,
        "consequence": False,
        "time": time.time(),
    }


def worker_main(arguments: list[str]) -> int:
    """``thinwire _worker SCRATCH RANK``, as ``_start`` calls it."""
    from thinwire.train.worker import run_launched

    scratch, rank = Path(arguments[0]), int(arguments[1])
    job = json.loads((scratch / "job.json").read_text(encoding="utf-8"))
    config = configuration.build(job["settings"])
    return run_launched(config, Path(job["folder"]), scratch, rank, job["world_size"])
