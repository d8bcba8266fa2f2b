"""A pool of worker processes that import torch once and run many distributed tests."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.distributed.worker import PING, READY, RELEASE, Call, RankError

ROOT = Path(__file__).parents[2]

START_SECONDS = 90.0  # importing torch in four processes on two busy cores
SETTLE_SECONDS = 5.0  # for a peer to notice a failed rank, and for a group to be destroyed
# torch's own timeout comes first, so that a rank stuck in one of its operations says where.
GROUP_TIMEOUT_SHARE = 0.75


class WorkerError(Exception):
    """A distributed function failed; ``errors`` maps the ranks that did to how."""

    def __init__(self, function: str, errors: dict[int, RankError]) -> None:
        self.errors = errors
        parts = [f"{function} failed on rank {', '.join(map(str, sorted(errors)))}"]
        for rank, error in sorted(errors.items()):
            parts.append(f"--- rank {rank}: {error.type_name}: {error.message}\n{error.traceback}")
        super().__init__("\n".join(parts))


class Pool:
    """Worker processes, started when first needed and kept for later runs.

    The worker of rank 0 is the same in a run of two and in a run of four. Use as a context
    manager; leaving it ends every worker and all that the workers started.
    """

    def __init__(self) -> None:
        self._workers: dict[tuple[int, frozenset[tuple[str, str]]], _Worker] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="thinwire-pool-")
        self._number = count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()
        self._directory.cleanup()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, of the workers started so far with no environment of their own."""
        plain = {rank: worker for (rank, env), worker in self._workers.items() if not env}
        return [plain[rank].process.pid for rank in sorted(plain)]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        timeout: float = 60.0,
        env: Sequence[Mapping[str, str]] | None = None,
        raises: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(rank, world_size, *args, **kwargs)`` on every rank; results by rank.

        Each rank is a process of its own with one torch thread, seed 0 and a new gloo default
        process group. ``function`` is found by module and name, so it stands at a module's top
        level; arguments and results are pickled.

        Args:
            timeout: seconds for the whole run. Ranks that need longer are killed, and
                ``WorkerError`` shows where they stood.
            env: environment variables a rank, set before torch is imported there.
            raises: if false, a rank that raised or died gives a ``RankError`` as its result.

        Raises:
            WorkerError: a rank hung or, with ``raises``, failed in any way.
        """
        __tracebackhide__ = True
        if "<" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} is not at the top level of its module")
        workers = self._ready_workers(env or [{}] * world_size, world_size)
        try:
            self._send_calls(workers, function, args, kwargs, timeout)
            replies = _gather(workers, timeout, hurry=raises)
            errors = {rank: r for rank, r in replies.items() if isinstance(r, RankError)}
            hung = [rank for rank in range(world_size) if rank not in replies]
            for rank in hung:
                stacks = workers[rank].stacks()
                errors[rank] = RankError("Hang", "still running, killed", stacks, timeout)
                workers[rank].kill()
            _release(workers)
        except BaseException:  # such as the test's own timeout: these are in an unknown state
            for worker in workers:
                worker.kill()
            raise
        if hung or (raises and errors):
            raise WorkerError(f"{function.__module__}.{function.__qualname__}", errors)
        return [replies[rank] for rank in range(world_size)]

    def _send_calls(
        self,
        workers: Sequence["_Worker"],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> None:
        rendezvous = self._new_path("rendezvous")
        for rank, worker in enumerate(workers):
            call = Call(
                function.__module__,
                function.__qualname__,
                args,
                kwargs,
                rank,
                len(workers),
                rendezvous,
                timeout * GROUP_TIMEOUT_SHARE,
            )
            worker.connection.send_bytes(pickle.dumps(call))

    def _ready_workers(self, env: Sequence[Mapping[str, str]], world_size: int) -> list["_Worker"]:
        """The workers of ranks 0 … world_size - 1, alive and idle; missing ones start together."""
        if len(env) != world_size:
            raise ValueError(
                f"env has {len(env)} entries, expected one for each of {world_size} ranks"
            )
        keys = [(rank, frozenset(own.items())) for rank, own in enumerate(env)]
        for key in keys:
            if key in self._workers and not self._workers[key].answers_ping():
                self._workers.pop(key).kill()
        missing = [key for key in keys if key not in self._workers]
        for key in missing:
            self._workers[key] = _Worker(dict(key[1]), self._new_path("stacks"))
        for key in missing:
            worker = self._workers[key]
            if not worker.is_ready(START_SECONDS):
                worker.kill()
                raise RuntimeError(
                    f"the worker of rank {key[0]} did not start within {START_SECONDS:g} s "
                    f"(exit code {worker.process.returncode}); its stderr is in the captured output"
                )
        return [self._workers[key] for key in keys]

    def _new_path(self, kind: str) -> Path:
        return Path(self._directory.name, f"{kind}-{next(self._number)}")


class _Worker:
    """One child process and the parent's end of the connection to it."""

    def __init__(self, env: Mapping[str, str], stacks: Path) -> None:
        self._stacks = stacks
        self.connection, theirs = Pipe()
        code = (
            "from tests.distributed.worker import serve; "
            f"serve({theirs.fileno()}, {os.getpid()}, {str(stacks)!r})"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                # The parent's sys.path: both sides import the same modules under the same names.
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **env},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # its process group holds what it starts
            )

    def is_ready(self, timeout: float) -> bool:
        """Whether the worker says within ``timeout`` seconds that it awaits a call."""
        try:
            return self.connection.poll(timeout) and self.connection.recv_bytes() == READY
        except (EOFError, OSError):
            return False

    def answers_ping(self) -> bool:
        """Whether the worker is alive. A process that was sent SIGKILL never answers."""
        try:
            self.connection.send_bytes(PING)
        except OSError:
            return False
        return self.is_ready(SETTLE_SECONDS)

    def stacks(self) -> str:
        """Where the threads of a worker that does not answer stand."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)  # nothing says when faulthandler has finished
        return self._stacks.read_text()

    def kill(self) -> None:
        """End the worker and all that it started; harmless when it has ended already."""
        if self.connection.closed:
            return
        self.connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _gather(workers: Sequence[_Worker], timeout: float, hurry: bool) -> dict[int, Any]:
    """Replies by rank, without the ranks that gave none within ``timeout`` seconds.

    With ``hurry`` one failed rank leaves the others only a few seconds.
    """
    start = time.monotonic()
    deadline = start + timeout
    replies: dict[int, Any] = {}
    while len(replies) < len(workers):
        waiting = {
            worker.connection: rank for rank, worker in enumerate(workers) if rank not in replies
        }
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting[connection]  # type: ignore[index]
            reply = replies[rank] = _reply(workers[rank], start)
            if hurry and isinstance(reply, RankError):
                deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
    return replies


def _reply(worker: _Worker, start: float) -> Any:
    try:
        return pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        exit_code = worker.process.wait()
        return RankError("WorkerDied", f"exit code {exit_code}", "", time.monotonic() - start)


def _release(workers: Sequence[_Worker]) -> None:
    """Let the ranks leave their process group; one that cannot is killed, and replaced later."""
    alive = [worker for worker in workers if worker.process.poll() is None]
    for worker in alive:
        with suppress(OSError):  # it has just died
            worker.connection.send_bytes(RELEASE)
    for worker in alive:
        if not worker.is_ready(SETTLE_SECONDS):
            worker.kill()
