"""The ``memory`` transport: all endpoints in one process, for tests and studies."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict

from thinwire.network.transport import Handle, Message, Transport, TransportError


class MemoryTransport(Transport):
    """Endpoint 0 of ``size`` endpoints that share this process; ``endpoint(i)`` gives the others.

    Safe for one thread an endpoint.
    """

    in_process = True

    def __init__(self, size: int = 1 << 16) -> None:
        super().__init__()
        self.address, self.size = 0, size
        self._hub = _Hub()
        self._endpoints: dict[int, MemoryTransport] = {0: self}

    def endpoint(self, address: int) -> MemoryTransport:
        if not 0 <= address < self.size:
            raise ValueError(f"endpoint {address} is not within 0 … {self.size - 1}")
        if address not in self._endpoints:
            other = MemoryTransport(self.size)
            other.address = address
            other._hub, other._endpoints = self._hub, self._endpoints
            self._endpoints[address] = other
        return self._endpoints[address]

    def post_receive(self, source: int, channel: int, max_bytes: int) -> Handle:
        box = self._hub.box(source, self.address, channel)
        return _MemoryHandle(source, channel, max_bytes, box, next(box.posted))

    def wait(self, handle: Handle, timeout: float) -> memoryview:
        assert isinstance(handle, _MemoryHandle)
        message = self._hub.take(handle.box, handle.number, timeout)
        if message is None:
            raise TransportError(f"nothing arrived from {handle.source} within {timeout:g} s")
        if len(message) > handle.max_bytes:
            raise TransportError(
                f"{len(message)} bytes arrived from {handle.source}, "
                f"at most {handle.max_bytes} were announced"
            )
        return memoryview(message)

    def _send(self, target: int, channel: int, message: Message) -> None:
        self._hub.put(self._hub.box(self.address, target, channel), bytearray(message.data))
        self.recycle(message)


class _Box:
    """The messages of one channel that have not been taken: the n-th is for the n-th receive."""

    def __init__(self) -> None:
        self.sent, self.posted = itertools.count(), itertools.count()
        self.messages: dict[int, bytearray] = {}


class _MemoryHandle(Handle):
    def __init__(self, source: int, channel: int, max_bytes: int, box: _Box, number: int) -> None:
        super().__init__(source, channel, max_bytes)
        self.box, self.number = box, number


class _Hub:
    """The mail boxes of one process."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int, int], _Box] = defaultdict(_Box)
        self._changed = threading.Condition()

    def box(self, source: int, target: int, channel: int) -> _Box:
        with self._changed:
            return self._boxes[source, target, channel]

    def put(self, box: _Box, message: bytearray) -> None:
        with self._changed:
            box.messages[next(box.sent)] = message
            self._changed.notify_all()

    def take(self, box: _Box, number: int, timeout: float) -> bytearray | None:
        with self._changed:
            if self._changed.wait_for(lambda: number in box.messages, timeout):
                return box.messages.pop(number)
        return None
