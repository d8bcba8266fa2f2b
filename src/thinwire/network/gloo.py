"""The ``gloo`` transport: torch's CPU backend, for trusted or tunnelled networks.

gloo moves nothing until the receive is posted, says nothing of a message's length, and aborts the
process on one larger than its buffer. Each message therefore carries its length in 8 bytes, and
senders keep to the announced bound.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.network.transport import Handle, Parts, Transport, TransportError

_LENGTH = struct.Struct("<Q")
#: gloo's header before the data of each message. Where the receive was not posted in time the
#: sender spends another one to announce itself; each receive sends one back when it is posted.
_GLOO_HEADER = 48


class _GlooHandle(Handle):
    def __init__(self, source: int, channel: int, max_bytes: int, group: dist.ProcessGroup) -> None:
        super().__init__(source, channel, max_bytes)
        self.buffer = torch.empty(_LENGTH.size + max_bytes, dtype=torch.uint8)
        self.work = group.recv([self.buffer], source, channel)


class GlooTransport(Transport):
    """Messages over a gloo process group of our own; addresses are the ranks of ``ranks``.

    ``group``: a gloo process group to use; None makes one over ``ranks`` (default: all), a
    collective call on every rank of the default group.
    """

    overhead_bytes = _LENGTH.size + _GLOO_HEADER

    def __init__(
        self, group: dist.ProcessGroup | None = None, ranks: list[int] | None = None
    ) -> None:
        super().__init__()
        if group is None:
            if not dist.is_initialized():
                raise ValueError("GlooTransport needs torch.distributed.init_process_group first")
            group = dist.new_group(ranks=ranks, backend="gloo")
        self._group = group
        self.address, self.size = group.rank(), group.size()
        self._pending: list[tuple[dist.Work, Tensor]] = []

    def post_receive(self, source: int, channel: int, max_bytes: int) -> Handle:
        return _GlooHandle(source, channel, max_bytes, self._group)

    def wait(self, handle: Handle, timeout: float) -> memoryview:
        assert isinstance(handle, _GlooHandle)
        _wait(handle.work, timeout, f"nothing arrived from {handle.source}")
        view = handle.buffer.numpy().data
        (length,) = _LENGTH.unpack_from(view)
        if length > handle.max_bytes:
            raise TransportError(
                f"{length} bytes announced by {handle.source}, at most {handle.max_bytes} expected"
            )
        return view[_LENGTH.size : _LENGTH.size + length]

    def _send(self, target: int, channel: int, parts: Parts) -> None:
        length = sum(memoryview(p).nbytes for p in parts)
        buffer = torch.empty(_LENGTH.size + length, dtype=torch.uint8)
        view = buffer.numpy().data
        view[: _LENGTH.size] = _LENGTH.pack(length)
        at = _LENGTH.size
        for part in parts:
            end = at + memoryview(part).nbytes
            view[at:end] = part
            at = end
        # a work learns of its completion in wait alone, so buffers are kept until flush
        self._pending.append((self._group.send([buffer], target, channel), buffer))

    def flush(self, timeout: float) -> None:
        super().flush(timeout)
        end = time.monotonic() + timeout
        for work, _ in self._pending:
            _wait(work, max(end - time.monotonic(), 0.001), "a message was not taken")
        self._pending.clear()

    def drain(self, timeout: float) -> None:
        # a wait that times out would close the connection on messages still under way
        pending, self._pending = self._pending, []
        thread = threading.Thread(target=_await_all, args=(pending,), daemon=True)
        thread.start()
        thread.join(timeout)


def _await_all(pending: list[tuple[dist.Work, Tensor]]) -> None:
    for work, _ in pending:
        with contextlib.suppress(RuntimeError):
            work.wait()


def _wait(work: dist.Work, timeout: float, what: str) -> None:
    try:
        work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        text = str(error).strip().splitlines()[0]
        late = "timed out" in text.lower()
        why = f"within {timeout:g} s" if late else f"(the connection is gone: {text})"
        raise TransportError(f"{what} {why}") from error
