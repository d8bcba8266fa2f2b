"""The sending end of a link: encode, frame, send, count."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire import frame, native
from thinwire.boundary import Boundary, StepPlan
from thinwire.counters import LinkCounters, Tally, add_gains
from thinwire.edge.fidelity import Fidelity
from thinwire.edge.link import Link
from thinwire.edge.returned import fault_of_sections
from thinwire.errors import NonFiniteError
from thinwire.frame import Direction, Kind, Section
from thinwire.network import Message, TransportError
from thinwire.schemes import Foreseen, Sender, Value
from thinwire.schemes.base import RAW, check_finite


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


class LinkSender(Link):
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
        #: What coding has lost in this step, if that is measured.
        self.fidelity: Fidelity | None = None

    def begin_step(self, plan: StepPlan) -> None:
        start = time.thread_time()
        self._drafts.clear()
        self.fidelity = Fidelity() if plan.measure else None
        for state in self.states.values():
            state.measuring = plan.measure
        super().begin_step(plan)
        self.flagged = ""
        self._unsent = set() if self.silent else set(range(len(plan.microbatches))) - self.resting
        self.timers.encode_s += time.thread_time() - start

    def _spent(self, seconds: float) -> None:
        self.timers.encode_s += seconds

    def send(self, microbatch: int, tensors: Sequence[Tensor | None]) -> None:
        """Encode and send one micro-batch's tensors; returns without waiting for the link."""
        if self.silent:
            return
        if microbatch in self.resting:
            self._count_rest(microbatch)
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

    def _count_rest(self, microbatch: int) -> None:
        """Nothing is sent of a micro-batch, since the receiver remembers it."""
        rows, length = self.plan.microbatches[microbatch].rows, self.plan.seq_len
        self.counters.rested += 1
        for boundary in self.boundaries:
            visit = self.visit(boundary, microbatch, boundary.shape_for(rows, length))
            self.counters.rested_values += sum(visit.lengths)

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
            payload = RAW.encode(x, out=out)
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
        if isinstance(scheme, Value) and scheme.codec == RAW and self.plan.train:
            check_finite(x, scheme, visit.valid)
        state, number = self.state_for(boundary, microbatch, visit)
        if self.scaled_by is not None:
            x = x.to(torch.float32) / self.scaled_by
        sections: list[Section] = state.encode(x, number, visit, out)
        most = self.max_payload(boundary, len(visit.lengths))
        fault = fault_of_sections(sections, x.shape, most)
        if fault is not None:
            raise ValueError(
                f"{self.names.here}: scheme {scheme}, {self.what} of micro-batch {microbatch}, "
                f"step {self.plan.step}: {fault}"
            )
        if self.fidelity is not None and state.sent is not None:
            start = time.thread_time()
            self.fidelity.add(x, state.sent, visit.valid)
            for gained in (self.fidelity.gained, self.counters.gained):
                add_gains(gained, state.gained)
            state.gained.clear()
            state.sent = None
            self.timers.encode_s -= time.thread_time() - start  # it belongs to no codec
        return sections

    def _values(self, section: Section, boundary: Boundary, microbatch: int) -> int:
        """Tensor values that a section carries (padding left out); what was lost of values before
        is none of them."""
        if section.kind == Kind.RESIDUAL:
            return 0
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
