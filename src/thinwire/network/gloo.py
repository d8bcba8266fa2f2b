"""The ``gloo`` transport: torch's CPU backend, for trusted or tunnelled networks.

gloo moves nothing until the receive is posted, says nothing of a message's length, and aborts the
process on one larger than its buffer. Each message therefore carries its length in 8 bytes, and
senders keep to the announced bound.
"""

from __future__ import annotations

import contextlib
import re
import struct
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.network.transport import Handle, Parts, Transport, TransportError

_LENGTH = struct.Struct("<Q")
#: gloo announces each message with a header of 48 bytes, and puts another before its data. Each
#: receive sends one back, when it is posted.
_GLOO_HEADERS = 2 * 48
#: The least that gloo can wait for; it takes 0 ms for "without end".
_LEAST_SECONDS = 0.001


class _GlooHandle(Handle):
    def __init__(self, source: int, channel: int, max_bytes: int, group: dist.ProcessGroup) -> None:
        super().__init__(source, channel, max_bytes)
        self.buffer = torch.empty(_LENGTH.size + max_bytes, dtype=torch.uint8)
        with _explained(f"nothing can arrive from {source}"):
            self.work = group.recv([self.buffer], source, channel)


class GlooTransport(Transport):
    """Messages over a gloo process group of our own; addresses are the ranks of ``ranks``.

    ``group``: a gloo process group to use; None makes one over ``ranks`` (default: all), a
    collective call on every rank of the default group.
    """

    overhead_bytes = _LENGTH.size + _GLOO_HEADERS

    def __init__(
        self, group: dist.ProcessGroup | None = None, ranks: list[int] | None = None
    ) -> None:
        super().__init__()
        self._owned = group is None
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
        with _explained(f"nothing arrived from {handle.source}", timeout):
            _wait(handle.work, timeout)
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
        with _explained(f"a message to {target} could not be sent"):
            self._pending.append((self._group.send([buffer], target, channel), buffer))

    def flush(self, timeout: float) -> None:
        super().flush(timeout)
        end = time.monotonic() + timeout
        for work, _ in self._pending:
            with _explained("a message was not taken", timeout):
                _wait(work, end - time.monotonic())
        self._pending.clear()

    def drain(self, timeout: float) -> None:
        super().drain(timeout)
        # gloo's own thread sends what has been announced. A wait that times out would close the
        # connection, and a thread that waits on may abort the process when Python ends.
        time.sleep(timeout)

    def close(self) -> None:
        super().close()
        if self._owned:
            self._owned = False
            self._pending.clear()
            # its connections and threads; receives that are still posted go with it
            dist.destroy_process_group(self._group)


def _wait(work: dist.Work, timeout: float) -> None:
    work.wait(timedelta(seconds=max(timeout, _LEAST_SECONDS)))


@contextlib.contextmanager
def _explained(what: str, timeout: float = 0.0) -> Iterator[None]:
    """Turn gloo's RuntimeError inside into a TransportError that begins with ``what``."""
    try:
        yield
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        # without the place in gloo's source, and its advice
        text = re.sub(r"^\[[^\]]*\] ", "", lines[0] if lines else "").split(". This is")[0]
        late = "timed out" in text.lower()
        why = f"within {timeout:g} s" if late else f"(the connection is gone: {text})"
        raise TransportError(f"{what} {why}") from error
