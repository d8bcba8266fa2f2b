"""The receiving end of a link: receive, check, decode."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from thinwire import frame, native
from thinwire.boundary import Boundary, StepPlan
from thinwire.codecs.base import saturated
from thinwire.edge.link import Link
from thinwire.edge.returned import fault_of_tensor
from thinwire.errors import FrameError
from thinwire.frame import Direction, Kind, Section
from thinwire.network import Handle, TransportError
from thinwire.schemes import Foreseen, Receiver
from thinwire.schemes.base import RAW


class LinkReceiver(Link):
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

    def _spent(self, seconds: float) -> None:
        self.timers.decode_s += seconds

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
            return RAW.decode(head.payload, shape, head.dtype).to(boundary.dtype)
        visit, scheme = self.visit(boundary, microbatch, shape), self.active_scheme()
        state, number = self.state_for(boundary, microbatch, visit)
        y: Tensor = state.decode(sections, number, visit)
        fault = fault_of_tensor(y, shape)
        if fault is not None:
            raise ValueError(f"scheme {scheme}: {fault}")
        if self.scaled_by is not None:
            y = saturated(y.to(torch.float32) * self.scaled_by, boundary.dtype)
        return y.to(boundary.dtype)
