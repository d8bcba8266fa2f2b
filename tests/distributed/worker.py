"""The child's side of the worker pool: one function at a time, in a fresh process group."""

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PING = b"ping"
READY = b"ready"
RELEASE = b"release"


@dataclass(frozen=True)
class Call:
    """One rank's part of ``pool.run``."""

    module: str
    qualname: str  # inside the module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    rendezvous: Path  # a file that does not exist yet, the same on every rank
    timeout: float  # seconds, of operations on the default process group


@dataclass(frozen=True)
class RankError:
    """What ended the function on one rank, other than returning."""

    type_name: str  # the exception's class; "WorkerDied" or "Hang" where there was no exception
    message: str
    traceback: str
    seconds: float  # from entering the function


def serve(fd: int, parent: int, stacks: str) -> None:
    """Answer calls from the connection ``fd`` until it is closed or the process ``parent`` ends.

    On SIGUSR1 the stacks of all threads are written to the file ``stacks``.
    """
    os.set_inheritable(fd, False)  # what a test starts must not hold the connection open
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    with Path(stacks).open("w") as file, Connection(fd) as connection:
        faulthandler.register(signal.SIGUSR1, file=file)
        connection.send_bytes(READY)
        while (request := _receive(connection)) is not None:
            if request == PING:
                connection.send_bytes(READY)
            else:
                _answer(connection, request)


def _end_with(parent: int) -> None:
    """End this process and all that it started once ``parent`` is gone, whatever it is doing."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _receive(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes()
    except (EOFError, ConnectionResetError):
        return None


def _answer(connection: Connection, request: bytes) -> None:
    reply, failed = _execute(request)
    connection.send_bytes(reply)
    # A rank that failed drops its sockets at once, as a process that ends would; one that
    # succeeded keeps them until the pool has heard from all, so that no peer loses what it
    # was about to receive.
    if failed:
        _leave_group()
    _receive(connection)  # RELEASE
    if not failed:
        _leave_group()
    connection.send_bytes(READY)


def _execute(request: bytes) -> tuple[bytes, bool]:
    """Run the pickled ``Call``; return the pickled result, or ``RankError``, and whether it failed.

    Plain pickle rather than ``Connection.send``, for which torch would replace tensors by handles
    on shared memory.
    """
    start = time.monotonic()
    try:
        call: Call = pickle.loads(request)
        function: Any = importlib.import_module(call.module)
        for name in call.qualname.split("."):
            function = getattr(function, name)
        dist.init_process_group(
            "gloo",
            init_method=call.rendezvous.as_uri(),
            rank=call.rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=call.timeout),
        )
        torch.set_num_threads(1)
        torch.manual_seed(0)
        start = time.monotonic()
        return pickle.dumps(function(call.rank, call.world_size, *call.args, **call.kwargs)), False
    except BaseException as error:  # noqa: BLE001 - SystemExit and pytest.fail are answers too
        seconds = time.monotonic() - start
        text = traceback.format_exc()
        return pickle.dumps(RankError(type(error).__name__, str(error), text, seconds)), True


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # sockets and threads of groups that only a reference cycle still holds
