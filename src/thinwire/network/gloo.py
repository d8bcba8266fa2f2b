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
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from thinwire.network.transport import Handle, Message, Transport, TransportError

_LENGTH = struct.Struct("<Q")
#: gloo announces each message with a header of 48 bytes, and puts another before its data. Each
#: receive sends one back, when it is posted.
_GLOO_HEADERS = 2 * 48
#: The least that gloo can wait for; it takes 0 ms for "without end".
_LEAST_SECONDS = 0.001
#: For ranks to find each other.
_CONNECTING = timedelta(seconds=300)


class _GlooHandle(Handle):
    def __init__(
        self, source: int, channel: int, max_bytes: int, into: Message, group: dist.ProcessGroup
    ) -> None:
        super().__init__(source, channel, max_bytes)
        self.into = into
        with _explained(f"nothing can arrive from {source}"):
            self.work = group.recv([into.buffer[: _LENGTH.size + max_bytes]], source, channel)


class GlooTransport(Transport):
    """Messages over a gloo process group of our own; addresses are the ranks of ``ranks``.

    ``group``: a gloo process group to use; None makes one over ``ranks`` (default: all), a
    collective call on these. Raises ValueError where this rank is not one of them.
    """

    overhead_bytes = _LENGTH.size + _GLOO_HEADERS
    headroom = _LENGTH.size

    def __init__(
        self, group: dist.ProcessGroup | None = None, ranks: list[int] | None = None
    ) -> None:
        super().__init__()
        self._owned = group is None
        if group is None:
            if not dist.is_initialized():
                raise ValueError("GlooTransport needs torch.distributed.init_process_group first")
            group = _group_of(ranks)
        self._group = group
        self.address, self.size = group.rank(), group.size()
        self._pending: list[tuple[dist.Work, Message]] = []

    def post_receive(self, source: int, channel: int, max_bytes: int) -> Handle:
        return _GlooHandle(source, channel, max_bytes, self.room(max_bytes), self._group)

    def wait(self, handle: Handle, timeout: float) -> memoryview:
        assert isinstance(handle, _GlooHandle)
        with _explained(f"nothing arrived from {handle.source}", timeout):
            _wait(handle.work, timeout)
        view = handle.into.view
        (length,) = _LENGTH.unpack_from(view)
        if length > handle.max_bytes:
            raise TransportError(
                f"{length} bytes announced by {handle.source}, at most {handle.max_bytes} expected"
            )
        return view[_LENGTH.size : _LENGTH.size + length]

    def release(self, handle: Handle) -> None:
        assert isinstance(handle, _GlooHandle)
        self.recycle(handle.into)

    def _send(self, target: int, channel: int, message: Message) -> None:
        message.prepend(_LENGTH.pack(message.end - message.start))
        whole = message.buffer[message.start : message.end]
        # a work learns of its completion in wait alone, so buffers are kept until flush
        with _explained(f"a message to {target} could not be sent"):
            self._pending.append((self._group.send([whole], target, channel), message))

    def flush(self, timeout: float) -> None:
        super().flush(timeout)
        end = time.monotonic() + timeout
        for work, message in self._pending:
            with _explained("a message was not taken", timeout):
                _wait(work, end - time.monotonic())
            self.recycle(message)
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
            if not isinstance(self._group, dist.ProcessGroupGloo):
                dist.destroy_process_group(self._group)
            del self._group


def _group_of(ranks: list[int] | None) -> Any:
    """A gloo group of our own over ``ranks`` of the default one.

    Over some of them it is not torch's ``new_group``: that wants every rank to take part, or names
    the group by how many a rank is in already, which differs among ranks that are in others.
    """
    if ranks is None or len(ranks) == dist.get_world_size():
        return dist.new_group(backend="gloo")
    here = dist.get_rank()
    if here not in ranks:
        raise ValueError(f"rank {here} is not in the group of ranks {ranks}")
    store = distributed_c10d._get_default_store()
    name = f"thinwire/{'-'.join(map(str, ranks))}"
    number = store.add(f"{name}/{here}", 1)  # each member's own count: the same on all
    store = distributed_c10d.PrefixStore(f"{name}/{number}", store)
    return dist.ProcessGroupGloo(store, ranks.index(here), len(ranks), _CONNECTING)


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
