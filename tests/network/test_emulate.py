"""The emulated link: its rates and latencies, in virtual time wherever that can be."""

import math
import time

import pytest

from tests.network.endpoints import emulated, gloo, memory
from thinwire.network import (
    EmulatedTransport,
    MemoryTransport,
    TransportError,
    emulate,
)

RATE, LATENCY = 20e6, 5e-3


@pytest.mark.parametrize(
    ("rate", "latency"), [(0, 0), (-1, 0), (math.nan, 0), (math.inf, 0), (1, -1), (1, math.inf)]
)
def test_a_link_that_cannot_be_is_refused(rate, latency):
    with pytest.raises(ValueError, match="cannot be emulated"):
        EmulatedTransport(MemoryTransport(), rate, latency)


class Clock:
    """Stands in for the ``time`` module: sleeping is what makes time pass."""

    def __init__(self) -> None:
        self.now = 1_000_000_000
        self.slept = 0

    def monotonic_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.now += max(math.ceil(seconds * 1e9), 1)

    @property
    def seconds(self) -> float:
        return self.now * 1e-9 - 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(emulate, "time", fake)
    return fake


def seconds_of(nbytes: int, rate: float = RATE) -> float:
    """On a wire: packets of 1448 bytes, with 66 bytes of headers each."""
    return (nbytes + 66 * math.ceil(nbytes / 1448)) * 8 / rate


near = pytest.approx


def test_a_message_takes_its_size_by_the_rate_and_then_the_latency(clock):
    a, b = emulated(memory(), RATE, LATENCY)
    handle = b.post_receive(0, 1, 100_000)
    clock.now += 100_000_000  # the receive was posted long before
    a.send(1, 1, [bytes(100_000)])
    b.wait(handle, 10)
    assert clock.seconds == near(0.1 + seconds_of(100_000) + LATENCY, abs=1e-6)


def test_the_rate_is_the_wires_of_which_headers_take_a_part(clock):
    a, b = emulated(memory(), RATE)
    handle = b.post_receive(0, 1, 1448 * 1000)
    a.send(1, 1, [bytes(1448 * 1000)])
    b.wait(handle, 10)
    assert 8 * 1448 * 1000 / clock.seconds == near(RATE * 1448 / 1514)


def test_messages_of_a_burst_follow_each_other_at_the_rate(clock):
    a, b = emulated(memory(), RATE, LATENCY)
    handles = [b.post_receive(0, 1, 50_000) for _ in range(10)]
    clock.now += 100_000_000
    for _ in handles:
        a.send(1, 1, [bytes(50_000)])
    arrivals = []
    for handle in handles:
        b.wait(handle, 10)
        arrivals.append(clock.seconds - 0.1)
    one = seconds_of(50_000)
    assert arrivals == near([LATENCY + (k + 1) * one for k in range(10)], abs=1e-6)


def test_sending_passes_no_time(clock):
    a, b = emulated(memory(), RATE, LATENCY)
    b.post_receive(0, 1, 10**6)
    for _ in range(10):
        a.send(1, 1, [bytes(10**6)])
    assert clock.slept == 0


def test_a_message_that_arrived_while_the_receiver_computed_costs_no_more_time(clock):
    a, b = emulated(memory(), RATE, LATENCY)
    handle = b.post_receive(0, 1, 50_000)
    a.send(1, 1, [bytes(50_000)])
    clock.now += 10**9
    b.wait(handle, 10)
    assert clock.slept == 0


def test_a_late_receive_delays_the_start_of_the_transfer(clock):
    a, b = emulated(memory(), RATE, LATENCY)
    a.send(1, 1, [bytes(50_000)])
    clock.now += 10**9
    b.wait(b.post_receive(0, 1, 50_000), 10)
    # the notice that the receive is posted takes one latency, the data another
    assert clock.seconds == near(1 + 2 * LATENCY + seconds_of(50_000), abs=1e-6)


def test_two_senders_share_the_receivers_downstream(clock):
    a, b, c = emulated(memory(3), RATE)
    handles = [c.post_receive(source, 1, 50_000) for source in (0, 1)]
    a.send(2, 1, [bytes(50_000)])
    b.send(2, 1, [bytes(50_000)])
    c.wait(handles[0], 10)
    assert clock.seconds == near(seconds_of(50_000), abs=1e-6)
    c.wait(handles[1], 10)
    assert clock.seconds == near(2 * seconds_of(50_000), abs=1e-6)


def test_one_sender_shares_its_upstream_among_two_receivers(clock):
    a, b, c = emulated(memory(3), RATE)
    handles = [end.post_receive(0, 1, 50_000) for end in (b, c)]
    a.send(1, 1, [bytes(50_000)])
    a.send(2, 1, [bytes(50_000)])
    b.wait(handles[0], 10)
    assert clock.seconds == near(seconds_of(50_000), abs=1e-6)
    c.wait(handles[1], 10)
    assert clock.seconds == near(2 * seconds_of(50_000), abs=1e-6)


def test_the_two_directions_are_independent(clock):
    a, b = emulated(memory(), RATE, LATENCY)
    there, back = b.post_receive(0, 1, 50_000), a.post_receive(1, 1, 50_000)
    clock.now += 100_000_000
    a.send(1, 1, [bytes(50_000)])
    b.send(0, 1, [bytes(50_000)])
    b.wait(there, 10)
    a.wait(back, 10)
    assert clock.seconds == near(0.1 + LATENCY + seconds_of(50_000), abs=1e-6)


def test_two_pairs_of_hosts_do_not_share_anything(clock):
    a, b, c, d = emulated(memory(4), RATE)
    handles = [b.post_receive(0, 1, 50_000), d.post_receive(2, 1, 50_000)]
    a.send(1, 1, [bytes(50_000)])
    c.send(3, 1, [bytes(50_000)])
    b.wait(handles[0], 10)
    d.wait(handles[1], 10)
    assert clock.seconds == near(seconds_of(50_000), abs=1e-6)


def test_a_message_is_awaited_no_longer_than_the_deadline(clock):
    a, b = emulated(memory(), RATE, LATENCY)
    handle = b.post_receive(0, 1, 10**6)
    a.send(1, 1, [bytes(10**6)])
    with pytest.raises(TransportError, match=r"from 0 within 0\.1 s \(emulated link\)"):
        b.wait(handle, 0.1)
    assert clock.seconds == near(0.1, abs=1e-6)


def test_the_time_of_sending_is_what_the_upstream_was_busy_for(clock):
    a, b = emulated(memory(), RATE, LATENCY)
    for n in (1000, 50_000):
        a.send(1, 1, [bytes(n)])
    assert a.busy_seconds == near(seconds_of(1000) + seconds_of(50_000), abs=1e-6)
    assert b.busy_seconds == 0


def test_what_gloo_adds_takes_its_time_too(clock):
    a, b = emulated(gloo(), RATE)
    handle = b.post_receive(0, 1, 0)
    a.send(1, 1, [])
    b.wait(handle, 10)
    assert clock.seconds == near(seconds_of(8 + 2 * 48), abs=1e-6)


@pytest.mark.parametrize("inner", [memory, gloo])
def test_on_the_clock_a_burst_takes_its_size_by_the_rate_within_5_percent(inner):
    ratios = []
    for _ in range(5):  # other load on the machine only ever adds time
        a, b = emulated(inner(), RATE, LATENCY)
        handles = [b.post_receive(0, 1, 20_000) for _ in range(8)]
        time.sleep(2 * LATENCY)
        begun = time.monotonic()
        for _ in handles:
            a.send(1, 1, [bytes(20_000)])
        sent = time.monotonic() - begun
        for handle in handles:
            b.wait(handle, 10)
        each = 20_000 + a.inner.overhead_bytes
        expected = 8 * seconds_of(each) + LATENCY
        ratios.append((time.monotonic() - begun) / expected)
        if 0.95 < ratios[-1] < 1.05 and sent < LATENCY:
            return
    pytest.fail(f"measured / expected time: {ratios}")
