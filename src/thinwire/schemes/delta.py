"""``delta(change, first=int8, second=change)``: the change since the sample's last visit (AQ-SGD).

Wang et al. 2022, "Fine-tuning Language Models over Slow Networks using Activation Compression
with Guarantees", Algorithm 1. Both ends hold, for each sample, the reference m: what the receiver
has computed on at the last visit. On a visit with value x

1. seen for the first time: y <- decode(first.encode(x));
2. later: y <- m + decode(change.encode(x - m)), a closed loop, since m includes old errors; at its
   second visit, where the change is largest, by ``second``;
3. where the change has more energy than the value: y <- decode(second.encode(x));
4. where the change is less than an int8 reference is off anyway: y <- m, and only that is sent;
5. the receiver computes on y; the sender back-propagates through its exact x;
6. m <- y as ``ref`` keeps it: fp32, bf16, int8 or int4.

"First" is per sample, not per epoch. A sample's second occurrence in a step, one for which there
is no room, and evaluation, send a value in the ``first`` codec and leave m alone. Both ends add the
same decoded payload with one addition a value, and keep the sum by the same function, so their
copies are equal to the bit.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from thinwire.codecs import Codec, codec
from thinwire.codecs.base import saturated, unfit_value
from thinwire.codecs.keeping import KEEPINGS
from thinwire.errors import FrameError, NonFiniteError
from thinwire.frame import Kind, Section
from thinwire.schemes.base import (
    Foreseen,
    Form,
    Receiver,
    Scheme,
    Sender,
    Visit,
    expect_sections,
    keys_digest,
)
from thinwire.schemes.short import ForeseenChange, ForeseenFirst, Rows, Way
from thinwire.schemes.value import Value
from thinwire.spec import register
from thinwire.store import Held, ReferenceStore
from thinwire.store import Visit as Mode

#: Not float32: the first epoch would otherwise bound the speed-up of the whole run.
FIRST_VISIT = codec("int8")
RAW = codec("raw")
_CHANGES = (Kind.CHANGE, Kind.SECOND)
_IN_SECOND = (Kind.SECOND, Kind.RESEED)
_IN_CHANGE = (Kind.CHANGE, Kind.SAME)


@register("scheme", "delta")
@dataclasses.dataclass(frozen=True)
class Delta(Scheme):
    """``change`` codes the later visits, ``first`` each sample's first, ``second`` the one after;
    ``ref`` keeps what both ends remember."""

    needs_keys: ClassVar[bool] = True

    change: Codec
    first: Codec = FIRST_VISIT
    second: Codec = dataclasses.field(
        default=None,  # type: ignore[assignment]  # filled in
        metadata={"derive": operator.attrgetter("change")},
    )
    ref: Literal["fp32", "bf16", "int8", "int4"] = "int8"

    def __post_init__(self) -> None:
        if self.second is None:
            object.__setattr__(self, "second", self.change)  # type: ignore[unreachable]

    @property
    def stochastic(self) -> bool:
        return any(c.stochastic for c in (self.change, self.first, self.second))

    def sender(self) -> Sender:
        return _DeltaSender(self)

    def receiver(self) -> Receiver:
        return _DeltaReceiver(self)

    def stateless(self) -> Scheme:
        return Value(self.first)

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        codecs = (self.first, self.second, self.change)
        return max(c.most_row_nbytes(n, torch.float32) for c in codecs)

    def codec_of(self, kind: Kind) -> Codec:
        """The codec in which sections of ``kind`` travel."""
        if kind in _IN_SECOND:
            return self.second
        return self.change if kind in _IN_CHANGE else self.first


_DELTA_KINDS = (
    *(Kind.VALUE, Kind.FIRST, Kind.REPAIR),
    *(Kind.CHANGE, Kind.SECOND, Kind.RESEED, Kind.SAME),
)
_KINDS = {
    Mode.FIRST: Kind.FIRST,
    Mode.AGAIN: Kind.CHANGE,
    Mode.REPEAT: Kind.VALUE,
    Mode.UNKEPT: Kind.VALUE,
}

#: What a receiver may have planned of rows that come as these. That a first visit is a repair is
#: known only to an end that has dropped the sample, which the other may never have had.
_PLANNED = {kind: (kind,) for kind in _DELTA_KINDS} | {
    Kind.RESEED: _CHANGES,
    Kind.SAME: _CHANGES,
    Kind.REPAIR: (Kind.FIRST, Kind.REPAIR),
    Kind.FIRST: (Kind.FIRST, Kind.REPAIR),
}


def _least(dtype: torch.dtype) -> float:
    """The part of a value's energy below which a change is lost in the value's own rounding."""
    return (torch.finfo(dtype).eps / 2) ** 2


class _DeltaEnd:
    """What both ends share: the references, the step's plan, and how they move.

    New references are made beside the old ones, and put in their place once the whole tensor is
    coded: an error leaves no trace, and what was replaced is room for the next.
    """

    def __init__(self, scheme: Delta) -> None:
        self.scheme, self.keeping = scheme, KEEPINGS[scheme.ref]
        self.store = ReferenceStore(self.keeping)
        self._plan: list[list[Kind]] = []
        self._spare: dict[int, list[Tensor]] = {}  # by length
        self._visits: tuple[Visit, ...] = ()
        self._ways: dict[tuple[Any, ...], Way | None] = {}
        self._spare_rows: Rows | None = None
        self._repaired: set[int] = set()
        self.names = {kind: str(scheme.codec_of(kind)) for kind in _DELTA_KINDS}

    def begin_step(self, visits: Sequence[Visit]) -> None:
        microbatches = [(_keys(v), v.lengths) for v in visits]
        plan = self.store.plan(microbatches)
        self.store.begin(microbatches, plan)
        self._plan = [[_KINDS[mode] for mode in modes] for modes in plan.visits]
        if self.scheme.second != self.scheme.change:
            self._mark_seconds(visits)
        if self._repaired:
            self._mark_repairs(visits)
        self._visits = tuple(visits)

    def remembers(self, microbatch: int) -> bool:
        kinds = self._plan[microbatch]
        return bool(kinds) and all(kind in _CHANGES for kind in kinds)

    def repair(self, keys: Sequence[int]) -> None:
        self.store.drop(keys)
        self._repaired.update(keys)

    def _mark_seconds(self, visits: Sequence[Visit]) -> None:
        for kinds, visit in zip(self._plan, visits, strict=True):
            for row, version in enumerate(self.store.versions(_keys(visit))):
                if kinds[row] == Kind.CHANGE and version == 1:
                    kinds[row] = Kind.SECOND

    def _mark_repairs(self, visits: Sequence[Visit]) -> None:
        for kinds, visit in zip(self._plan, visits, strict=True):
            for row, key in enumerate(_keys(visit)):
                if kinds[row] == Kind.FIRST and key in self._repaired:
                    kinds[row] = Kind.REPAIR
                    self._repaired.discard(key)

    def foresee(
        self, microbatch: int, visit: Visit, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Foreseen | None:
        kinds = self._plan[microbatch]
        if visit.padded or not kinds or kinds.count(kinds[0]) < len(kinds):
            return None
        make = _SHORT.get(kinds[0])
        if make is None:
            return None
        known = (kinds[0], shape, dtype)
        if known not in self._ways:
            coder = self.scheme.codec_of(kinds[0])
            self._ways[known] = Way.of(kinds[0], coder, self.keeping, shape, dtype, _least(dtype))
        way = self._ways[known]
        return None if way is None else make(way, self, _keys(visit))

    def kinds(self, microbatch: int, visit: Visit) -> list[Kind]:
        """The kind of each row, as planned unless its length came out otherwise.

        A sender may still turn changes into RESEED or SAME.
        """
        kinds = list(self._plan[microbatch])
        if visit is self._visits[microbatch]:
            return kinds
        held = self.store.lengths
        for row, (key, n) in enumerate(zip(_keys(visit), visit.lengths, strict=True)):
            if kinds[row] in _CHANGES and held.get(key) != n:
                kinds[row] = Kind.FIRST
        return kinds

    def room(self, before: Sequence[Tensor]) -> list[Tensor]:
        """A tensor like each of ``before``, for what it will become."""
        spare = self._spare
        return [
            held.pop() if (held := spare.get(row.numel())) else torch.empty_like(row)
            for row in before
        ]

    def rows_like(self, form: Form) -> Rows:
        """Room for the references of a message of this form, which are to move."""
        spare = self._spare_rows
        if spare is None or spare.form is not form:
            rows = [self.keeping.empty(form.width) for _ in range(form.shape[0])]
            spare = self._spare_rows = Rows(form, rows)
        return spare

    def move(self, held: Sequence[Held], before: Rows, after: Rows) -> None:
        """The references ``held`` are ``after`` from now on, and ``before`` is room."""
        free = [one.renew(row) for one, row in zip(held, after.rows, strict=True)]
        self._spare_rows = before if all(free) else None

    def put(self, keys: Sequence[int], rows: Sequence[Tensor], values: Sequence[int]) -> None:
        """The references of ``keys`` are ``rows`` from now on."""
        for old in self.store.put(keys, rows, values):
            spare = self._spare.setdefault(old.numel(), [])
            if len(spare) < len(rows):  # more is never asked for at once
                spare.append(old)

    def settle(
        self,
        kind: Kind,
        keys: Sequence[int],
        references: list[Tensor] | None,
        rows: Sequence[int],
        visit: Visit,
    ) -> None:
        """A section is through: its ``rows`` of the visit leave ``references``, if any."""
        if kind == Kind.SAME:
            self.store.touch(keys)
        elif references is not None:
            self.put(keys, references, [visit.lengths[r] for r in rows])

    def kept(
        self, coder: Codec, payload: Tensor, y: Tensor, lengths: list[int] | None
    ) -> list[Tensor]:
        """The references that ``y`` [rows, n] float32, which is behind ``payload``, leaves."""
        if self.keeping.holds(coder):
            return self.keeping.split(payload, lengths or [y.shape[1]] * len(y))
        return self.keeping.keep(y, lengths)

    def digest(self) -> int:
        return self.store.digest()

    def state_dict(self) -> dict[str, Any]:
        return self.store.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.store.load_state_dict(state)


_SHORT: dict[Kind, type[ForeseenChange | ForeseenFirst]] = {
    Kind.CHANGE: ForeseenChange,
    Kind.SECOND: ForeseenChange,
    Kind.FIRST: ForeseenFirst,
    Kind.REPAIR: ForeseenFirst,
}


class _DeltaSender(_DeltaEnd, Sender):
    store: ReferenceStore

    def encode(
        self, x: Tensor, microbatch: int, visit: Visit, out: Tensor | None = None
    ) -> list[Section]:
        keys = _keys(visit)
        values = x.detach().reshape(len(keys), -1)
        kinds = self.kinds(microbatch, visit)
        space = _Space(out)
        sections, moves = [], []
        try:
            for kind in sorted(set(kinds)):
                for coded in self._code(kind, values, kinds, visit, space):
                    there = _some_keys(keys, coded.rows)
                    sections.append(self._section(coded, there, x, visit))
                    moves.append((coded, there))
        except NonFiniteError:
            coder = self.scheme.codec_of(kind)
            raise unfit_value(x, coder, visit.valid, len(keys)) from None
        for coded, there in moves:
            self.settle(coded.kind, there, coded.references, coded.rows, visit)
        return sections

    def _section(self, coded: _Coded, keys: Sequence[int], x: Tensor, visit: Visit) -> Section:
        return Section(
            coded.kind,
            self.names[coded.kind],
            x.dtype,
            tuple(x.shape),
            coded.payload,
            rows=None if len(keys) == x.shape[0] else coded.rows,
            versions=None if coded.kind == Kind.VALUE else self.store.versions(keys),
            keys=_digest(visit, keys),
        )

    def _code(
        self, kind: Kind, values: Tensor, kinds: list[Kind], visit: Visit, space: _Space
    ) -> list[_Coded]:
        """The rows of ``kind``: one section of them, or more if some changes turn out too large, or
        nothing."""
        rows = [r for r, k in enumerate(kinds) if k == kind]
        if kind not in _CHANGES:
            return [self._value(kind, values, rows, visit, space)]
        before = self.store.rows(_some_keys(_keys(visit), rows))
        after = self.room(before)
        payload, energies = self.scheme.codec_of(kind).encode_change(
            _some(values, rows),
            _lengths(visit, rows),
            _seeds(visit, rows),
            before,
            after,
            self.keeping,
            space.rest,
        )
        least = _least(values.dtype)
        for row, (change, value) in zip(rows, energies, strict=True):
            if change > value:
                kinds[row] = Kind.RESEED
            elif change <= least * value:
                kinds[row] = Kind.SAME
        found = [kinds[row] for row in rows]
        if Kind.RESEED not in found and Kind.SAME not in found:
            return [_Coded(kind, rows, space.took(payload), after)]
        coded = []
        if kind in found:
            coded += self._code(kind, values, kinds, visit, space)
        if Kind.RESEED in found:
            large = [r for r in rows if kinds[r] == Kind.RESEED]
            coded.append(self._value(Kind.RESEED, values, large, visit, space))
        if Kind.SAME in found:
            same = [r for r in rows if kinds[r] == Kind.SAME]
            coded.append(_Coded(Kind.SAME, same, payload[:0], None))
        return coded

    def _value(
        self, kind: Kind, values: Tensor, rows: list[int], visit: Visit, space: _Space
    ) -> _Coded:
        """``rows`` as values, and the references that they become."""
        coder = self.scheme.codec_of(kind)
        lengths, part = _lengths(visit, rows), _some(values, rows)
        if kind != Kind.VALUE:  # as references are kept: some codecs' bytes depend on the dtype
            part = part.to(torch.float32)
        payload = coder.encode(part, len(rows), lengths, _seeds(visit, rows), space.rest)
        space.took(payload)
        if kind == Kind.VALUE and coder != RAW:
            return _Coded(kind, rows, payload, None)
        y = coder.decode(payload, part.shape, part.dtype, len(rows), lengths)
        if coder == RAW and not bool(torch.isfinite(y).all()):  # raw itself looks at no value
            raise NonFiniteError("a value is not finite")
        if kind == Kind.VALUE:
            return _Coded(kind, rows, payload, None)
        return _Coded(kind, rows, payload, self.kept(coder, payload, y, lengths))


class _Space:
    """The bytes that payloads are to lie in, end to end; none: each gets its own."""

    def __init__(self, out: Tensor | None) -> None:
        self.rest = out

    def took(self, payload: Tensor) -> Tensor:
        """``payload`` lies at the start of what was the rest."""
        if self.rest is not None:
            self.rest = self.rest[payload.numel() :]
        return payload


@dataclasses.dataclass
class _Coded:
    """What is to become a section, and the references that its rows will have."""

    kind: Kind
    rows: list[int]
    payload: Tensor
    references: list[Tensor] | None


class _DeltaReceiver(_DeltaEnd, Receiver):
    store: ReferenceStore

    def decode(self, sections: list[Section], microbatch: int, visit: Visit) -> Tensor:
        keys = _keys(visit)
        shape = expect_sections(sections, _DELTA_KINDS, len(keys), "a delta-coded tensor")
        self._check(sections, self.kinds(microbatch, visit), visit)
        head = sections[0]
        result = torch.empty(shape, dtype=head.dtype, device=head.payload.device)
        result = result.view(len(keys), result.numel() // max(len(keys), 1))
        moves = []
        for section in sections:
            rows = list(range(len(keys))) if section.rows is None else section.rows
            there = _some_keys(keys, rows)
            y = result if section.rows is None else result.new_empty((len(rows), result.shape[1]))
            try:
                moves.append((section.kind, there, rows, self._decode(section, there, visit, y)))
            except ValueError as error:
                raise FrameError(f"a {section.kind.name} section: {error}") from None
            if section.rows is not None:
                result[rows] = y
        for kind, there, rows, references in moves:
            self.settle(kind, there, references, rows, visit)
        return result.view(shape)

    def _decode(
        self, section: Section, keys: Sequence[int], visit: Visit, y: Tensor
    ) -> list[Tensor] | None:
        """The values of ``section`` into ``y`` [keys, n]; returns the references they leave."""
        coder, count = self.scheme.codec_of(section.kind), len(keys)
        lengths = _lengths(visit, range(count) if section.rows is None else section.rows)
        if section.kind in _CHANGES:
            before = self.store.rows(keys)
            after = self.room(before)
            coder.decode_change(section.payload, lengths, before, after, self.keeping, y)
            return after
        if section.kind == Kind.SAME:
            if section.payload.numel():
                raise ValueError(f"{section.payload.numel()} payload bytes where none belong")
            y.copy_(self._held(keys, lengths, y.shape[1], y.dtype))
            return None
        if section.kind == Kind.VALUE:
            coder.decode(section.payload, y.shape, y.dtype, count, lengths, out=y)
            return None
        value = coder.decode(section.payload, y.shape, torch.float32, count, lengths)
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"codec {coder}: the payload holds values that are not finite")
        y.copy_(saturated(value, y.dtype))
        return self.kept(coder, section.payload, value, lengths)

    def recall(self, visit: Visit, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        width = math.prod(shape[1:])
        return self._held(_keys(visit), visit.valid, width, dtype).to(dtype).view(shape)

    def _held(
        self, keys: Sequence[int], lengths: Sequence[int] | None, width: int, dtype: torch.dtype
    ) -> Tensor:
        """The references of ``keys``, a copy [keys, width] within the range of ``dtype``."""
        return saturated(self.keeping.read(self.store.rows(keys), lengths, width), dtype)

    def _check(self, sections: list[Section], planned: list[Kind], visit: Visit) -> None:
        """Refuse sections coded against another state, before anything is touched."""
        keys = _keys(visit)
        for section in sections:
            rows = range(len(keys)) if section.rows is None else section.rows
            there = _some_keys(keys, rows)
            fitting = _PLANNED[section.kind]
            if section.codec != self.names[section.kind]:
                raise FrameError(
                    f"{section.kind.name} coded as {section.codec!r}; this end has {self.scheme}"
                )
            if section.kind == Kind.VALUE:
                continue
            if section.keys != _digest(visit, there):
                raise FrameError("the two ends hold different sample ids for this micro-batch")
            held = self.store.versions(there)
            if section.versions != held or any(planned[r] not in fitting for r in rows):
                sent = section.versions or [-1] * len(there)
                k = next((k for k, v in enumerate(sent) if v != held[k]), 0)
                raise FrameError(
                    f"sample {there[k]}: sent as {section.kind.name} against version {sent[k]} of "
                    f"its reference, this end holds version {held[k]}"
                )


def _keys(visit: Visit) -> tuple[int, ...]:
    if visit.keys is None:
        raise ValueError("delta needs sample_ids: pass them to Pipeline.step, or use a plain codec")
    return visit.keys


def _digest(visit: Visit, keys: Sequence[int]) -> int:
    """The digest of some of the visit's keys, which it knows where they are all."""
    return visit.keys_digest if len(keys) == len(visit.lengths) else keys_digest(keys)


def _some_keys(keys: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
    """The keys of ``rows``: ``keys`` itself where they are all."""
    return keys if len(rows) == len(keys) else [keys[r] for r in rows]


def _some(values: Tensor, rows: list[int]) -> Tensor:
    """``rows`` of ``values``: itself where they are all."""
    return values if len(rows) == values.shape[0] else values[rows]


def _lengths(visit: Visit, rows: Sequence[int]) -> list[int] | None:
    return [visit.lengths[r] for r in rows] if visit.padded else None


def _seeds(visit: Visit, rows: list[int]) -> Tensor:
    return visit.seeds if len(rows) == len(visit.lengths) else visit.seeds[rows]
