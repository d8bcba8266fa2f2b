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
from typing import Any

from thinwire.train import check
from thinwire.train import config as configuration
from thinwire.train.asked import AS_TRAINED, OFF, Asked
from thinwire.train.config import Config
from thinwire.train.stop import SIGNALS, at_once_line, heeded, phase_in, resume_command, say
from thinwire.train.streams import lasting

_GRACE_S = 8.0  # a dead peer is seen in under a second, a silent one takes its deadline
_STOP_S = 3.0
_POLL_S = 0.05
_TAIL_LINES = 40


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


@lasting()
def train(config: Config, resume_from: Path | None = None) -> int:
    """Check the configuration, run it, and return the exit code.

    ``resume_from``: the folder of the run to go on with, None for a new one.
    """
    if under_torchrun():
        from thinwire.train.worker import run_under_torchrun

        return run_under_torchrun(config, resume_from)
    config = check.resolved(config)
    check.check_out(config)
    check.check_plan(config)
    from thinwire.train import build, home, report
    from thinwire.train.tasks import task_of

    config = build.planned(config, task_of(config).load(config), report.note(config))
    if resume_from is not None:
        home.read(resume_from)
    folder = resume_from or home.create(config)
    return _launched(config, folder, resume_from is not None, None)


@lasting()
def evaluate(config: Config, folder: Path, asked: Asked) -> int:
    """Evaluate the run in ``folder`` as ``asked``; returns the exit code."""
    if under_torchrun():
        from thinwire.train.worker import run_under_torchrun

        return run_under_torchrun(config, folder, asked)
    config = check.resolved(config)
    check.check_plan(config)
    check.check_codecs(codec for codec in asked.codecs if codec not in (OFF, AS_TRAINED))
    return _launched(config, folder, True, dataclasses.asdict(asked))


def _launched(config: Config, folder: Path, resumed: bool, asked: dict[str, Any] | None) -> int:
    with tempfile.TemporaryDirectory(prefix="thinwire-") as name, _Signals(Path(name)) as signals:
        try:
            return _run_workers(config, folder, resumed, asked, Path(name), signals)
        except _EndedAtOnce as ended:
            say(at_once_line(ended.number, phase_in(Path(name)), resume_command))
            return 128 + ended.number


@dataclass
class _Worker:
    """A worker process and how it ended."""

    rank: int
    process: subprocess.Popen[bytes]
    ended_at: float | None = None
    stopped: bool = False  # by us, because another had failed

    @property
    def failed(self) -> bool:
        ended_well = self.process.returncode == 0 or self.ended_as_asked or self.stopped
        return self.ended_at is not None and not ended_well

    @property
    def ended_as_asked(self) -> bool:
        """Whether it ended since the run was asked to stop, with a checkpoint saved."""
        return self.ended_at is not None and self.process.returncode - 128 in SIGNALS


def _run_workers(
    config: Config,
    folder: Path,
    resumed: bool,
    asked: dict[str, Any] | None,
    scratch: Path,
    signals: _Signals,
) -> int:
    job = {
        "settings": {entry.name: entry.of(config) for entry in configuration.settings()},
        "folder": str(folder),
        "resumed": resumed,
        "asked": asked,
        "world_size": config.nproc,
    }
    (scratch / "job.json").write_text(json.dumps(job), encoding="utf-8")
    workers: list[_Worker] = []
    try:
        with _signals_held():
            for rank in range(config.nproc or 1):  # one by one: a failure leaves earlier to stop
                workers += [_Worker(rank, _start(rank, scratch))]
        _wait(workers, signals)
    finally:
        _stop(workers)
        _show_cursor()
    failed = [worker for worker in workers if worker.failed]
    if failed:
        return _explain(failed, scratch)
    as_asked = [worker.process.returncode for worker in workers if worker.ended_as_asked]
    if signals.number is not None and as_asked:
        return 128 + signals.number
    return max(as_asked, default=0)


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


class _EndedAtOnce(BaseException):
    """The run is to be ended where it stands, by the signal of this number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Signals:
    """What stops a run while workers do it: the first one in training asks them to.

    Any other raises ``_EndedAtOnce``, so that what was started is ended and cleared away.
    """

    def __init__(self, scratch: Path) -> None:
        self.number: int | None = None  # of the signal that asked
        self._scratch = scratch
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        self._previous = {number: signal.signal(number, self._take) for number in heeded()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        phase = phase_in(self._scratch)
        if self.number is not None or phase is None or phase[0] != "training":
            raise _EndedAtOnce(number)
        self.number = number


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Block what a terminal sends: processes started meanwhile never see it, ours comes later."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGHUP])
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


def _wait(workers: list[_Worker], signals: _Signals) -> None:
    """Return when all have ended, or some seconds after one has failed or ended as asked."""
    give_up_at: float | None = None
    asked = False
    while any(worker.ended_at is None for worker in workers):
        now = time.monotonic()
        if signals.number is not None and not asked:
            asked = True
            _ask_to_stop(workers[0], signals.number)
        for worker in workers:
            if worker.ended_at is None and worker.process.poll() is not None:
                worker.ended_at = now
        if give_up_at is None and any(w.failed or w.ended_as_asked for w in workers):
            give_up_at = now + _GRACE_S
        if give_up_at is not None and now >= give_up_at:
            return
        time.sleep(_POLL_S)


def _ask_to_stop(worker: _Worker, number: int) -> None:
    """Tell a worker of a signal; its result of the step tells the others."""
    say("thinwire: stopping after this step, which will be saved; once more to stop at once")
    assert worker.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has just ended
        worker.process.stdin.write(bytes([number]))
        worker.process.stdin.flush()


def _stop(workers: list[_Worker]) -> None:
    """End those that still run: by SIGTERM until they listen to their stdin, then by its end.

    And by SIGKILL if that doesn't help.
    """
    running = [worker for worker in workers if worker.process.poll() is None]
    for worker in running:
        worker.stopped = True
        worker.process.terminate()
        if worker.process.stdin is not None:
            worker.process.stdin.close()
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
    return run_launched(
        config,
        Path(job["folder"]),
        job["resumed"],
        job["asked"],
        scratch,
        rank,
        job["world_size"],
    )
