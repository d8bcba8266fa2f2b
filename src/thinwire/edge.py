"""One stage's end of an edge: encode, frame, send, receive, decode, count.

An edge joins stage s and stage s + 1 by two directed links. Each stage holds an ``EdgeEnd`` for
each neighbour on another endpoint; it sends on one link and receives on the other.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import frame, native
from thinwire.boundary import Boundary, StepPlan
from thinwire.codecs import codec
from thinwire.codecs.base import unfit_value
from thinwire.counters import LinkCounters, Tally, Timers
from thinwire.errors import FrameError, LinkError, NonFiniteError
from thinwire.frame import Direction, Kind, Place, Section
from thinwire.network import Handle, Message, Transport, TransportError
from thinwire.schemes import Foreseen, Receiver, Scheme, Sender, Value, Visit
from thinwire.store import ReferenceStore
from thinwire.store.references import PARTS

_RAW = codec("raw")
#: A frame that says why its sender gave up must fit into every posted receive.
_MIN_RECEIVE = 4096


@dataclasses.dataclass(frozen=True)
class Names:
    """How an error names this end and the other."""

    here: str
    there: str


class _Link(ABC):
    """What the two ends of one directed link have in common."""

    role: ClassVar[str]

    def __init__(
        self,
        transport: Transport,
        peer: int,
        place: Place,
        channel: int,
        scheme: Scheme,
        boundaries: Sequence[Boundary],
        timers: Timers,
        names: Names,
        device: torch.device,
    ) -> None:
        self.transport, self.peer, self.place, self.channel = transport, peer, place, channel
        self.scheme, self.boundaries = scheme, list(boundaries)
        self.timers, self.names, self.device = timers, names, device
        self.plan = StepPlan(0, False, ())
        #: Micro-batches of the step that are not sent: the receiver remembers them.
        self.resting: frozenset[int] = frozenset()
        self.states: Mapping[int, Sender | Receiver] = {}
        self._visits: dict[tuple[int, int, tuple[int, ...]], Visit] = {}
        self._most: dict[tuple[Any, ...], int] = {}
        self.what = "activation" if place.direction == Direction.FORWARD else "gradient"

    @functools.cached_property
    def stores(self) -> dict[int, ReferenceStore]:
        """What is remembered of samples, by boundary tensor."""
        found = {index: state.store for index, state in self.states.items()}
        return {index: store for index, store in found.items() if store is not None}

    @property
    def reference_bytes(self) -> int:
        """Bytes of all references of a sample at the declared maximum."""
        sizes = {b.index: math.prod(b.shape[1:]) for b in self.boundaries}
        return sum(store.keeping.nbytes(sizes[index]) for index, store in self.stores.items())

    def keys_of_parts(self, parts: Iterable[int]) -> list[int]:
        """The samples that belong to these parts of the stores' digests."""
        unlike = set(parts)
        keys = {key for store in self.stores.values() for key in store.lengths}
        return [key for key in sorted(keys) if key % PARTS in unlike]

    def repair(self, keys: Sequence[int]) -> None:
        """Forget ``keys``, as the other end does: their next visit repairs them."""
        for index in self.stores:
            self.states[index].repair(keys)

    def place_of(self, microbatch: int) -> Place:
        p = self.place
        return Place(p.run, self.plan.step, microbatch, p.edge, p.direction)

    def travels(self, boundary: Boundary) -> bool:
        """Gradients exist only of tensors that ask for one."""
        return self.place.direction == Direction.FORWARD or boundary.requires_grad

    @functools.cached_property
    def silent(self) -> bool:
        """Whether nothing travels here: no message is sent, and none is awaited."""
        return not any(map(self.travels, self.boundaries))

    def begin_step(self, plan: StepPlan) -> None:
        """Take the step's plan; in training, the states learn what will be sent."""
        self.plan = plan
        self._visits.clear()
        self.resting = frozenset()
        if not plan.train:
            return
        for boundary in self.boundaries:
            if boundary.index in self.states:
                state = self.states[boundary.index]
                shapes = [boundary.shape_for(mb.rows, plan.seq_len) for mb in plan.microbatches]
                visits = [self.visit(boundary, k, shape) for k, shape in enumerate(shapes)]
                state.begin_step(visits)
                if len(self.boundaries) == 1:
                    self.resting = self._at_rest(state)
                    if self.device.type == "cpu":
                        self._foresee(state, visits, shapes, boundary.dtype)

    def _at_rest(self, state: Sender | Receiver) -> frozenset[int]:
        """The micro-batches for which the stages before this link would compute what both ends
        remember."""
        if self.place.direction == Direction.BACKWARD or self.place.edge >= self.plan.frozen:
            return frozenset()
        parts = enumerate(self.plan.microbatches)
        return frozenset(k for k, mb in parts if mb.known and state.remembers(k))

    def _foresee(
        self,
        state: Sender | Receiver,
        visits: list[Visit],
        shapes: list[tuple[int, ...]],
        dtype: torch.dtype,
    ) -> None:
        """Get ready for the messages of the step that both ends foresee."""
        for k, (visit, shape) in enumerate(zip(visits, shapes, strict=True)):
            foreseen = None if k in self.resting else state.foresee(k, visit, shape, dtype)
            if foreseen is not None:
                head = frame.head(self.place_of(k), 1, foreseen.entry, foreseen.form.nbytes)
                self._prepare(k, foreseen, head)

    @abstractmethod
    def _prepare(self, microbatch: int, foreseen: Foreseen, head: bytes) -> None:
        """Get ready for a micro-batch's message, which begins with ``head``."""

    def visit(self, boundary: Boundary, microbatch: int, shape: tuple[int, ...]) -> Visit:
        """The codec's view of a coded tensor of this shape."""
        known = (boundary.index, microbatch, shape)
        if known not in self._visits:
            self._visits[known] = self._make_visit(boundary, microbatch, shape)
        return self._visits[known]

    def _make_visit(self, boundary: Boundary, microbatch: int, shape: tuple[int, ...]) -> Visit:
        mb = self.plan.microbatches[microbatch]
        width = math.prod(shape[1:])
        lengths, padded = (width,) * mb.rows, False
        if mb.lengths and boundary.sequence and min(mb.lengths) < shape[1]:
            lengths = tuple([min(n, shape[1]) * (width // shape[1]) for n in mb.lengths])
            padded = True
        seeds = _no_seeds(mb.rows)
        if self.scheme.stochastic:
            keys = mb.keys or [f"{microbatch}.{row}" for row in range(mb.rows)]
            drawn = [_seed(self.plan, self.place, boundary.index, key) for key in keys]
            seeds = torch.tensor(drawn, dtype=torch.int64)
        return Visit(mb.keys, lengths, seeds, padded)

    def active_scheme(self) -> Scheme:
        """The scheme of this step: its stateless part in evaluation, raw where exact is asked."""
        if self.plan.train:
            return self.scheme
        return self.scheme.stateless() if self.plan.codec else Value(_RAW)

    def max_bytes(self, microbatch: int) -> int:
        """The most bytes of a micro-batch's message."""
        plan = self.plan
        rows = plan.microbatches[microbatch].rows
        known = (rows, plan.seq_len, plan.train, plan.codec)
        if known not in self._most:
            self._most[known] = self._max_bytes(rows)
        return self._most[known]

    def _max_bytes(self, rows: int) -> int:
        scheme = self.active_scheme()
        total = self.head_bytes(rows) + frame.CHECKSUM_BYTES
        for boundary in self.boundaries:
            if not self.travels(boundary):
                continue
            shape = boundary.shape_for(rows, self.plan.seq_len)
            # the other end may use a wider dtype than this one
            raw = math.prod(shape) * max(8, boundary.dtype.itemsize)
            if boundary.coded and scheme != Value(_RAW):
                raw = rows * scheme.row_nbytes(math.prod(shape[1:]), torch.float32)
            total += raw
        return max(total, _MIN_RECEIVE)

    def head_bytes(self, rows: int) -> int:
        """The most bytes before the payloads of a message."""
        tensors = sum(map(self.travels, self.boundaries))
        return frame.head_nbytes(tensors, rows)

    def error(self, microbatch: int, way: str, why: object) -> LinkError:
        return LinkError(
            f"{self.names.here}: no {self.what} of micro-batch {microbatch} in step "
            f"{self.plan.step} {way} {self.names.there}: {why}"
        )


@functools.lru_cache(maxsize=64)
def _no_seeds(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.int64)


def _seed(plan: StepPlan, place: Place, tensor: int, key: int | str) -> int:
    """64 bits for stochastic rounding of one row: a hash of all that tells it from others."""
    text = f"{plan.seed}:{plan.step}:{place.edge}:{int(place.direction)}:{tensor}:{key}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


class _Draft:
    """A foreseen message: all but its payload and its checksum is there."""

    __slots__ = ("foreseen", "hashed", "message", "payload", "tallies", "values")

    def __init__(
        self, foreseen: Foreseen, message: Message, head_nbytes: int, tallies: tuple[Tally, ...]
    ) -> None:
        self.foreseen, self.message, self.tallies = foreseen, message, tallies
        self.values = foreseen.form.values
        self.hashed = message.view[message.start : message.end - frame.CHECKSUM_BYTES]
        self.payload = native.address(self.hashed, head_nbytes)


class LinkSender(_Link):
    """The sending end of one directed link."""

    role = "sender"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.states: dict[int, Sender] = {
            b.index: self.scheme.sender() for b in self.boundaries if b.coded and self.travels(b)
        }
        self.counters = LinkCounters(
            self.place.edge, self.place.direction.name.lower(), str(self.scheme)
        )
        self._unsent: set[int] = set()
        self._drafts: dict[int, _Draft] = {}
        self._declared: set[tuple[Any, ...]] = set()  # what was found to fit
        #: Where the first gradient of this step that was not finite was found.
        self.flagged = ""

    def begin_step(self, plan: StepPlan) -> None:
        start = time.thread_time()
        self._drafts.clear()
        super().begin_step(plan)
        self.flagged = ""
        self._unsent = set() if self.silent else set(range(len(plan.microbatches))) - self.resting
        self.timers.encode_s += time.thread_time() - start

    def send(self, microbatch: int, tensors: Sequence[Tensor | None]) -> None:
        """Encode and send one micro-batch's tensors; returns without waiting for the link."""
        if self.silent:
            return
        if microbatch in self.resting:
            self.counters.rested += 1
            return
        start = time.thread_time()
        if len(tensors) != len(self.boundaries):
            raise ValueError(
                f"{self.names.here}: {len(tensors)} boundary tensors, "
                f"{len(self.boundaries)} were declared in output_args"
            )
        message: Any = self._as_foreseen(microbatch, tensors[0])
        ready = None
        if message is None:
            message, ready = self._message(microbatch, tensors)
        self.timers.encode_s += time.thread_time() - start
        try:
            self.transport.send(self.peer, self.channel + microbatch, message, ready)
        except TransportError as error:
            raise self.error(microbatch, "to", error) from error
        self._unsent.discard(microbatch)

    def _prepare(self, microbatch: int, foreseen: Foreseen, head: bytes) -> None:
        size = len(head) + foreseen.form.nbytes
        message = self.transport.room(size + frame.CHECKSUM_BYTES)
        message.start = self.transport.headroom
        message.end = message.start + size + frame.CHECKSUM_BYTES
        message.view[message.start : message.start + len(head)] = head
        tallies = self.counters.tallies(foreseen.form.kind)
        self._drafts[microbatch] = _Draft(foreseen, message, len(head), tallies)

    def _as_foreseen(self, microbatch: int, x: Tensor | None) -> Message | None:
        """The message of a micro-batch that comes out as foreseen; None where it does not."""
        draft = self._drafts.pop(microbatch, None)
        if draft is None or x is None:
            return None
        form, message = draft.foreseen.form, draft.message
        if not (form.fits(x) and draft.foreseen.encode(x.data_ptr(), draft.payload)):
            return None
        end = message.end
        message.view[end - frame.CHECKSUM_BYTES : end] = frame.checksum(draft.hashed)
        for tally in draft.tallies:
            tally.add(form.nbytes, end - message.start, draft.values)
        return message

    def _message(self, microbatch: int, tensors: Sequence[Tensor | None]) -> tuple[Any, Any]:
        """The message of a micro-batch, and the device event after which it is ready."""
        message, out, first = None, None, 0
        if self.device.type == "cpu":
            rows = self.plan.microbatches[microbatch].rows
            message = self.transport.room(self.max_bytes(microbatch))
            first = self.transport.headroom + self.head_bytes(rows)
            out = message.buffer[first : -frame.CHECKSUM_BYTES]
        sections: list[Section] = []
        values: list[int] = []
        for boundary, tensor in zip(self.boundaries, tensors, strict=True):
            if self.travels(boundary):
                for section in self._encode(boundary, tensor, microbatch, out):
                    sections.append(section)
                    values.append(self._values(section, boundary, microbatch))
                    out = None if out is None else out[section.payload.numel() :]
        place = self.place_of(microbatch)
        ready: Any = None
        handed: Any = message
        if message is not None and _in_line(sections, message, first):
            message.start = frame.seal(place, sections, message.view, first)
            message.end = first + sum([s.payload.numel() for s in sections]) + frame.CHECKSUM_BYTES
            total = message.end - message.start
        else:
            handed, ready = _to_host(sections, lambda: frame.build(place, sections))
            total = frame.nbytes(sections)
        self.counters.count(sections, total, values, self.plan.train)
        return handed, ready

    def _encode(
        self, boundary: Boundary, x: Tensor | None, microbatch: int, out: Tensor | None
    ) -> list[Section]:
        if x is None:
            return [Section(Kind.ABSENT, tensor=boundary.index)]
        self._check_declared(boundary, x, microbatch)
        if not boundary.coded:
            payload = _RAW.encode(x, out=out)
            found = [Section(Kind.VALUE, "raw", x.dtype, tuple(x.shape), payload)]
        else:
            try:
                found = self._encode_coded(boundary, x.detach(), microbatch, out)
            except NonFiniteError as error:
                where = (
                    f"{self.names.here}: {self.what} of micro-batch {microbatch}, boundary tensor "
                    f"{boundary.index}, step {self.plan.step}: {error}"
                )
                if self.place.direction == Direction.FORWARD:
                    raise NonFiniteError(where) from None
                self.flagged = self.flagged or where
                found = [Section(Kind.NONFINITE, "", x.dtype, tuple(x.shape))]
        for section in found:
            section.tensor = boundary.index
        return found

    def _check_declared(self, boundary: Boundary, x: Tensor, microbatch: int) -> None:
        """A larger tensor would not fit the receiver's buffer; gloo aborts its process on that."""
        rows = self.plan.microbatches[microbatch].rows
        known = (boundary.index, x.shape, x.dtype, rows, self.plan.seq_len)
        if known in self._declared:
            return
        most = boundary.shape_for(rows, self.plan.seq_len)
        same_kind = x.dtype.is_floating_point == boundary.dtype.is_floating_point
        fits = len(x.shape) == len(most) and all(map(operator.le, x.shape, most))
        # a coded tensor has its features whole; rows and positions may be fewer than declared
        features = 2 if len(most) > 2 else 1
        whole = not boundary.coded or tuple(x.shape[features:]) == most[features:]
        if not (fits and same_kind and whole) or (boundary.batched and x.shape[0] != rows):
            raise ValueError(
                f"{self.names.here}: boundary tensor {boundary.index} of micro-batch {microbatch} "
                f"is {x.dtype} of shape {tuple(x.shape)}; {boundary.dtype} of at most {most} was "
                "declared in output_args and input_args"
            )
        self._declared.add(known)

    def _encode_coded(
        self, boundary: Boundary, x: Tensor, microbatch: int, out: Tensor | None
    ) -> list[Section]:
        visit = self.visit(boundary, microbatch, tuple(x.shape))
        scheme = self.active_scheme()
        if isinstance(scheme, Value) and scheme.codec == _RAW and self.plan.train:
            valid = x if visit.valid is None else _valid(x, visit)
            if not bool(torch.isfinite(valid).all()):
                raise unfit_value(x, scheme, visit.valid, len(visit.lengths))
        state = self.states[boundary.index] if self.plan.train else scheme.sender()
        return state.encode(x, microbatch, visit, out)

    def _values(self, section: Section, boundary: Boundary, microbatch: int) -> int:
        """Tensor values that a section carries (padding left out)."""
        if section.kind == Kind.ABSENT:
            return 0
        if not boundary.coded:
            return math.prod(section.shape)
        visit = self.visit(boundary, microbatch, section.shape)
        rows = section.rows
        return visit.values if rows is None else sum([visit.lengths[r] for r in rows])

    def abort(self, kind: str, why: str) -> None:
        """Tell the receiver, on every message that it still expects, that none will come."""
        section = frame.abort_section(kind, why)
        for microbatch in sorted(self._unsent):
            parts = frame.build(self.place_of(microbatch), [section])
            self.transport.send(self.peer, self.channel + microbatch, parts)
        self._unsent.clear()


class LinkReceiver(_Link):
    """The receiving end of one directed link."""

    role = "receiver"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.states: dict[int, Receiver] = {
            b.index: self.scheme.receiver() for b in self.boundaries if b.coded and self.travels(b)
        }
        self.window = 1
        self.deadline = 60.0
        self._handles: dict[int, Handle] = {}
        self._next = 0
        self._expected: dict[int, tuple[Foreseen, bytes, Tensor]] = {}

    def begin_step(self, plan: StepPlan) -> None:
        """As the sender's; also announces the first ``window`` messages of the step."""
        start = time.thread_time()
        self._expected.clear()
        super().begin_step(plan)
        self._handles, self._next = {}, 0
        self.timers.decode_s += time.thread_time() - start
        self.post(self.window - 1)

    def post(self, until: int) -> None:
        """Announce the messages up to micro-batch ``until``."""
        while self._next <= until and self._next < len(self.plan.microbatches):
            if self.silent or self._next in self.resting:
                self._next += 1
                continue
            size = self.max_bytes(self._next)
            try:
                handle = self.transport.post_receive(self.peer, self.channel + self._next, size)
            except TransportError as error:
                raise self.error(self._next, "from", error) from error
            self._handles[self._next] = handle
            self._next += 1

    def receive(self, microbatch: int, wanted: bool = True) -> list[Tensor | None]:
        """One micro-batch's tensors, in order of the boundary; None for an absent gradient.

        ``wanted``: whether anybody will read them; what rests is None otherwise.

        Raises LinkError if they do not arrive in time or do not fit, PeerAborted with the other
        stage's reason if it gave up.
        """
        if self._next < len(self.plan.microbatches):
            self.post(microbatch + self.window - 1)
        if self.silent:
            return [None] * len(self.boundaries)
        if microbatch in self.resting:
            return [self._recall(self.boundaries[0], microbatch) if wanted else None]
        start = time.perf_counter()
        handle = self._handles.pop(microbatch)
        try:
            data = self.transport.wait(handle, self.deadline)
        except TransportError as error:
            raise self.error(microbatch, "from", error) from error
        self.timers.wait_s += time.perf_counter() - start
        arrived = time.thread_time()
        try:
            tensors = self._as_foreseen(microbatch, data) or self._tensors(microbatch, data)
        except (FrameError, ValueError) as error:
            raise self.error(microbatch, "from", error) from error
        self.transport.release(handle)  # what was decoded holds no part of it
        self.timers.decode_s += time.thread_time() - arrived
        return tensors

    def _recall(self, boundary: Boundary, microbatch: int) -> Tensor:
        """What this end remembers of a micro-batch that rests."""
        start = time.thread_time()
        shape = boundary.shape_for(self.plan.microbatches[microbatch].rows, self.plan.seq_len)
        visit = self.visit(boundary, microbatch, shape)
        x = self.states[boundary.index].recall(visit, shape, boundary.dtype)
        self.timers.decode_s += time.thread_time() - start
        return x.to(self.device)

    def _prepare(self, microbatch: int, foreseen: Foreseen, head: bytes) -> None:
        # the tensor too: many at once cost much less than each between two computations
        y = torch.empty(foreseen.form.shape, dtype=foreseen.form.dtype)
        self._expected[microbatch] = foreseen, head, y

    def _as_foreseen(self, microbatch: int, data: memoryview) -> list[Tensor | None] | None:
        """What a message holds that has come as foreseen; None where it has not."""
        if microbatch not in self._expected:
            return None
        foreseen, head, y = self._expected.pop(microbatch)
        if not frame.is_intact(data, head, foreseen.form.nbytes):
            return None
        return [y] if foreseen.decode(native.address(data, len(head)), y.data_ptr()) else None

    def _tensors(self, microbatch: int, data: memoryview) -> list[Tensor | None]:
        _, sections = frame.parse(data, self.place_of(microbatch))
        frame.raise_abort(sections)
        return self._decode_all(sections, microbatch)

    def _decode_all(self, sections: list[Section], microbatch: int) -> list[Tensor | None]:
        by_tensor: dict[int, list[Section]] = {}
        for section in sections:
            section.payload = section.payload.to(self.device)
            by_tensor.setdefault(section.tensor, []).append(section)
        unknown = set(by_tensor) - {b.index for b in self.boundaries if self.travels(b)}
        if unknown:
            raise FrameError(f"boundary tensor {min(unknown)} is not expected here")
        return [
            self._decode(b, by_tensor.get(b.index, []), microbatch) if self.travels(b) else None
            for b in self.boundaries
        ]

    def _decode(
        self, boundary: Boundary, sections: list[Section], microbatch: int
    ) -> Tensor | None:
        if not sections:
            raise FrameError(f"boundary tensor {boundary.index} is missing")
        head = sections[0]
        if head.kind == Kind.ABSENT:
            return None
        rows = self.plan.microbatches[microbatch].rows
        shape, most = head.shape, boundary.shape_for(rows, self.plan.seq_len)
        if len(shape) != len(most) or any(d > m for d, m in zip(shape, most, strict=True)):
            raise FrameError(
                f"boundary tensor {boundary.index} has shape {shape}; at most {most} was declared"
            )
        if head.kind == Kind.NONFINITE and self.place.direction == Direction.BACKWARD:
            return torch.full(shape, math.nan, dtype=boundary.dtype, device=self.device)
        if not boundary.coded:
            if len(sections) != 1 or head.codec != "raw" or head.kind != Kind.VALUE:
                raise FrameError(f"boundary tensor {boundary.index} should travel as it is")
            return _RAW.decode(head.payload, shape, head.dtype).to(boundary.dtype)
        visit = self.visit(boundary, microbatch, shape)
        state = self.states[boundary.index] if self.plan.train else self.active_scheme().receiver()
        return state.decode(sections, microbatch, visit).to(boundary.dtype)


class EdgeEnd:
    """One stage's end of an edge: it sends on one link and receives on the other."""

    def __init__(self, outgoing: LinkSender, incoming: LinkReceiver) -> None:
        self.outgoing, self.incoming = outgoing, incoming
        #: The other end, where it lives in this process.
        self.peer: EdgeEnd | None = None

    def begin_step(self, plan: StepPlan, receives: bool, sends: bool) -> None:
        """Start a step; gradients neither go nor come in evaluation."""
        if sends:
            self.outgoing.begin_step(plan)
        if receives:
            self.incoming.begin_step(plan)


def _valid(x: Tensor, visit: Visit) -> Tensor:
    """The values of ``x`` [rows, …] that travel, end to end."""
    return torch.cat([row.flatten()[:n] for row, n in zip(x, visit.lengths, strict=True)])


def _in_line(sections: list[Section], message: Message, first: int) -> bool:
    """Whether all payloads lie end to end in the message from ``first`` on."""
    at = message.buffer.data_ptr() + first
    for section in sections:
        size = section.payload.numel()
        if size and section.payload.data_ptr() != at:
            return False
        at += size
    return True


def _to_host(sections: list[Section], build: Callable[[], list[memoryview]]) -> tuple[Any, Any]:
    """(message, ready event): device payloads go through pinned memory without blocking."""
    if all(s.payload.device.type == "cpu" for s in sections):
        return build(), None
    for section in sections:
        if section.payload.device.type != "cpu":
            pinned = torch.empty(section.payload.shape, dtype=torch.uint8, pin_memory=True)
            section.payload = pinned.copy_(section.payload, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return build, event
