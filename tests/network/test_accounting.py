"""Every byte on the socket is accounted for, as the kernel counts them (TCP_INFO)."""

import dataclasses
import sys
import time

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.distributed import setup
from tests.distributed.pool import Pool
from tests.network.endpoints import socket_bytes, tcp_sockets
from thinwire.network import EmulatedTransport, GlooTransport, Handle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is read as Linux has it")

#: What each posted receive sends back to the source.
GLOO_NOTICE = 48
SIZES = [0, 1, 1000, 70_000]


class Sockets:
    """The bytes on the sockets that a transport's process group opens."""

    def __init__(self) -> None:
        self._before = set(tcp_sockets())

    def start(self) -> None:
        """Count from here on, on all that were opened since this object was made."""
        self._opened = [v for k, v in tcp_sockets().items() if k not in self._before]
        assert len(self._opened) == 1, "gloo opens one socket a peer"
        self._start = self._settled()

    def counted(self) -> tuple[int, int]:
        """(sent, received) since ``start``, once the peer has acknowledged everything."""
        sent, received = self._settled()
        return sent - self._start[0], received - self._start[1]

    def _settled(self) -> tuple[int, int]:
        last = (-1, -1)
        for _ in range(100):
            now = socket_bytes(self._opened[0])
            restless = torch.tensor(now != last)
            dist.all_reduce(restless, dist.ReduceOp.MAX)
            if not restless:
                return now
            last = now
            time.sleep(0.06)  # longer than an acknowledgement may be delayed
        raise TimeoutError("the sockets do not come to rest")


def exchange(rank: int, world_size: int, posted_first: bool) -> tuple[int, int]:
    """Rank 0 sends SIZES to rank 1; (sent, received) on its socket."""
    sockets = Sockets()
    transport = GlooTransport()
    sockets.start()
    handles = []
    if rank == 1 and posted_first:
        handles = [transport.post_receive(0, 1, 100_000) for _ in SIZES]
    dist.barrier()
    time.sleep(0.1 if posted_first else 0)
    if rank == 0:
        for n in SIZES:
            transport.send(1, 1, [bytes(n)])
    if not posted_first:
        time.sleep(0.1)
        dist.barrier()
    if rank == 1:
        handles = handles or [transport.post_receive(0, 1, 100_000) for _ in SIZES]
        for handle in handles:
            transport.wait(handle, 10)
    transport.flush(10)
    return sockets.counted()


@pytest.mark.parametrize("posted_first", [True, False])
def test_the_socket_carries_the_messages_and_the_declared_overhead(pool: Pool, posted_first: bool):
    (sent, received), (back, arrived) = pool.run(exchange, posted_first)
    assert sent == arrived == sum(SIZES) + GlooTransport.overhead_bytes * len(SIZES)
    assert back == received == GLOO_NOTICE * len(SIZES)


def emulated_exchange(rank: int, world_size: int) -> tuple[int, int]:
    sockets = Sockets()
    transport = EmulatedTransport(GlooTransport(), 1e9)
    sockets.start()
    if rank == 0:
        transport.send(1, 1, [bytes(1000)])
    else:
        transport.wait(transport.post_receive(0, 1, 1000), 10)
    transport.flush(10)
    return sockets.counted()[0], transport.overhead_bytes


def test_the_emulated_links_overhead_is_declared_too(pool: Pool):
    (sent, overhead), _ = pool.run(emulated_exchange)
    assert sent == 1000 + overhead


class CountingTransport(GlooTransport):
    """Counts the receives posted."""

    posted = 0

    def post_receive(self, source: int, channel: int, max_bytes: int) -> Handle:
        self.posted += 1
        return super().post_receive(source, channel, max_bytes)


@dataclasses.dataclass
class Totals:
    """One rank's bytes: on its socket, and as its pipeline counted them."""

    sent: int
    received: int
    posted: int
    messages: int
    counted: dict[str, int]


def train(rank: int, world_size: int) -> Totals:
    """A few steps and evaluations of a pipeline."""
    stages, schedule, _ = setup.build(rank, world_size, setup.Case())
    sockets = Sockets()
    transport = CountingTransport()
    sockets.start()
    pipeline = tw.Pipeline(
        schedule, stages, tw.Plan("delta(int4)", "int8"), transport=transport, deadline=30
    )
    first = rank == 0
    for step in (0, 1, 0, 2):  # first visits, changes, and both in one step
        ids, x, y = setup.batch(step)
        inputs = (x,) if first else ()
        target = None if first else y
        pipeline.step(*inputs, target=target, sample_ids=ids)
        for codec in (True, False):
            pipeline.eval(*inputs, target=target, codec=codec)
    transport.flush(10)
    sent, received = sockets.counted()
    *links, control = pipeline.link_counters()
    tallies = {
        "training": [link.training for link in links],
        "evaluation": [link.evaluation for link in links],
        "control": [control.training],
    }
    messages = sum(t.messages for ts in tallies.values() for t in ts)
    counted = {name: sum(t.bytes for t in ts) for name, ts in tallies.items()}
    return Totals(sent, received, transport.posted, messages, counted)


def test_a_pipelines_counters_account_for_every_byte_on_the_socket(pool: Pool):
    a, b = pool.run(train)
    assert min(a.counted.values()) > 0  # b sends nothing in evaluation
    for here, there in ((a, b), (b, a)):
        overhead = GlooTransport.overhead_bytes * here.messages + GLOO_NOTICE * here.posted
        assert here.sent == there.received == sum(here.counted.values()) + overhead
