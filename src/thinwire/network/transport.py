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

Parts = Sequence[memoryview | bytes | bytearray]


class TransportError(RuntimeError):
    """A message could not be received: the deadline passed, or the peer is gone."""


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

    def __init__(self) -> None:
        self._sender: _SenderThread | None = None

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

    @abstractmethod
    def _send(self, target: int, channel: int, parts: Parts) -> None:
        """Hand one message over; its bytes are copied before this returns."""

    def send(
        self,
        target: int,
        channel: int,
        message: Parts | Callable[[], Parts],
        ready: Event | None = None,
    ) -> None:
        """Send the concatenation of ``message``'s parts; never blocks on the link.

        With ``ready``, a device event, a sender thread waits for it, then calls ``message`` for
        the parts (copies, checksums) and sends them, so that the calling thread goes on.
        """
        if ready is None and self._sender is None:
            self._send(target, channel, message() if callable(message) else message)
            return
        if self._sender is None:
            self._sender = _SenderThread(self._send)
        self._sender.put(target, channel, message, ready)

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

    def __init__(self, send: Callable[[int, int, Parts], None]) -> None:
        self._send = send
        self._queue: queue.Queue[Any] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="thinwire-sender", daemon=True)
        self._thread.start()

    def put(
        self,
        target: int,
        channel: int,
        message: Parts | Callable[[], Parts],
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
                self._send(target, channel, message() if callable(message) else message)
            except BaseException as error:  # noqa: BLE001  kept, and raised in the thread that sends next
                self._error = error
