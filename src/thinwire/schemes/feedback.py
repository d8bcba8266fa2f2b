"""``ef(codec)``, ``efmixed(topk:…)``: what coding has lost of a row is sent with it the next time.

Seide et al. 2014, "1-Bit Stochastic Gradient Descent". The sender holds a residual e of each row,
at first zero; y <- decode(codec.encode(x + e)); e <- x + e - y. The receiver computes on y, and
holds nothing. ``efmixed`` (Rudakov et al. 2024) halves the share of ``topk`` between x and e, so
that an old e does not displace x: y <- top(x) + top(e).

Rows are told apart by sample: then e was lost of the same sample, a visit ago. With ``key=slot``,
the paper's variant, it was lost of whatever stood in the same place of the batch before.

Residuals advance once a step, if it counts on all ranks. A sample's second occurrence in a step,
one for which there is no room, and evaluation, go without.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs.base import saturated
from thinwire.codecs.keeping import KEEPINGS
from thinwire.codecs.topk import TopK
from thinwire.errors import FrameError, SpecError
from thinwire.frame import Kind, Section
from thinwire.schemes.base import (
    Keyed,
    Receiver,
    Scheme,
    Sender,
    Visit,
    check_finite,
    expect_sections,
    needs_alone,
)
from thinwire.schemes.rows import Space, as_rows, keys_of, lengths_at, rows_at, seeds_at
from thinwire.schemes.value import Value, ValueReceiver
from thinwire.spec import register
from thinwire.store import ReferenceStore
from thinwire.store import Visit as Mode


@dataclasses.dataclass(frozen=True)
class Feedback(Scheme):
    """What ``ef`` and ``efmixed`` share; ``residual``: in which precision residuals are kept."""

    codec: Codec
    key: Literal["sample", "slot"] = "sample"
    residual: Literal["fp32", "bf16", "int8", "int4"] = "fp32"

    def __post_init__(self) -> None:
        needs_alone("error feedback", self.codec)

    @property
    def keyed(self) -> Keyed:
        return Keyed(self.key, shared=False, kept=self.residual)

    @property
    def sparse(self) -> bool:
        return self.codec.sparse

    @property
    def stochastic(self) -> bool:
        return self.codec.stochastic

    def stateless(self) -> Scheme:
        return Value(self.codec)


@register("scheme", "ef")
@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """The value and what was lost before it, through one codec."""

    @property
    def support(self) -> TopK | None:
        return self.codec if isinstance(self.codec, TopK) else None

    def sender(self) -> Sender:
        return _Sender(self)

    def receiver(self) -> Receiver:
        return ValueReceiver(self.codec)

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return self.codec.most_row_nbytes(n, dtype)


@register("scheme", "efmixed")
@dataclasses.dataclass(frozen=True)
class MixedFeedback(Feedback):
    """Half of the share for the value, half for what was lost before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.codec, TopK):
            raise SpecError(f"efmixed halves the share of topk, and {self.codec} has none")

    @property
    def half(self) -> Codec:
        """What codes a value that has a residual, and that residual."""
        assert isinstance(self.codec, TopK)
        return self.codec.halved()

    def sender(self) -> Sender:
        return _MixedSender(self)

    def receiver(self) -> Receiver:
        return _MixedReceiver(self)

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return max(self.codec.most_row_nbytes(n, dtype), 2 * self.half.most_row_nbytes(n, dtype))


class _FeedbackSender(Sender):
    """The residuals, and those that the step has prepared."""

    store: ReferenceStore

    def __init__(self, scheme: Feedback) -> None:
        self._codec, self._keeping = scheme.codec, KEEPINGS[scheme.residual]
        self.store = ReferenceStore(self._keeping)
        self._kept: list[list[bool]] = []  # rows whose residual is kept, by micro-batch
        self._dense = False
        self._lost: dict[int, tuple[Tensor, int]] = {}
        self._gone: list[int] = []

    def begin_step(self, visits: Sequence[Visit], dense: bool = False) -> None:
        self._lost, self._gone = {}, []
        microbatches = [(keys_of(visit), visit.lengths) for visit in visits]
        plan = self.store.plan(microbatches)
        self.store.begin(microbatches, plan)
        self._kept = [[m in (Mode.FIRST, Mode.AGAIN) for m in modes] for modes in plan.visits]
        self._dense = dense

    def encode(
        self, x: Tensor, microbatch: int, visit: Visit, out: Tensor | None = None
    ) -> list[Section]:
        keys = keys_of(visit)
        kept = [row for row, is_kept in enumerate(self._kept[microbatch]) if is_kept]
        if self._dense:
            section = self.as_it_is(x, microbatch, visit, out)
            self._gone += [keys[row] for row in kept]
            return [section]
        check_finite(x, self._codec, visit.valid)
        values = as_rows(x)
        held = self.store.lengths
        later = [row for row in kept if held.get(keys[row]) == visit.lengths[row]]
        residual = torch.zeros(values.shape, device=values.device)
        if later:
            before = self.store.rows([keys[row] for row in later])
            residual[later] = self._keeping.read(
                before, lengths_at(visit, later), values.shape[1]
            ).to(values.device)
        sections, sent = self._code(values, residual, later, microbatch, visit, Space(out))
        for section in sections:
            section.shape = tuple(x.shape)
        self.sent = sent if self.measuring else None
        lost = self._keeping.keep(residual.add_(values).sub_(sent), visit.valid)
        self._lost |= {keys[row]: (lost[row], visit.lengths[row]) for row in kept}
        return sections

    @abstractmethod
    def _code(
        self,
        values: Tensor,
        residual: Tensor,
        later: Sequence[int],
        microbatch: int,
        visit: Visit,
        space: Space,
    ) -> tuple[list[Section], Tensor]:
        """Sections without their shape, and what the receiver will have of them.

        ``values`` [rows, n], ``residual`` the same in float32, not zero but in the rows ``later``.
        """

    def end_step(self) -> None:
        self.store.drop(self._gone)
        keys = list(self._lost)
        self.store.put(keys, [self._lost[k][0] for k in keys], [self._lost[k][1] for k in keys])
        self._lost, self._gone = {}, []

    def state_dict(self) -> dict[str, Any]:
        return self.store.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.store.load_state_dict(state)


def _coded(
    coder: Codec, x: Tensor, visit: Visit, rows: Sequence[int], space: Space
) -> tuple[Tensor, Tensor]:
    """The payload of ``rows`` of ``x`` [all rows, n], and what comes out at the other end."""
    part, lengths = rows_at(x, rows), lengths_at(visit, rows)
    payload = coder.encode(part, len(rows), lengths, seeds_at(visit, rows), space.rest)
    space.took(payload)
    return payload, coder.decode(payload, part.shape, x.dtype, len(rows), lengths)


class _Sender(_FeedbackSender):
    def _code(
        self,
        values: Tensor,
        residual: Tensor,
        later: Sequence[int],
        microbatch: int,
        visit: Visit,
        space: Space,
    ) -> tuple[list[Section], Tensor]:
        total = saturated(values.to(torch.float32) + residual, values.dtype).to(values.dtype)
        payload, sent = _coded(self._codec, total, visit, range(len(values)), space)
        section = Section(Kind.VALUE, str(self._codec), values.dtype, tuple(values.shape), payload)
        self.note_support(self._codec, section, microbatch, visit)
        return [section], sent


class _MixedSender(_FeedbackSender):
    def __init__(self, scheme: MixedFeedback) -> None:
        super().__init__(scheme)
        self._half = scheme.half

    def _code(
        self,
        values: Tensor,
        residual: Tensor,
        later: Sequence[int],
        microbatch: int,
        visit: Visit,
        space: Space,
    ) -> tuple[list[Section], Tensor]:
        sent = torch.empty_like(values)
        met = set(later)
        first = [row for row in range(len(values)) if row not in met]
        sections = []
        if first:
            payload, sent[first] = _coded(self._codec, values, visit, first, space)
            sections.append(self._section(Kind.VALUE, self._codec, values, first, payload))
        if later:
            payload, one = _coded(self._half, values, visit, later, space)
            sections.append(self._section(Kind.VALUE, self._half, values, later, payload))
            rest = saturated(residual, values.dtype).to(values.dtype)
            payload, other = _coded(self._half, rest, visit, later, space)
            sections.append(self._section(Kind.RESIDUAL, self._half, values, later, payload))
            sent[list(later)] = _together(one, other)
        return sections, sent

    def _section(
        self, kind: Kind, coder: Codec, values: Tensor, rows: Sequence[int], payload: Tensor
    ) -> Section:
        where = None if len(rows) == len(values) else list(rows)
        return Section(kind, str(coder), values.dtype, payload=payload, rows=where)


def _together(one: Tensor, other: Tensor) -> Tensor:
    """The sum that both ends compute, in the dtype of both."""
    return saturated(one.to(torch.float32) + other.to(torch.float32), one.dtype).to(one.dtype)


class _MixedReceiver(Receiver):
    def __init__(self, scheme: MixedFeedback) -> None:
        self._whole, self._half = scheme.codec, scheme.half
        self._dense = ValueReceiver(scheme.codec)

    def begin_step(self, visits: Sequence[Visit], dense: bool = False) -> None:
        self._dense.begin_step(visits, dense)

    def decode(self, sections: list[Section], microbatch: int, visit: Visit) -> Tensor:
        if self._dense.dense:
            return self._dense.decode(sections, microbatch, visit)
        count = len(visit.lengths)
        values = [s for s in sections if s.kind == Kind.VALUE]
        shape = expect_sections(values, (Kind.VALUE,), count, "a value")
        halves = [s for s in values if s.codec == str(self._half)]
        rests = [s for s in sections if s.kind != Kind.VALUE]
        if len(halves) > 1 or len(values) - len(halves) > 1 or len(rests) != len(halves):
            raise FrameError("a residual does not belong to a value, or a value lacks one")
        head = values[0]
        y = torch.empty((count, math.prod(shape[1:])), dtype=head.dtype, device=head.payload.device)
        for section in values:
            coder = self._half if section in halves else self._whole
            rows, part = self._decode(section, coder, head, visit)
            if section in halves:
                (rest,) = rests
                where, lost = self._decode(rest, self._half, head, visit)
                if where != rows or rest.kind != Kind.RESIDUAL:
                    raise FrameError("a residual is of other rows than its value")
                part = _together(part, lost)
            y[rows] = part
        return y.view(shape)

    def _decode(
        self, section: Section, coder: Codec, head: Section, visit: Visit
    ) -> tuple[list[int], Tensor]:
        """The rows of a section, and their values."""
        rows = list(range(len(visit.lengths))) if section.rows is None else section.rows
        fits = section.codec == str(coder) and section.dtype == head.dtype
        if not fits or section.shape != head.shape:
            raise FrameError(f"coded as {section.codec!r}, this end expects {coder}")
        shape = len(rows), math.prod(section.shape[1:])
        lengths = lengths_at(visit, rows)
        return rows, coder.decode(section.payload, shape, head.dtype, len(rows), lengths)
