"""The short way of a message through a link: the bytes, values and state of the long way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire import frame
from thinwire.boundary import Boundary, MicroBatch, StepPlan
from thinwire.codecs import codec
from thinwire.counters import Timers
from thinwire.edge import LinkReceiver, LinkSender, Names
from thinwire.errors import LinkError, NonFiniteError
from thinwire.frame import Direction, Place
from thinwire.native import library
from thinwire.network.transport import Handle, Message, Transport
from thinwire.schemes import scheme

ROWS, POSITIONS, WIDTH = 2, 6, 24
SHAPE = (ROWS, POSITIONS, WIDTH)
PAYLOAD = codec("int4").max_nbytes(SHAPE, torch.float32)

needs_kernels = pytest.mark.skipif(library.library() is None, reason="no compiled kernels")


class Wire(Transport):
    """One message a channel, kept; ``tamper`` changes it on its way."""

    headroom = 5
    address, size = 0, 2

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.tamper: Callable[[bytearray], bytearray] = lambda data: data
        self._messages: dict[int, bytearray] = {}

    def post_receive(self, source: int, channel: int, max_bytes: int) -> Handle:
        return Handle(source, channel, max_bytes)

    def wait(self, handle: Handle, timeout: float) -> memoryview:
        return memoryview(self.tamper(self._messages.pop(handle.channel)))

    def _send(self, target: int, channel: int, message: Message) -> None:
        self.sent.append(bytes(message.data))
        self._messages[channel] = bytearray(message.data)
        self.recycle(message)


class Link:
    """Both ends of a link; ``long`` keeps them from the short way."""

    def __init__(
        self,
        spec: str,
        direction: Direction = Direction.FORWARD,
        dtype: torch.dtype = torch.float32,
        long: bool = False,
    ) -> None:
        self.wire = Wire()
        boundaries = [Boundary(0, SHAPE, dtype, True, sequence=True)]
        shared: list[Any] = [self.wire, 1, Place(7, 0, 0, 0, direction), 3, scheme(spec)]
        shared += [boundaries, Timers(), Names("here", "there"), torch.device("cpu")]
        self.sender, self.receiver = LinkSender(*shared), LinkReceiver(*shared)
        self.long, self.steps, self.short = long, 0, 0

    def begin(self, *microbatches: MicroBatch, seq_len: int = POSITIONS) -> None:
        self.steps += 1
        plan = StepPlan(self.steps, True, microbatches, seq_len)
        self.sender.begin_step(plan)
        self.receiver.begin_step(plan)
        if self.long:
            self.sender._drafts.clear()
            self.receiver._expected.clear()
        self.short = len(self.sender._drafts)
        assert self.short == len(self.receiver._expected)

    def move(self, x: Tensor | None, microbatch: int = 0) -> Tensor | None:
        self.sender.send(microbatch, [x])
        (y,) = self.receiver.receive(microbatch)
        return y

    def step(self, x: Tensor, keys: Sequence[int] = (4, 9)) -> Tensor:
        self.begin(MicroBatch(ROWS, tuple(keys)))
        y = self.move(x)
        assert y is not None
        return y

    @property
    def digests(self) -> tuple[int, int]:
        return self.sender.states[0].digest(), self.receiver.states[0].digest()

    def everything(self) -> tuple[Any, ...]:
        """All that the way of its messages must not change."""
        return self.wire.sent, self.digests, self.sender.counters.report(), self.sender.flagged


def both(spec: str, **options: Any) -> tuple[Link, Link]:
    return Link(spec, **options), Link(spec, long=True, **options)


def normal(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def equal(y: Tensor | None, z: Tensor | None) -> bool:
    return y is not None and z is not None and y.dtype == z.dtype and bool(y.equal(z))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "spec",
    ["delta(int4)", "delta(int2,first=int4)", "delta(int2,second=int4)", "int8", "int3"],
)
def test_both_ways_give_the_same_bytes_values_state_and_counts(
    spec: str, dtype: torch.dtype
) -> None:
    one, two = both(spec, dtype=dtype)
    for step in range(4):
        x = normal(1, dtype) + step * 0.1 * normal(2 + step, dtype)
        keys = (4, 9) if step % 2 else (9, 4)
        y, z = one.step(x, keys), two.step(x, keys)
        assert equal(y, z)
        assert one.short == 1
    assert one.everything() == two.everything()
    assert one.digests[0] == one.digests[1]


@needs_kernels
@pytest.mark.parametrize(
    "spec", ["delta(int4)", "delta(fp16,first=int8)", "delta(int4,first=bf16)"]
)
def test_ends_of_either_way_understand_each_other(spec: str) -> None:
    link = Link(spec)
    for step in range(6):
        x = normal(1) + step * 0.1 * normal(2 + step)
        link.begin(MicroBatch(ROWS, (4, 9)))
        (link.sender._drafts if step % 2 else link.receiver._expected).clear()
        link.move(x)
        assert link.digests[0] == link.digests[1]


@needs_kernels
def test_what_the_model_gets_does_not_alias_the_state() -> None:
    link = Link("delta(int4)")
    for step in range(3):
        link.step(normal(step)).zero_()
        assert link.digests[0] == link.digests[1]


@needs_kernels
@pytest.mark.parametrize(
    "surprise",
    [
        lambda x: -x,  # the change has more energy than the value
        lambda x: torch.stack([x[0], -x[1]]),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x[:, :4],
        lambda x: x.double(),
        lambda x: x.to(torch.bfloat16),
    ],
)
@pytest.mark.parametrize("spec", ["delta(int4)", "int4"])
def test_a_message_that_surprises_goes_the_long_way(
    spec: str, surprise: Callable[[Tensor], Tensor]
) -> None:
    one, two = both(spec)
    for x in (normal(1), surprise(normal(1)), normal(1)):
        assert equal(one.step(x), two.step(x))
        assert one.short == 1
    assert one.everything() == two.everything()
    assert one.digests[0] == one.digests[1]


@needs_kernels
@pytest.mark.parametrize(
    "microbatch",
    [
        MicroBatch(ROWS, (4, 9), (POSITIONS, 2)),
        MicroBatch(ROWS, (4, 4)),
        MicroBatch(ROWS, (4, 77)),
    ],
    ids=["padded", "a sample twice", "one of two seen before"],
)
def test_a_micro_batch_of_rows_that_differ_is_not_foreseen(microbatch: MicroBatch) -> None:
    link = Link("delta(int4)")
    link.step(normal(1))
    link.begin(microbatch)
    assert link.short == 0
    link.move(normal(2))
    assert link.digests[0] == link.digests[1]


@needs_kernels
def test_a_sample_that_comes_again_within_the_step_leaves_its_reference_alone() -> None:
    one, two = both("delta(int4)")
    for link in (one, two):
        link.step(normal(1))
        link.begin(MicroBatch(ROWS, (4, 9)), MicroBatch(ROWS, (9, 4)))
        for microbatch in (1, 0):
            link.move(normal(2 + microbatch), microbatch)
    assert one.everything() == two.everything()


@needs_kernels
@pytest.mark.parametrize("spec", ["delta(int4)", "int8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_leaves_no_trace(spec: str, bad: float) -> None:
    link = Link(spec)
    link.step(normal(1))
    before, x = link.digests, normal(2)
    x[1, 3, 5] = bad
    link.begin(MicroBatch(ROWS, (4, 9)))
    with pytest.raises(NonFiniteError, match=r"index \(1, 3, 5\)"):
        link.sender.send(0, [x])
    assert link.digests == before

    back = Link(spec, Direction.BACKWARD)
    back.step(normal(1))
    before = back.digests
    assert bool(back.step(x).isnan().all())
    assert back.digests == before
    assert "not finite" in back.sender.flagged or str(bad) in back.sender.flagged


@needs_kernels
def test_an_absent_gradient_stays_absent() -> None:
    link = Link("int8", Direction.BACKWARD)
    link.begin(MicroBatch(ROWS))
    assert link.move(None) is None


def resealed(data: bytearray, at: int, value: bytes) -> bytearray:
    """``data`` with other bytes, and the checksum to go with them."""
    data[at : at + len(value)] = value
    return data[:-8] + frame.checksum(data[:-8])


def damaged(data: bytearray) -> bytearray:
    data[-20] ^= 1
    return data


@needs_kernels
@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (damaged, "the checksum does not match"),
        (lambda data: data[:-1], "cut short"),
        (lambda data: data + b"\0", "too long"),
        (lambda data: resealed(data, 16, b"\x09"), "was expected"),  # the step
        (lambda data: resealed(data, -8 - PAYLOAD, b"\xff\x7f"), "invalid scale"),  # NaN
    ],
)
def test_a_bad_message_is_refused_with_its_reason_and_leaves_no_trace(
    tamper: Callable[[bytearray], bytearray], reason: str
) -> None:
    link = Link("delta(int4)")
    for step in range(2):
        link.step(normal(step))
    before = link.receiver.states[0].digest()
    link.begin(MicroBatch(ROWS, (4, 9)))
    link.wire.tamper = tamper
    with pytest.raises(LinkError, match=reason):
        link.move(normal(3))
    assert link.receiver.states[0].digest() == before


@needs_kernels
def test_other_sample_ids_at_the_other_end_are_refused() -> None:
    link = Link("delta(int4)")
    link.step(normal(1), (4, 9))
    link.step(normal(2), (5, 8))
    link.sender.begin_step(StepPlan(3, True, (MicroBatch(ROWS, (4, 9)),), POSITIONS))
    link.receiver.begin_step(StepPlan(3, True, (MicroBatch(ROWS, (5, 8)),), POSITIONS))
    with pytest.raises(LinkError, match="different sample ids"):
        link.move(normal(3))


def test_the_cpu_time_of_both_ends_is_counted() -> None:
    link = Link("delta(int4)")
    link.step(normal(1))
    found = link.sender.timers.take()
    assert found["encode_s"] > 0
    assert found["decode_s"] > 0
