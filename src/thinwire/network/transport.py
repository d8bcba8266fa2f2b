"""The transport interface: bytes between numbered endpoints. Transports know nothing of tensors.

A message is addressed by (source, target, channel). Messages of one channel arrive in the order
sent; channels are independent. Each side of every message is announced by its receiver first
(``post_receive``), which is what lets a transfer run while the receiver computes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Parts = Sequence[memoryview | bytes | bytearray]


class TransportError(RuntimeError):
    """A message could not be received: the deadline passed, or the peer is gone."""


class Message:
    """Bytes ``start … end`` of a buffer, with room before them for the transport's own headers."""

    def __init__(self, capacity: int) -> None:
        self.buffer = torch.empty(capacity, dtype=torch.uint8)
        self.view = self.buffer.numpy().data
        self.start = self.end = 0

    def prepend(self, head: bytes) -> None:
        """Put ``head`` in front."""
        self.start -= len(head)
        self.view[self.start : self.start + len(head)] = head

    @property
    def data(self) -> memoryview:
        """The message's bytes."""
        return self.view[self.start : self.end]


class Event(Protocol):
    """A device event: the message's bytes are final once ``synchronize`` returns."""

    def synchronize(self) -> Any: ...


class Handle:
    """A posted receive."""

    def __init__(self, source: int, channel: int, max_bytes: int) -> None:
        self.source, self.channel, self.max_bytes = source, channel, max_bytes


class Transport(ABC):
    """Moves messages between endpoints ``0 … size - 1``; see the module's docstring.

    Not thread-safe: one thread posts, sends and waits (the transport's own sender thread aside).
    """

    #: This endpoint's number, and how many there are.
    address: int
    size: int
    #: Bytes that the transport itself adds to each message on the socket, sender to receiver.
    overhead_bytes: int = 0
    #: True where all endpoints live in this process.
    in_process: bool = False
    #: Bytes before a ``Message`` that the transport needs for itself.
    headroom: int = 0

    def __init__(self) -> None:
        self._sender: _SenderThread | None = None
        self._free: dict[int, list[Message]] = {}

    def endpoint(self, address: int) -> Transport:
        """The transport of one endpoint; itself unless all endpoints live in this process."""
        if address != self.address:
            raise ValueError(f"endpoint {address} is not in this process ({self.address} is)")
        return self

    @abstractmethod
    def post_receive(self, source: int, channel: int, max_bytes: int) -> Handle:
        """Announce that a message of at most ``max_bytes`` is welcome; returns at once."""

    @abstractmethod
    def wait(self, handle: Handle, timeout: float) -> memoryview:
        """The message's bytes, writable; blocks for at most ``timeout`` seconds.

        Raises TransportError if it does not arrive in time, is larger than announced, or its
        source is gone.
        """

    def release(self, handle: Handle) -> None:  # noqa: B027  not all transports reuse buffers
        """The bytes that ``wait`` gave for ``handle`` are no longer needed."""

    def room(self, nbytes: int) -> Message:
        """A buffer for a message of up to ``nbytes``, to be filled from ``headroom`` on, and sent.

        Buffers are reused once their messages have left; hence few sizes, an eighth apart.
        """
        capacity = self.headroom + nbytes
        step = 1 << max(6, capacity.bit_length() - 4)
        capacity = -(-capacity // step) * step
        try:
            return self._free[capacity].pop()
        except (KeyError, IndexError):
            return Message(capacity)

    def recycle(self, message: Message) -> None:
        """The message has left; its buffer is free."""
        self._free.setdefault(message.buffer.numel(), []).append(message)

    @abstractmethod
    def _send(self, target: int, channel: int, message: Message) -> None:
        """Hand one message over, and ``recycle`` it when its bytes are no longer needed."""

    def send(
        self,
        target: int,
        channel: int,
        message: Message | Parts | Callable[[], Parts],
        ready: Event | None = None,
    ) -> None:
        """Send ``message``, or the concatenation of its parts; never blocks on the link.

        A ``Message`` comes from ``room`` and belongs to the transport from here on. With ``ready``,
        a device event, a sender thread waits for it, then calls ``message`` for the parts (copies,
        checksums) and sends them, so that the calling thread goes on.
        """
        if ready is None and self._sender is None:
            self._send_any(target, channel, message)
            return
        if self._sender is None:
            self._sender = _SenderThread(self._send_any)
        self._sender.put(target, channel, message, ready)

    def _send_any(
        self, target: int, channel: int, message: Message | Parts | Callable[[], Parts]
    ) -> None:
        if not isinstance(message, Message):
            message = self._joined(message() if callable(message) else message)
        self._send(target, channel, message)

    def _joined(self, parts: Parts) -> Message:
        sizes = [memoryview(part).nbytes for part in parts]
        message = self.room(sum(sizes))
        message.start = message.end = self.headroom
        for part, size in zip(parts, sizes, strict=True):
            message.view[message.end : message.end + size] = part
            message.end += size
        return message

    def drain(self, timeout: float) -> None:
        """Give messages under way up to ``timeout`` seconds, before this process gives up."""
        if self._sender is not None:
            with contextlib.suppress(TransportError):
                self._sender.join(timeout)

    def flush(self, timeout: float) -> None:
        """Wait until all sends have been taken and free their buffers.

        Call it once the other ends are known to have received everything. Raises TransportError
        if a message was not sent or taken within ``timeout`` seconds.
        """
        if self._sender is not None:
            self._sender.join(timeout)

    def close(self) -> None:
        """End the sender thread, dropping what it still holds, and release resources."""
        if self._sender is not None:
            self._sender.stop()
            self._sender = None


class _SenderThread:
    """Sends in order, each message once its device event has passed."""

    def __init__(self, send: Callable[[int, int, Any], None]) -> None:
        self._send = send
        self._queue: queue.Queue[Any] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="thinwire-sender", daemon=True)
        self._thread.start()

    def put(
        self,
        target: int,
        channel: int,
        message: Message | Parts | Callable[[], Parts],
        ready: Event | None,
    ) -> None:
        self._raise()
        self._queue.put((target, channel, message, ready))

    def join(self, timeout: float) -> None:
        passed = threading.Event()
        self._queue.put(passed)
        if not passed.wait(timeout):
            raise TransportError(f"messages were not sent within {timeout:g} s")
        self._raise()

    def stop(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _raise(self) -> None:
        # once: what is sent after that, such as the reason for giving up, still goes out
        error, self._error = self._error, None
        if error is not None:
            raise TransportError(f"a message could not be sent: {error}") from error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            target, channel, message, ready = item
            try:
                if ready is not None:
                    ready.synchronize()
                self._send(target, channel, message)
            except BaseException as error:  # noqa: BLE001  kept, and raised in the thread that sends next
                self._error = error
