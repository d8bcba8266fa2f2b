"""``delta(change, first=int8)``: the change since the sample's last visit (AQ-SGD).

Wang et al. 2022, "Fine-tuning Language Models over Slow Networks using Activation Compression
with Guarantees", Algorithm 1. Both ends hold, for each sample, the reference m: what the receiver
has computed on at the last visit. On a visit with value x

1. seen for the first time: m <- decode(first.encode(x));
2. later: m <- m + decode(change.encode(x - m)), a closed loop, since m includes old errors;
3. where the change has more energy than the value: m <- decode(change.encode(x));
4. the receiver computes on the new m; the sender back-propagates through its exact x.

"First" is per sample, not per epoch. A sample's second occurrence in a step, and evaluation, send
a value in the ``first`` codec and leave m alone. m is float32; both ends add the same decoded
payload with one addition a value, so their copies are equal to the bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.codecs import Codec, codec
from thinwire.codecs.base import saturated, unfit_value
from thinwire.errors import FrameError, NonFiniteError
from thinwire.frame import Kind, Section, entry, state
from thinwire.native import Bound, addresses
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
from thinwire.schemes.value import Value
from thinwire.spec import register
from thinwire.store import Held, MemoryStore, plan_step
from thinwire.store import Visit as Mode

#: Not float32: the first epoch would otherwise bound the speed-up of the whole run.
FIRST_VISIT = codec("int8")


@register("scheme", "delta")
@dataclasses.dataclass(frozen=True)
class Delta(Scheme):
    """``change`` codes the later visits, ``first`` each sample's first."""

    needs_keys: ClassVar[bool] = True

    change: Codec
    first: Codec = FIRST_VISIT

    @property
    def stochastic(self) -> bool:
        return self.change.stochastic or self.first.stochastic

    def sender(self) -> Sender:
        return _DeltaSender(self)

    def receiver(self) -> Receiver:
        return _DeltaReceiver(self)

    def stateless(self) -> Scheme:
        return Value(self.first)

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        first = self.first.row_nbytes(n, torch.float32)
        return max(first, self.change.row_nbytes(n, torch.float32))

    def codec_of(self, kind: Kind) -> Codec:
        """The codec in which sections of ``kind`` travel."""
        return self.change if kind in (Kind.CHANGE, Kind.RESEED) else self.first


_DELTA_KINDS = (Kind.VALUE, Kind.FIRST, Kind.CHANGE, Kind.RESEED)
_KINDS = {Mode.FIRST: Kind.FIRST, Mode.AGAIN: Kind.CHANGE, Mode.REPEAT: Kind.VALUE}


class _DeltaEnd:
    """What both ends share: the references, the step's plan, and how they move.

    New references are made beside the old ones, and put in their place once the whole tensor is
    coded: an error leaves no trace, and what was replaced is room for the next.
    """

    def __init__(self, scheme: Delta) -> None:
        self.scheme = scheme
        self.store = MemoryStore()
        self._plan: list[list[Mode]] = []
        self._spare: dict[int, list[Tensor]] = {}  # by length
        self._visits: tuple[Visit, ...] = ()
        self._ways: dict[tuple[Any, ...], _Way | None] = {}
        self._spare_rows: _Rows | None = None
        self.names = {kind: str(scheme.codec_of(kind)) for kind in _DELTA_KINDS}

    def begin_step(self, visits: Sequence[Visit]) -> None:
        self._plan = plan_step(self.store.lengths, [(_keys(v), v.lengths) for v in visits])
        self._visits = tuple(visits)

    def foresee(
        self, microbatch: int, visit: Visit, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Foreseen | None:
        modes = self._plan[microbatch]
        if visit.padded or not modes or modes.count(modes[0]) < len(modes):
            return None
        known = (modes[0], shape, dtype)
        if known not in self._ways:
            self._ways[known] = self._way(_KINDS[modes[0]], shape, dtype)
        way = self._ways[known]
        return None if way is None else way.make(way, self, _keys(visit))

    def _way(self, kind: Kind, shape: tuple[int, ...], dtype: torch.dtype) -> _Way | None:
        coder, rows, n = self.scheme.codec_of(kind), shape[0], _width(shape)
        kernels, wide = coder.bound(dtype, rows, n), coder.bound(torch.float32, rows, n)
        if kernels is None or wide is None or kind == Kind.VALUE:
            return None
        form = Form(kind, shape, dtype, rows * coder.row_nbytes(n, dtype))
        section = Section(kind, self.names[kind], dtype, shape, versions=[])
        make = _ForeseenChange if kind == Kind.CHANGE else _ForeseenFirst
        return _Way(form, entry(section, form.nbytes), kernels, wide, make)

    def kinds(self, microbatch: int, visit: Visit) -> list[Kind]:
        """The kind of each row, as planned unless its length came out otherwise.

        A sender may still turn CHANGE into RESEED.
        """
        kinds = [_KINDS[mode] for mode in self._plan[microbatch]]
        if visit is self._visits[microbatch]:
            return kinds
        held = self.store.lengths
        for row, (key, n) in enumerate(zip(_keys(visit), visit.lengths, strict=True)):
            if kinds[row] == Kind.CHANGE and held.get(key) != n:
                kinds[row] = Kind.FIRST
        return kinds

    def room(self, before: Sequence[Tensor]) -> list[Tensor]:
        """A tensor like each of ``before``, for what it will become."""
        spare = self._spare
        return [
            held.pop() if (held := spare.get(row.numel())) else torch.empty_like(row)
            for row in before
        ]

    def rows_like(self, form: Form) -> _Rows:
        """Room for the references of a message of this form, which are to move."""
        spare = self._spare_rows
        if spare is None or spare.form is not form:
            width = _width(form.shape)
            rows = [torch.empty(width, dtype=torch.float32) for _ in range(form.shape[0])]
            spare = self._spare_rows = _Rows(form, rows)
        return spare

    def move(self, held: Sequence[Held], before: _Rows, after: _Rows) -> None:
        """The references ``held`` are ``after`` from now on, and ``before`` is room."""
        for one, row in zip(held, after.rows, strict=True):
            one.renew(row)
        self._spare_rows = before

    def put(self, keys: Sequence[int], rows: Sequence[Tensor]) -> None:
        """The references of ``keys`` are ``rows`` from now on."""
        for old in self.store.put(keys, rows):
            spare = self._spare.setdefault(old.numel(), [])
            if len(spare) < len(rows):  # more is never asked for at once
                spare.append(old)

    def digest(self) -> int:
        return self.store.digest()

    def state_dict(self) -> dict[str, Any]:
        return self.store.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.store.load_state_dict(state)


class _Rows:
    """A message's references, and where they lie."""

    __slots__ = ("addresses", "form", "rows")

    def __init__(self, form: Form, rows: list[Tensor]) -> None:
        self.form, self.rows, self.addresses = form, rows, addresses(rows)


@dataclasses.dataclass(slots=True)
class _Way:
    """How micro-batches of one form travel; ``entry`` lacks the state."""

    form: Form
    entry: bytes
    kernels: Bound
    wide: Bound  # the same for float32
    make: type[_ForeseenChange | _ForeseenFirst]


class _ForeseenVisit(Foreseen):
    def __init__(self, way: _Way, end: _DeltaEnd, keys: tuple[int, ...]) -> None:
        known = state(keys_digest(keys), end.store.versions(keys))
        super().__init__(way.form, way.entry + known)
        self._way, self._end, self._keys = way, end, keys


class _ForeseenChange(_ForeseenVisit):
    def __init__(self, way: _Way, end: _DeltaEnd, keys: tuple[int, ...]) -> None:
        super().__init__(way, end, keys)
        self._held = end.store.held(keys)
        self._before = _Rows(way.form, [held.row for held in self._held])

    def encode(self, x: int, payload: Any) -> bool:
        before, after = self._before, self._end.rows_like(self.form)
        kernels = self._way.kernels
        if not kernels.delta_encode(x, before.addresses, after.addresses, payload):
            return False
        self._end.move(self._held, before, after)
        return True

    def decode(self, payload: Any, y: int) -> bool:
        before, after = self._before, self._end.rows_like(self.form)
        kernels = self._way.kernels
        if not kernels.delta_decode(payload, before.addresses, after.addresses, y):
            return False
        self._end.move(self._held, before, after)
        return True


class _ForeseenFirst(_ForeseenVisit):
    def __init__(self, way: _Way, end: _DeltaEnd, keys: tuple[int, ...]) -> None:
        super().__init__(way, end, keys)
        self._value = torch.empty((len(keys), _width(way.form.shape)), dtype=torch.float32)
        self._rows = self._value.unbind()

    def encode(self, x: int, payload: Any) -> bool:
        return self._way.kernels.encode(x, payload) and self._keep(payload)

    def decode(self, payload: Any, y: int) -> bool:
        return self._way.kernels.decode(payload, y) and self._keep(payload)

    def _keep(self, payload: Any) -> bool:
        """Make what ``payload`` holds the references, in float32; False if it is invalid."""
        if not self._way.wide.decode(payload, self._value.data_ptr()):
            return False
        self._end.put(self._keys, self._rows)
        return True


class _DeltaSender(_DeltaEnd, Sender):
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
                    if coded.references is not None:
                        moves.append((there, coded.references))
        except NonFiniteError:
            coder = self.scheme.codec_of(kind)
            raise unfit_value(x, coder, visit.valid, len(keys)) from None
        for there, references in moves:
            self.put(there, references)
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
        """The rows of ``kind``: one section of them, or two if changes turn out too large."""
        rows = [r for r, k in enumerate(kinds) if k == kind]
        if kind != Kind.CHANGE:
            return [self._value(kind, values, rows, visit, space)]
        before = self.store.rows(_some_keys(_keys(visit), rows))
        after = self.room(before)
        payload, energies = self.scheme.change.encode_change(
            _some(values, rows),
            _lengths(visit, rows),
            _seeds(visit, rows),
            before,
            after,
            space.rest,
        )
        larger = [r for r, (change, value) in zip(rows, energies, strict=True) if change > value]
        if not larger:
            return [_Coded(kind, rows, space.took(payload), after)]
        for row in larger:
            kinds[row] = Kind.RESEED
        smaller = len(larger) < len(rows)
        rest = self._code(kind, values, kinds, visit, space) if smaller else []
        return [*rest, self._value(Kind.RESEED, values, larger, visit, space)]

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
        if kind == Kind.VALUE:
            return _Coded(kind, rows, payload, None)
        y = coder.decode(payload, part.shape, torch.float32, len(rows), lengths)
        return _Coded(kind, rows, payload, _references(y, lengths))


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
    def decode(self, sections: list[Section], microbatch: int, visit: Visit) -> Tensor:
        keys = _keys(visit)
        shape = expect_sections(sections, _DELTA_KINDS, len(keys), "a delta-coded tensor")
        self._check(sections, self.kinds(microbatch, visit), visit)
        head = sections[0]
        result = torch.empty(shape, dtype=head.dtype, device=head.payload.device)
        result = result.view(len(keys), _width(shape))
        moves = []
        for section in sections:
            rows = list(range(len(keys))) if section.rows is None else section.rows
            there = _some_keys(keys, rows)
            y = result if section.rows is None else result.new_empty((len(rows), result.shape[1]))
            try:
                moves.append((there, self._decode(section, there, _lengths(visit, rows), y)))
            except ValueError as error:
                raise FrameError(f"a {section.kind.name} section: {error}") from None
            if section.rows is not None:
                result[rows] = y
        for there, references in moves:
            if references is not None:
                self.put(there, references)
        return result.view(shape)

    def _decode(
        self, section: Section, keys: Sequence[int], lengths: list[int] | None, y: Tensor
    ) -> list[Tensor] | None:
        """The values of ``section`` into ``y`` [keys, n]; returns the references they leave."""
        coder, count = self.scheme.codec_of(section.kind), len(keys)
        if section.kind == Kind.CHANGE:
            before = self.store.rows(keys)
            after = self.room(before)
            coder.decode_change(section.payload, lengths, before, after, y)
            return after
        if section.kind == Kind.VALUE:
            coder.decode(section.payload, y.shape, y.dtype, count, lengths, out=y)
            return None
        value = coder.decode(section.payload, y.shape, torch.float32, count, lengths)
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"codec {coder}: the payload holds values that are not finite")
        y.copy_(saturated(value, y.dtype))
        return _references(value, lengths)

    def _check(self, sections: list[Section], planned: list[Kind], visit: Visit) -> None:
        """Refuse sections coded against another state, before anything is touched."""
        keys = _keys(visit)
        for section in sections:
            rows = range(len(keys)) if section.rows is None else section.rows
            there = _some_keys(keys, rows)
            kind = Kind.CHANGE if section.kind == Kind.RESEED else section.kind
            if section.codec != self.names[section.kind]:
                raise FrameError(
                    f"{section.kind.name} coded as {section.codec!r}; this end has {self.scheme}"
                )
            if section.kind == Kind.VALUE:
                continue
            if section.keys != _digest(visit, there):
                raise FrameError("the two ends hold different sample ids for this micro-batch")
            held = self.store.versions(there)
            if section.versions != held or any(planned[r] != kind for r in rows):
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


def _lengths(visit: Visit, rows: list[int]) -> list[int] | None:
    return [visit.lengths[r] for r in rows] if visit.padded else None


def _seeds(visit: Visit, rows: list[int]) -> Tensor:
    return visit.seeds if len(rows) == len(visit.lengths) else visit.seeds[rows]


def _references(y: Tensor, lengths: list[int] | None) -> list[Tensor]:
    """The rows of ``y`` [rows, n] float32, each of its length, to be kept."""
    if lengths is None:
        return list(y.unbind())
    return [row[:size].clone() for row, size in zip(y, lengths, strict=True)]


def _width(shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:])
