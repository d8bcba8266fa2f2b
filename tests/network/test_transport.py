"""One suite for every transport: what their interface promises."""

import gc
import threading
import time
from typing import Any

import pytest
import torch

from tests.network.endpoints import KINDS, gloo
from thinwire.network import GlooTransport, MemoryTransport, TransportError

SLACK = 0.5  # seconds that a busy machine may add


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(kind: str) -> list[Any]:
    return KINDS[kind]()


class Gate:
    """A device event that passes when it is told to."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.waited = threading.Event()

    def open(self) -> None:
        self._open.set()

    def synchronize(self) -> None:
        self.waited.set()
        assert self._open.wait(20)


def arrive(endpoint: Any, handle: Any) -> bytes:
    return bytes(endpoint.wait(handle, 10))


def test_a_message_is_the_concatenation_of_its_parts(pair):
    a, b = pair
    handle = b.post_receive(0, 1, 10)
    a.send(1, 1, [b"ab", bytearray(b"cd"), memoryview(b"ef")])
    assert arrive(b, handle) == b"abcdef"


def test_messages_go_both_ways(pair):
    a, b = pair
    there, back = b.post_receive(0, 1, 10), a.post_receive(1, 1, 10)
    a.send(1, 1, [b"there"])
    b.send(0, 1, [b"back"])
    assert (arrive(b, there), arrive(a, back)) == (b"there", b"back")


def test_messages_of_a_channel_arrive_in_the_order_sent(pair):
    a, b = pair
    handles = [b.post_receive(0, 1, 10) for _ in range(20)]
    for k in range(20):
        a.send(1, 1, [b"%d" % k])
    assert [arrive(b, h) for h in handles] == [b"%d" % k for k in range(20)]


def test_the_nth_receive_of_a_channel_gets_the_nth_message_in_whatever_order_they_are_awaited(pair):
    a, b = pair
    handles = [b.post_receive(0, 1, 10) for _ in range(3)]
    for k in range(3):
        a.send(1, 1, [b"%d" % k])
    assert [arrive(b, handles[k]) for k in (2, 0, 1)] == [b"2", b"0", b"1"]


def test_channels_are_independent(pair):
    a, b = pair
    first, second = b.post_receive(0, 1, 10), b.post_receive(0, 2, 10)
    a.send(1, 2, [b"second"])
    assert arrive(b, second) == b"second"
    a.send(1, 1, [b"first"])
    assert arrive(b, first) == b"first"


def test_sources_are_independent(kind):
    a, b, c = KINDS[kind](3)
    from_a, from_b = c.post_receive(0, 1, 10), c.post_receive(1, 1, 10)
    b.send(2, 1, [b"b"])
    a.send(2, 1, [b"a"])
    assert (arrive(c, from_a), arrive(c, from_b)) == (b"a", b"b")


def test_a_receive_may_be_posted_after_the_message_was_sent(pair):
    a, b = pair
    a.send(1, 1, [b"early"])
    time.sleep(0.05)
    assert arrive(b, b.post_receive(0, 1, 10)) == b"early"


@pytest.mark.parametrize("parts", [[], [b""], [b"", b""]], ids=str)
def test_an_empty_message_arrives(pair, parts):
    a, b = pair
    handle = b.post_receive(0, 1, 0)
    a.send(1, 1, parts)
    assert arrive(b, handle) == b""


def test_a_message_shorter_than_announced_has_its_own_length(pair):
    a, b = pair
    handles = [b.post_receive(0, 1, 1000) for _ in range(2)]
    a.send(1, 1, [b"x" * 1000])
    a.send(1, 1, [b"short"])
    assert [arrive(b, h) for h in handles] == [b"x" * 1000, b"short"]


def test_a_large_message_arrives_whole(pair):
    a, b = pair
    data = bytes(range(256)) * 20_000
    handle = b.post_receive(0, 1, len(data))
    a.send(1, 1, [memoryview(data)])
    assert arrive(b, handle) == data


def test_the_bytes_received_are_writable(pair):
    a, b = pair
    handle = b.post_receive(0, 1, 3)
    a.send(1, 1, [b"abc"])
    message = b.wait(handle, 10)
    message[0] = ord("z")
    assert bytes(message) == b"zbc"


def test_what_was_sent_may_be_overwritten_at_once(pair):
    a, b = pair
    data = bytearray(b"before")
    a.send(1, 1, [data])
    data[:] = b"after!"
    assert arrive(b, b.post_receive(0, 1, 10)) == b"before"


def test_sending_does_not_wait_for_the_receiver(pair):
    a, _ = pair
    begun = time.monotonic()
    for k in range(20):
        a.send(1, k, [bytes(100_000)])
    assert time.monotonic() - begun < SLACK


def test_a_message_that_does_not_come_is_an_error_at_the_deadline_that_names_its_source(pair):
    _, b = pair
    handle = b.post_receive(0, 1, 10)
    begun = time.monotonic()
    with pytest.raises(TransportError, match=r"nothing arrived from 0 within 0\.2 s"):
        b.wait(handle, 0.2)
    assert 0.15 < time.monotonic() - begun < 0.2 + SLACK


def test_a_deadline_of_zero_does_not_wait(pair):
    _, b = pair
    handle = b.post_receive(0, 1, 10)
    begun = time.monotonic()
    with pytest.raises(TransportError):
        b.wait(handle, 0)
    assert time.monotonic() - begun < SLACK


@pytest.mark.parametrize("kind", ["memory", "emulated memory"])
def test_a_message_larger_than_announced_is_refused(pair):
    # never over gloo: it writes past no buffer, it aborts the process
    a, b = pair
    handle = b.post_receive(0, 1, 3)
    a.send(1, 1, [b"larger, by far more than any stamp"])
    with pytest.raises(TransportError, match="at most"):
        b.wait(handle, 1)


def test_gloo_refuses_a_length_beyond_what_was_announced():
    a, b = gloo()
    handle = b.post_receive(0, 1, 8)
    forged = torch.frombuffer(bytearray((1000).to_bytes(8, "little")), dtype=torch.uint8)
    a._group.send([forged], 1, 1).wait()
    with pytest.raises(TransportError, match="1000 bytes announced by 0, at most 8 expected"):
        b.wait(handle, 5)


@pytest.mark.parametrize("kind", ["gloo", "emulated gloo"])
@pytest.mark.parametrize("posted", [True, False])
def test_a_peer_that_is_gone_is_an_error_well_before_the_deadline(kind, posted):
    pair = KINDS[kind]()
    b = pair.pop()
    handle = b.post_receive(0, 1, 10) if posted else None
    close(pair.pop())
    begun = time.monotonic()
    with pytest.raises(TransportError, match=r"from 0 .*connection is gone"):
        b.wait(handle or b.post_receive(0, 1, 10), 10)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("kind", ["gloo", "emulated gloo"])
def test_sending_to_a_peer_that_is_gone_is_an_error(kind):
    pair = KINDS[kind]()
    a, b = pair
    handle = b.post_receive(0, 1, 10)
    del pair, a
    gc.collect()
    with pytest.raises(TransportError):
        b.wait(handle, 5)
    with pytest.raises(TransportError, match="a message to 0 could not be sent"):
        b.send(0, 1, [b"x"])


def close(endpoint: Any) -> None:
    """End an endpoint as a process that ends would."""
    inner = getattr(endpoint, "inner", endpoint)
    inner._group = None
    gc.collect()


# Events, for payloads that a device has still to write.


def test_an_event_delays_the_message_but_not_the_caller(pair):
    a, b = pair
    gate = Gate()
    handle = b.post_receive(0, 1, 10)
    begun = time.monotonic()
    a.send(1, 1, [b"ready"], gate)
    assert time.monotonic() - begun < SLACK
    assert gate.waited.wait(5)
    with pytest.raises(TransportError, match="not sent"):
        a.flush(0.05)
    gate.open()
    assert arrive(b, handle) == b"ready"


def test_the_message_is_made_after_the_event(pair):
    a, b = pair
    gate, order = Gate(), []
    handle = b.post_receive(0, 1, 10)

    def make() -> list[bytes]:
        order.append("made")
        return [b"late"]

    a.send(1, 1, make, gate)
    assert gate.waited.wait(5)
    order.append("opened")
    gate.open()
    assert arrive(b, handle) == b"late"
    assert order == ["opened", "made"]


def test_a_message_may_be_made_by_a_callable_without_an_event(pair):
    a, b = pair
    handle = b.post_receive(0, 1, 10)
    a.send(1, 1, lambda: [b"made"])
    assert arrive(b, handle) == b"made"


def test_messages_behind_an_event_keep_their_order(pair):
    a, b = pair
    gate = Gate()
    handles = [b.post_receive(0, 1, 10) for _ in range(4)]
    a.send(1, 1, [b"0"])
    a.send(1, 1, [b"1"], gate)
    a.send(1, 1, [b"2"])
    a.send(1, 1, lambda: [b"3"])
    gate.open()
    assert [arrive(b, h) for h in handles] == [b"0", b"1", b"2", b"3"]


def fail() -> list[bytes]:
    raise ZeroDivisionError("no payload")


@pytest.mark.parametrize("then", ["flush", "send"])
def test_an_error_in_making_a_message_is_raised_at_the_next_call(pair, then):
    a, _ = pair
    gate = Gate()
    a.send(1, 1, fail, gate)
    gate.open()
    time.sleep(0.1)
    call = {"flush": lambda: a.flush(5), "send": lambda: a.send(1, 2, [b""])}[then]
    with pytest.raises(TransportError, match="could not be sent: no payload"):
        call()


def test_after_an_error_the_reason_for_giving_up_can_still_be_sent(pair):
    a, b = pair
    gate = Gate()
    handle = b.post_receive(0, 9, 10)
    a.send(1, 1, fail, gate)
    gate.open()
    with pytest.raises(TransportError):
        a.flush(5)
    a.send(1, 9, [b"sorry"])
    assert arrive(b, handle) == b"sorry"


# Flush, drain, close.


def test_flush_returns_once_everything_was_taken(pair):
    a, b = pair
    gate = Gate()
    handles = [b.post_receive(0, 1, 10) for _ in range(2)]
    a.send(1, 1, [b"0"], gate)
    a.send(1, 1, [b"1"])
    gate.open()
    a.flush(10)
    assert [arrive(b, h) for h in handles] == [b"0", b"1"]


def test_flush_of_nothing_returns_at_once(pair):
    begun = time.monotonic()
    pair[0].flush(10)
    assert time.monotonic() - begun < SLACK


def test_flush_is_an_error_at_the_deadline_while_an_event_has_not_passed(pair):
    a, _ = pair
    gate = Gate()
    a.send(1, 1, [b"x"], gate)
    begun = time.monotonic()
    with pytest.raises(TransportError, match=r"not sent within 0\.2 s"):
        a.flush(0.2)
    assert time.monotonic() - begun < 0.2 + SLACK
    gate.open()


@pytest.mark.parametrize("kind", ["gloo", "emulated gloo"])
def test_flush_over_gloo_is_an_error_at_the_deadline_while_nothing_is_received(pair):
    a, _ = pair
    a.send(1, 1, [b"x"])
    begun = time.monotonic()
    with pytest.raises(TransportError, match="a message was not taken within"):
        a.flush(0.2)
    assert time.monotonic() - begun < 0.2 + SLACK


def test_drain_ends_at_the_deadline_and_leaves_the_message_under_way(pair):
    a, b = pair
    a.send(1, 1, [b"last words"])
    begun = time.monotonic()
    a.drain(0.2)
    assert time.monotonic() - begun < 0.2 + SLACK
    assert arrive(b, b.post_receive(0, 1, 10)) == b"last words"


def test_drain_gives_a_message_behind_an_event_its_time(pair):
    a, b = pair
    gate = Gate()
    handle = b.post_receive(0, 1, 10)
    a.send(1, 1, [b"x"], gate)
    threading.Timer(0.1, gate.open).start()
    a.drain(5)
    a.close()
    assert arrive(b, handle) == b"x"


def test_close_ends_the_sender_thread(pair):
    a, b = pair
    gate = Gate()
    gate.open()
    handle = b.post_receive(0, 1, 10)
    a.send(1, 1, [b"x"], gate)
    assert arrive(b, handle) == b"x"
    a.close()
    assert a._sender is None
    a.close()  # once more does no harm


def test_an_endpoint_beyond_the_last_is_refused():
    with pytest.raises(ValueError, match=r"endpoint 2 is not within 0 … 1"):
        MemoryTransport(2).endpoint(2)


def test_a_gloo_endpoint_knows_only_itself():
    a, b = gloo()
    assert a.endpoint(0) is a
    with pytest.raises(ValueError, match="endpoint 1 is not in this process"):
        a.endpoint(1)
    assert (a.address, b.address, a.size) == (0, 1, 2)


def test_gloo_without_a_process_group_says_what_is_missing():
    with pytest.raises(ValueError, match="init_process_group first"):
        GlooTransport()
