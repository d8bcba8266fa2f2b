"""What the two ends of one directed link have in common: its state, and what a step means to it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import frame
from thinwire.boundary import Boundary, StepPlan
from thinwire.counters import Timers
from thinwire.errors import LinkError
from thinwire.frame import Direction, Place
from thinwire.network import Transport
from thinwire.predict import Still
from thinwire.schemes import Foreseen, Receiver, Scheme, Sender, Value, Visit
from thinwire.schemes.base import RAW
from thinwire.store import ReferenceStore
from thinwire.store.references import PARTS

#: A frame that says why its sender gave up must fit into every posted receive.
_MIN_RECEIVE = 4096


@dataclasses.dataclass(frozen=True)
class Names:
    """How an error names this end and the other."""

    here: str
    there: str


class Link(ABC):
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
        #: Whether the context of an evaluation has what the scheme takes.
        self._informed = False
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
        """Bytes of all references of a sample at the declared maximum; none where they are few, one
        for each place in the batch."""
        if not self.scheme.needs_keys:
            return 0
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
            self._informed = all(self._evaluated.takes <= set(m.context) for m in plan.microbatches)
            return
        for boundary in self.boundaries:
            if boundary.index in self.states:
                state = self.states[boundary.index]
                shapes = [boundary.shape_for(mb.rows, plan.seq_len) for mb in plan.microbatches]
                visits = [self.visit(boundary, k, shape) for k, shape in enumerate(shapes)]
                state.begin_step(visits, plan.dense)
                if len(self.boundaries) == 1:
                    self.resting = self._at_rest(state)
                    if self.device.type == "cpu" and self.scaled_by is None:
                        self._foresee(state, visits, shapes, boundary.dtype)

    def end_step(self) -> None:
        """The step counts, on all ranks."""
        start = time.thread_time()
        for state in self.states.values():
            state.end_step()
        self._spent(time.thread_time() - start)

    @abstractmethod
    def _spent(self, seconds: float) -> None:
        """Count CPU time that the codec's end here has taken."""

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

    def try_context(self, context: Mapping[str, Tensor], rows: int, seq_len: int | None) -> None:
        """Raise ValueError where the context of a micro-batch of ``rows`` rows is not what the
        scheme makes ids of."""
        for boundary in self.boundaries:
            state = self.states.get(boundary.index)
            if state is not None and state.learned is not None:
                state.learned.try_out(context, boundary.shape_for(rows, seq_len))

    @property
    def scaled_by(self) -> float | None:
        """What values here are divided by before they are coded, and multiplied by after: the scale
        of the loss, which may change, where gradients of one step are of use in another."""
        return None if self._keeps_no_scale else self.plan.loss_scale

    @functools.cached_property
    def _keeps_no_scale(self) -> bool:
        """Whether nothing of a step's scale stays here: of activations, and without state."""
        return self.place.direction == Direction.FORWARD or self.scheme.stateless() == self.scheme

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
            keys: Sequence[Any] = mb.keys or [f"{microbatch}.{row}" for row in range(mb.rows)]
            drawn = [_seed(self.plan, self.place, boundary.index, key) for key in keys]
            seeds = torch.tensor(drawn, dtype=torch.int64)
        return Visit(
            self._keys(microbatch), lengths, seeds, padded, mb.context, self._scale_of(shape)
        )

    def _scale_of(self, shape: tuple[int, ...]) -> float:
        """By what the step multiplies values: gradients are those of a mean over positions."""
        plan = self.plan
        if self.place.direction == Direction.FORWARD:
            return 1.0
        whole = plan.microbatches[0].lengths is None and len(shape) == 3
        positions = plan.positions * (shape[1] if whole else 1)
        return 1.0 / max(positions, 1)

    def _keys(self, microbatch: int) -> tuple[int, ...] | None:
        """What tells the rows of a micro-batch apart: sample ids, or places in the batch."""
        parts = self.plan.microbatches
        if not self.by_slot:
            return parts[microbatch].keys
        first = sum(mb.rows for mb in parts[:microbatch])
        return tuple(range(first, first + parts[microbatch].rows))

    @functools.cached_property
    def by_slot(self) -> bool:
        """Whether rows are told apart by their places in the batch."""
        keyed = self.scheme.keyed
        return keyed is not None and keyed.by == "slot"

    @property
    def shares(self) -> bool:
        """Whether both ends hold the same of each key."""
        return self.scheme.keyed is not None and self.scheme.keyed.shared

    def own_keys(self, sample_ids: Sequence[int]) -> Sequence[int]:
        """The keys here of a batch of these samples."""
        return range(len(sample_ids)) if self.by_slot else sample_ids

    def active_scheme(self) -> Scheme:
        """The scheme of this step: in evaluation what moves no state, raw where exact is asked."""
        if self.plan.train:
            return self.scheme
        if not self.plan.codec:
            return Value(RAW)
        return self._evaluated if self._informed else self.scheme.stateless()

    @functools.cached_property
    def _evaluated(self) -> Scheme:
        return self.scheme.evaluated()

    def state_for(self, boundary: Boundary, microbatch: int, visit: Visit) -> tuple[Any, int]:
        """The end for a micro-batch's tensor, and the micro-batch's number there: in evaluation one
        of its own, which expects what is expected in training, and is then gone."""
        state = self.states[boundary.index]
        if self.plan.train:
            return state, microbatch
        scheme = self.active_scheme()
        end: Sender | Receiver = scheme.sender() if self.role == "sender" else scheme.receiver()
        if end.learned is None or state.learned is None:
            return end, microbatch
        end.learned = Still(state.learned)
        end.begin_step([visit])
        return end, 0

    def max_bytes(self, microbatch: int) -> int:
        """The most bytes of a micro-batch's message."""
        plan = self.plan
        rows = plan.microbatches[microbatch].rows
        known = (rows, plan.seq_len, plan.train, plan.codec, plan.dense, self._informed)
        if known not in self._most:
            self._most[known] = self._max_bytes(rows)
        return self._most[known]

    def _max_bytes(self, rows: int) -> int:
        total = self.head_bytes(rows) + frame.CHECKSUM_BYTES
        total += sum(self.max_payload(b, rows) for b in self.boundaries if self.travels(b))
        return max(total, _MIN_RECEIVE)

    def max_payload(self, boundary: Boundary, rows: int) -> int:
        """The most bytes of a tensor of a micro-batch of ``rows`` rows."""
        scheme = self.active_scheme()
        shape = boundary.shape_for(rows, self.plan.seq_len)
        if boundary.coded and scheme != Value(RAW) and not self.plan.dense:
            told = scheme.told_nbytes(shape)
            return told + rows * scheme.row_nbytes(math.prod(shape[1:]), torch.float32)
        # the other end may use a wider dtype than this one
        return math.prod(shape) * max(8, boundary.dtype.itemsize)

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
