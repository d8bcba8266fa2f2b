"""The scheme contract: what of a tensor is handed to a codec, and the state that this needs.

A scheme is a frozen configuration; ``sender()`` and ``receiver()`` make the two ends' states for
one tensor of one directed link. Both ends call ``begin_step`` with the same visits, then one
``encode`` or ``decode`` a micro-batch, in any order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import xxhash
from torch import Tensor

from thinwire.codecs import Codec, codec
from thinwire.codecs.base import unfit_value
from thinwire.codecs.topk import TopK
from thinwire.errors import FrameError, SpecError
from thinwire.frame import Kind, Section
from thinwire.predict import Expectations
from thinwire.spec import Named
from thinwire.store import ReferenceStore

NOTHING_BESIDE: Mapping[str, Tensor] = MappingProxyType({})


class Visit(NamedTuple):
    """What both ends know of a tensor's rows in one micro-batch before it is sent.

    ``keys``: sample ids, one a row, or None where there are none. ``lengths``: values of each row
    that travel. ``seeds``: int64, one a row, for stochastic rounding. ``context``: of the tensors
    that ``Pipeline.step`` was given, what belongs to these rows. ``scale``: by what the step
    multiplies values, as a mean loss does gradients.
    """

    keys: tuple[int, ...] | None
    lengths: tuple[int, ...]
    seeds: Tensor
    padded: bool
    context: Mapping[str, Tensor] = NOTHING_BESIDE
    scale: float = 1.0

    @property
    def values(self) -> int:
        """How many values travel."""
        return sum(self.lengths)

    @property
    def keys_digest(self) -> int:
        """A 64-bit hash of the sample ids in order."""
        return keys_digest(self.keys or ())

    @property
    def valid(self) -> tuple[int, ...] | None:
        """``lengths`` for a codec: None where every row is full."""
        return self.lengths if self.padded else None


RAW = codec("raw")


def check_finite(x: Tensor, coder: object, lengths: Sequence[int] | None) -> None:
    """Raise NonFiniteError unless all values of ``x`` [rows, …] that travel are finite: ``raw``
    takes any."""
    rows = x.reshape(x.shape[0], -1) if x.dim() else x.reshape(1, 1)
    valid = [rows] if lengths is None else [r[:n] for r, n in zip(rows, lengths, strict=True)]
    if not all(bool(torch.isfinite(part).all()) for part in valid):
        raise unfit_value(x, coder, lengths, len(rows))


def needs_alone(name: str, *codecs: Codec) -> None:
    """Raise SpecError where payloads of one of ``codecs`` cannot be decoded by themselves."""
    for one in codecs:
        if not one.alone:
            raise SpecError(f"{name} cannot take {one}, which is decoded by another link's frames")


def keys_digest(keys: Sequence[int]) -> int:
    """A 64-bit hash of sample ids in order."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(keys)}q", *keys))


@dataclasses.dataclass(slots=True, eq=False)
class Form:
    """What both ends foresee of a tensor that travels as one section: its kind, shape, dtype, and
    the size of its payload."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int

    @property
    def values(self) -> int:
        """How many values travel."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Values of each row."""
        return math.prod(self.shape[1:])

    def fits(self, x: Tensor) -> bool:
        """Whether ``x`` is such a tensor, on the CPU, its values end to end."""
        return x.shape == self.shape and x.dtype == self.dtype and x.is_cpu and x.is_contiguous()


class Foreseen(ABC):
    """The short way of a micro-batch's tensor that will travel as one section, at one end.

    Made when the step begins, where many cost little; what is left for the message, between two
    computations that have emptied the caches, is a call of a kernel with ready addresses. Where
    the message comes out otherwise it goes the long way, by the end's ``encode`` or ``decode``.
    """

    def __init__(self, form: Form, entry: bytes) -> None:
        #: ``entry``: the section's in the frame's table.
        self.form, self.entry = form, entry

    @abstractmethod
    def encode(self, x: int, payload: Any) -> bool:
        """Encode ``x``; False, with all state untouched, where it cannot travel so."""

    @abstractmethod
    def decode(self, payload: Any, y: int) -> bool:
        """Decode into ``y``; False, with all state untouched, where the payload is invalid."""


class End(ABC):  # noqa: B024  its two roles are abstract
    """One tensor's state at one end of a link; this one has none."""

    #: What both ends remember of each sample, where they do.
    store: ReferenceStore | None = None
    #: Where the link that goes the other way takes its masks from, by micro-batch; None: it has no
    #: use for them. Bool [rows, n]: which values a message has transmitted.
    supports: dict[int, Tensor] | None = None
    #: What both ends expect of the tensor, where they do.
    learned: Expectations | None = None
    #: The same tensor's end of the link that goes forward, here, where this one wants to know what
    #: travelled there.
    activations: End | None = None
    #: Whether ``transmitted`` will be asked for.
    keeps: bool = False

    def begin_step(  # noqa: B027  stateless by default
        self, visits: Sequence[Visit], dense: bool = False
    ) -> None:
        """Called with the visits of all micro-batches of a training step, at both ends alike.

        ``dense``: all of them travel as they are, and leave the state that they would have left
        had the codecs lost nothing.
        """

    def end_step(self) -> None:  # noqa: B027  as above
        """The step counts, on all ranks: keep what was prepared in it. Left out for one that does
        not; then the next ``begin_step`` discards that."""

    def foresee(
        self, microbatch: int, visit: Visit, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Foreseen | None:
        """The short way of a micro-batch of the step, on the CPU; None where it has none."""
        return None

    def note_support(self, coder: Codec, section: Section, microbatch: int, visit: Visit) -> None:
        """Keep which values ``section``, all of a tensor, has transmitted."""
        if self.supports is not None:
            rows = len(visit.lengths)
            self.supports[microbatch] = coder.transmitted(
                section.payload, section.shape, section.dtype, rows, visit.valid
            )

    def transmitted(self, microbatch: int, width: int) -> Tensor | None:
        """What both ends hold of a micro-batch that travelled in this step, float32 [rows, width];
        None where they hold nothing, or not all of it."""
        return None

    def remembers(self, microbatch: int) -> bool:
        """Whether both ends hold a reference of each row of a micro-batch of the step."""
        return False

    def repair(self, keys: Sequence[int]) -> None:  # noqa: B027  as above
        """The two ends do not hold the same of ``keys``: forget them; their next visit says so."""

    def digest(self) -> int:
        """A hash of the shared state, equal to the other end's."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  as above
        """Restore ``state_dict``'s result."""


class Sender(End):
    """One tensor's sending end."""

    #: Whether ``encode`` is to leave in ``sent`` what the receiver will have of its tensor.
    measuring: bool = False
    sent: Tensor | None = None

    @functools.cached_property
    def gained(self) -> list[tuple[Kind, float, float]]:
        """Where that is measured: of values by kind, the energy to be coded without what both ends
        expect, and with it."""
        return []

    def as_it_is(self, x: Tensor, microbatch: int, visit: Visit, out: Tensor | None) -> Section:
        """``x`` in a dense step, as one section; raises NonFiniteError."""
        check_finite(x, RAW, visit.valid)
        payload = RAW.encode(x, len(visit.lengths), visit.valid, out=out)
        section = Section(Kind.DENSE, str(RAW), x.dtype, tuple(x.shape), payload)
        self.note_support(RAW, section, microbatch, visit)
        self.sent = x if self.measuring else None
        return section

    @abstractmethod
    def encode(
        self, x: Tensor, microbatch: int, visit: Visit, out: Tensor | None = None
    ) -> list[Section]:
        """Sections for ``x`` [rows, …]; raises NonFiniteError with all state untouched.

        Payloads lie end to end in ``out`` (1-D uint8) where it is given and has room for the most
        bytes that the scheme may take.
        """


class Receiver(End):
    """One tensor's receiving end."""

    @abstractmethod
    def decode(self, sections: list[Section], microbatch: int, visit: Visit) -> Tensor:
        """The tensor behind the sections of one tensor; raises FrameError if they do not fit."""

    def recall(self, visit: Visit, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What this end remembers of rows that it ``remembers``, which stays as it is."""
        raise NotImplementedError


class Keyed(NamedTuple):
    """What a scheme remembers of rows from step to step.

    ``by``: rows are told apart by sample id, or by their place in the batch. ``shared``: both ends
    hold the same; otherwise only the sender holds anything. ``kept``: in which precision.
    """

    by: Literal["sample", "slot"]
    shared: bool
    kept: str


@dataclasses.dataclass(frozen=True)
class Scheme(Named):
    """A frozen configuration that makes senders and receivers."""

    @property
    def keyed(self) -> Keyed | None:
        """What it remembers of rows; None where it is without state."""
        return None

    @property
    def support(self) -> TopK | None:
        """The codec whose frames tell which values they transmit; None where they do not."""
        return None

    @property
    def needs_keys(self) -> bool:
        """Whether rows are told apart by sample id."""
        return self.keyed is not None and self.keyed.by == "sample"

    @property
    def takes(self) -> frozenset[str]:
        """The names of the tensors of ``Visit.context`` that it needs in training."""
        return frozenset()

    @property
    def by_activations(self) -> bool:
        """Whether its ends want to know what the link that goes forward has transmitted."""
        return False

    @property
    def tells(self) -> bool:
        """Whether ``transmitted`` gives the same at both ends: gradients may be predicted by it."""
        return False

    @property
    def recalls(self) -> bool:
        """Whether a receiver can give a sample's last value again."""
        return self.keyed is not None and self.needs_keys and self.keyed.shared

    @property
    def sparse(self) -> bool:
        """Whether the receiver computes on a tensor of which values were set to zero."""
        return False

    @property
    def stochastic(self) -> bool:
        """Whether a codec of it draws noise, and visits need their seeds."""
        return False

    @abstractmethod
    def sender(self) -> Sender:
        """A fresh sending end."""

    @abstractmethod
    def receiver(self) -> Receiver:
        """A fresh receiving end."""

    @abstractmethod
    def stateless(self) -> Scheme:
        """What codes frames that must touch no state, as in evaluation."""

    def evaluated(self) -> Scheme:
        """What codes frames in evaluation where the step's context is known there, which expects
        what this one has learned to; ``stateless()`` where it learns nothing."""
        return self.stateless()

    @abstractmethod
    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        """The most payload bytes of a row of up to ``n`` values."""

    def told_nbytes(self, shape: Sequence[int]) -> int:
        """The most payload bytes beside the rows of a tensor of ``shape``."""
        return 0


def expect_sections(
    sections: list[Section], allowed: Sequence[Kind], rows: int, what: str
) -> tuple[int, ...]:
    """Check that the sections cover each of ``rows`` rows once; returns their common shape."""
    if not sections:
        raise FrameError(f"{what}: the frame has no section for it")
    shape = sections[0].shape
    covered: list[int] = []
    for section in sections:
        if section.kind not in allowed or section.shape != shape:
            raise FrameError(
                f"{what}: a {section.kind.name} section of shape {section.shape} does not fit"
            )
        if not shape or shape[0] != rows:
            raise FrameError(f"{what}: shape {shape}, {rows} rows were expected")
        covered += range(rows) if section.rows is None else section.rows
    if sorted(covered) != list(range(rows)):
        raise FrameError(f"{what}: its sections do not cover each of the {rows} rows once")
    return shape
