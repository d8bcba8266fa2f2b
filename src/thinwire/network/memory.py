"""The ``memory`` transport: all endpoints in one process, for tests and studies."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque

from thinwire.network.transport import Handle, Parts, Transport, TransportError


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
        return Handle(source, channel, max_bytes)

    def wait(self, handle: Handle, timeout: float) -> memoryview:
        message = self._hub.get((handle.source, self.address, handle.channel), timeout)
        if message is None:
            raise TransportError(f"nothing arrived from {handle.source} within {timeout:g} s")
        if len(message) > handle.max_bytes:
            raise TransportError(
                f"{len(message)} bytes arrived from {handle.source}, "
                f"at most {handle.max_bytes} were announced"
            )
        return memoryview(message)

    def _send(self, target: int, channel: int, parts: Parts) -> None:
        self._hub.put((self.address, target, channel), bytearray().join(parts))


class _Hub:
    """The mail boxes of one process."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int, int], deque[bytearray]] = defaultdict(deque)
        self._changed = threading.Condition()

    def put(self, address: tuple[int, int, int], message: bytearray) -> None:
        with self._changed:
            self._boxes[address].append(message)
            self._changed.notify_all()

    def get(self, address: tuple[int, int, int], timeout: float) -> bytearray | None:
        end = time.monotonic() + timeout
        with self._changed:
            while not self._boxes[address]:
                left = end - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None
            return self._boxes[address].popleft()
