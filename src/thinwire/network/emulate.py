"""An emulated slow link over a fast transport, on one machine.

Every endpoint is a host of its own with one bucket a direction: all that it sends shares its
upstream rate, all that it receives its downstream rate. A message sent at time t starts when the
sender's upstream is free, takes size / rate, and arrives ``latency`` later; a receiver that was
not ready delays the start, as gloo does. The rate is that of the wire, as ``tc`` shapes it: each
message bears the Ethernet, IP and TCP headers of its packets, so 95.6 % of it is left for data.
benchmarks/link_emulation.py compares this with a shaped link.

No thread sleeps on a link's behalf: the sender stamps the message with its place in the upstream
queue, and the receiver's ``wait``, which would block for a real link just as long, returns at the
time of arrival. Stamps are of the monotonic clock, which only processes of one machine share.
"""

from __future__ import annotations

import bisect
import math
import struct
import time

from thinwire.network.transport import Handle, Message, Transport, TransportError

_STAMP = struct.Struct("<q")  # start of the transmission, ns of the monotonic clock

# TCP over IPv4 on Ethernet, with timestamps: what a full packet of 1,500 bytes carries, and the
# headers (14 + 20 + 32) around it that a shaped link counts. Acknowledgements are left out.
_SEGMENT = 1448
_SEGMENT_HEADERS = 66


class EmulatedTransport(Transport):
    """``inner`` with each host's rate (bit/s, both ways) and a one-way latency (seconds)."""

    def __init__(self, inner: Transport, rate: float, latency: float = 0.0) -> None:
        super().__init__()
        if not 0 < rate < math.inf or not 0 <= latency < math.inf:
            raise ValueError(f"a link of {rate} bit/s and {latency} s cannot be emulated")
        self.inner = inner
        self.rate, self.latency = rate, latency
        self.address, self.size = inner.address, inner.size
        self.in_process = inner.in_process
        self.overhead_bytes = inner.overhead_bytes + _STAMP.size
        self.headroom = inner.headroom + _STAMP.size
        self._upstream_free = 0
        self._upstream_busy = 0
        self._downstream = _Intervals()
        self._posted: dict[Handle, int] = {}
        self._endpoints = {self.address: self}

    def endpoint(self, address: int) -> EmulatedTransport:
        if address not in self._endpoints:
            other = EmulatedTransport(self.inner.endpoint(address), self.rate, self.latency)
            other._endpoints = self._endpoints
            self._endpoints[address] = other
        return self._endpoints[address]

    @property
    def busy_seconds(self) -> float:
        """Time for which this host's upstream has been sending, so far."""
        return self._upstream_busy * 1e-9

    def post_receive(self, source: int, channel: int, max_bytes: int) -> Handle:
        handle = self.inner.post_receive(source, channel, max_bytes + _STAMP.size)
        self._posted[handle] = time.monotonic_ns()
        return handle

    def wait(self, handle: Handle, timeout: float) -> memoryview:
        limit = time.monotonic_ns() + int(timeout * 1e9)
        message = self.inner.wait(handle, timeout)
        (start,) = _STAMP.unpack_from(message)
        latency = int(self.latency * 1e9)
        start = max(start, self._posted.pop(handle) + latency) + latency
        arrival = self._downstream.add(start, self._duration(len(message) - _STAMP.size))
        if arrival > limit:
            time.sleep(max(limit - time.monotonic_ns(), 0) * 1e-9)
            raise TransportError(
                f"nothing arrived from {handle.source} within {timeout:g} s (emulated link)"
            )
        while (left := arrival - time.monotonic_ns()) > 0:
            time.sleep(left * 1e-9)
        return message[_STAMP.size :]

    def _duration(self, nbytes: int) -> int:
        """Nanoseconds on the wire of a message, what the inner transport adds, and headers."""
        nbytes += self.inner.overhead_bytes
        nbytes += -(-nbytes // _SEGMENT) * _SEGMENT_HEADERS
        return int(nbytes * 8e9 / self.rate)

    def release(self, handle: Handle) -> None:
        self.inner.release(handle)

    def room(self, nbytes: int) -> Message:
        return self.inner.room(nbytes + _STAMP.size)

    def _send(self, target: int, channel: int, message: Message) -> None:
        took = self._duration(message.end - message.start)
        start = max(time.monotonic_ns(), self._upstream_free)
        self._upstream_free = start + took
        self._upstream_busy += took
        message.prepend(_STAMP.pack(start))
        self.inner.send(target, channel, message)

    def flush(self, timeout: float) -> None:
        super().flush(timeout)
        self.inner.flush(timeout)

    def drain(self, timeout: float) -> None:
        super().drain(timeout)
        self.inner.drain(timeout)

    def close(self) -> None:
        super().close()
        self.inner.close()


class _Intervals:
    """When a host's downstream is taken; messages are told in the order in which they are read."""

    _KEPT = 256

    def __init__(self) -> None:
        # of intervals that neither overlap nor lie out of order
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, took: int) -> int:
        """Place ``took`` ns at or after ``start`` where nothing else is; returns its end."""
        starts, ends = self._starts, self._ends
        k = bisect.bisect_right(ends, start)
        while k < len(starts) and starts[k] < start + took:
            start = ends[k]
            k += 1
        starts.insert(k, start)
        ends.insert(k, start + took)
        del starts[: -self._KEPT], ends[: -self._KEPT]
        return start + took
