"""Messages that are predicted the short way: the same bytes, values and state as the long one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.native.kernel_cases import needs_library
from thinwire import native
from thinwire.frame import Kind
from thinwire.predict import fit
from thinwire.schemes import Receiver, Sender, Visit, scheme
from thinwire.schemes.closed_loop.foreseen import ForeseenExpected

ROWS, POSITIONS, WIDTH = 3, 24, 32
SHAPE = ROWS, POSITIONS, WIDTH


@dataclasses.dataclass
class Ends:
    """Both ends of a link, and how often messages went the short way."""

    sender: Sender
    receiver: Receiver
    short: int = 0

    @classmethod
    def of(cls, spec: str) -> Ends:
        return cls(scheme(spec).sender(), scheme(spec).receiver())

    def begin(self, visits: list[Visit]) -> None:
        self.sender.begin_step(visits)
        self.receiver.begin_step(visits)

    def end(self) -> None:
        self.sender.end_step()
        self.receiver.end_step()

    def long(self, x: torch.Tensor, k: int, visit: Visit) -> tuple[bytes, torch.Tensor]:
        sections = self.sender.encode(x, k, visit)
        payload = b"".join(bytes(s.payload.numpy()) for s in sections)
        return payload, self.receiver.decode(sections, k, visit)

    def quick(self, x: torch.Tensor, k: int, visit: Visit) -> tuple[bytes, torch.Tensor]:
        """The short way where there is one."""
        shape, dtype = tuple(x.shape), x.dtype
        ahead = self.sender.foresee(k, visit, shape, dtype)
        back = self.receiver.foresee(k, visit, shape, dtype)
        assert (ahead is None) == (back is None)
        if ahead is None or back is None:
            return self.long(x, k, visit)
        assert isinstance(ahead, ForeseenExpected)
        assert ahead.entry == back.entry
        payload = bytearray(ahead.form.nbytes)
        if not ahead.encode(x.data_ptr(), native.address(memoryview(payload))):
            return self.long(x, k, visit)
        self.short += 1
        y = torch.empty(shape, dtype=dtype)
        assert back.decode(native.address(memoryview(payload)), y.data_ptr())
        return bytes(payload), y

    def states(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, tensor)
            for end in (self.sender, self.receiver)
            for name, tensor in sorted(end.state_dict().items())
            if isinstance(tensor, torch.Tensor)
        ]


def visit_of(step: int, scale: float = 1.0) -> Visit:
    keys = tuple(range(step % 2 * ROWS, (step % 2 + 1) * ROWS))
    generator = torch.Generator().manual_seed(step % 2)
    tokens = torch.randint(9, (ROWS, POSITIONS), generator=generator)
    seeds = torch.zeros(ROWS, dtype=torch.int64)
    context = {"token": tokens, "target": tokens.flip(1)}
    return Visit(keys, (POSITIONS * WIDTH,) * ROWS, seeds, False, context, scale)


def values(step: int, dtype: torch.dtype, size: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step % 2)
    x = torch.randn(SHAPE, generator=generator)
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
    return (size * (x + 0.1 * step + 0.3 * noise)).to(dtype)


FORWARD = [
    "delta(int2,first=int4,by=token+previous)",
    "delta(int2,first=int4,by=token+drift)",
    "delta(int3,by=position,ref=int4)",
    "delta(int4,second=int2,by=mean+drift,ref=fp32)",
    "predicted(int2,by=token+previous)",
    "predicted(int2:hadamard,by=target)",
    "predicted(int8:group=48,by=token)",
]


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", FORWARD)
def test_both_ways_are_one(spec: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_SHARE", 0)
    one, other = Ends.of(spec), Ends.of(spec)
    for step in range(30):
        visits, x = [visit_of(step)], values(step, dtype, 3.0)
        for ends in (one, other):
            ends.begin(visits)
        assert equal(one.quick(x, 0, visits[0]), other.long(x, 0, visits[0]))
        one.end()
        other.end()
        assert alike(one, other)
    assert one.short >= 20
    assert one.sender.digest() == one.receiver.digest()


@needs_library
@pytest.mark.parametrize("keeps", ["predicted(int4,by=token)", "delta(int2,by=token+drift)"])
def test_gradients_are_one_too(keeps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_SHARE", 0)
    spec = "predicted(int3,by=target+token+activation)"
    pairs = [(Ends.of(keeps), Ends.of(spec)) for _ in range(2)]
    for ahead, back in pairs:
        ahead.receiver.keeps = ahead.sender.keeps = True
        back.sender.activations, back.receiver.activations = ahead.receiver, ahead.sender
    for step in range(30):
        forward, backward = visit_of(step), visit_of(step, scale=1 / 71)
        x, dy = values(step, torch.float32, 1.0), values(step + 7, torch.float32, 1e-3)
        found = []
        for (ahead, back), way in zip(pairs, (Ends.quick, Ends.long), strict=True):
            ahead.begin([forward])
            back.begin([backward])
            found.append((way(ahead, x, 0, forward), way(back, dy, 0, backward)))
            ahead.end()
            back.end()
        for one, other in zip(*found, strict=True):
            assert equal(one, other)
        for one_end, other_end in zip(*pairs, strict=True):
            assert alike(one_end, other_end)
    assert min(ends.short for ends in pairs[0]) >= 20


@needs_library
def test_what_is_unusual_goes_the_long_way() -> None:
    spec = "delta(int2,first=int4,by=token)"
    one, other = Ends.of(spec), Ends.of(spec)
    seen = []
    for step in range(12):
        visits, x = [visit_of(step)], values(step, torch.float32, 1.0)
        if step == 8:
            x[1, 5] *= 1000  # far beyond the others
        if step == 10:
            x = -9 * x  # a change that is larger than the value
        for ends in (one, other):
            ends.begin(visits)
        before = one.short
        assert equal(one.quick(x, 0, visits[0]), other.long(x, 0, visits[0]))
        seen.append(one.short > before)
        one.end()
        other.end()
        assert alike(one, other)
    tables = [False, True] * 2  # of values from the second step on, of changes from the fourth
    assert seen == tables + 4 * [True] + [False, True] * 2


@needs_library
@given(st.integers(0, 2**31), st.sampled_from([1e-30, 1e-3, 1.0, 1e6, 1e30]), st.booleans())
def test_a_broken_payload_moves_nothing(seed: int, size: float, damaged: bool) -> None:
    ends = Ends.of("predicted(int3:group=32,by=token)")
    for step in range(3):
        visits = [visit_of(step)]
        ends.begin(visits)
        ends.quick(values(step, torch.float32, size), 0, visits[0])
        ends.end()
    visits = [visit_of(3)]
    ends.begin(visits)
    before = ends.receiver.digest()
    back = ends.receiver.foresee(0, visits[0], SHAPE, torch.float32)
    assert back is not None
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(256, (back.form.nbytes,), generator=generator, dtype=torch.uint8)
    payload = bytearray(random.numpy().tobytes())
    if damaged:
        payload[ROWS : ROWS + 2] = b"\xff\xff"  # a scale that is not finite
    y = torch.empty(SHAPE)
    went = back.decode(native.address(memoryview(payload)), y.data_ptr())
    assert not (went and damaged)
    assert not went or bool(torch.isfinite(y).all())
    assert ends.receiver.digest() == before


def equal(one: tuple[bytes, torch.Tensor], other: tuple[bytes, torch.Tensor]) -> bool:
    return one[0] == other[0] and torch.equal(one[1], other[1])


def alike(one: Ends, other: Ends) -> bool:
    pairs = list(zip(one.states(), other.states(), strict=True))
    assert all(a[0] == b[0] for a, b in pairs)
    assert one.sender.digest() == other.sender.digest()
    assert one.receiver.digest() == other.receiver.digest()
    return all(torch.equal(a[1], b[1]) for a, b in pairs)


@needs_library
def test_changes_are_what_most_of_these_are() -> None:
    ends = Ends.of(FORWARD[0])
    for step in range(4):
        visits = [visit_of(step)]
        ends.begin(visits)
        found = ends.sender.foresee(0, visits[0], SHAPE, torch.float32)
        ends.quick(values(step, torch.float32, 1.0), 0, visits[0])
        ends.end()
    assert found is not None
    assert found.form.kind == Kind.CHANGE
