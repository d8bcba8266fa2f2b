"""What the two ends of a closed loop have in common: references, and what both expect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs.keeping import KEEPINGS
from thinwire.frame import Kind
from thinwire.predict import Part
from thinwire.schemes.base import RAW, End, Foreseen, Form, Visit
from thinwire.schemes.closed_loop.against import Foundation
from thinwire.schemes.closed_loop.coding import CHANGES, KIND_OF, KINDS, Coding, least_share
from thinwire.schemes.closed_loop.foreseen import ExpectedWay, ForeseenExpected
from thinwire.schemes.rows import keys_of, lengths_at, rows_at
from thinwire.schemes.short import ForeseenChange, ForeseenFirst, Rows, Way
from thinwire.store import Held, ReferenceStore

_DENSE = (Kind.VALUE, Kind.DENSE)
_LEARNED = "learned."


class LoopEnd(End):
    """What both ends share: the references, the step's plan, and how they move; and what both
    expect, which learns once the step counts.

    New references are made beside the old ones, and put in their place once the whole tensor is
    coded: an error leaves no trace, and what was replaced is room for the next.
    """

    #: Whether this end finds what both are to expect.
    fits = False

    def __init__(self, coding: Coding) -> None:
        self.coding, self.keeping = coding, KEEPINGS[coding.ref or "fp32"]
        self.store = None if coding.ref is None else ReferenceStore(self.keeping)
        self.learned = coding.expectations(self.fits)
        self._values: dict[int, Tensor] = {}  # that were transmitted, without a store
        self._plan: list[list[Kind]] = []
        self._spare: dict[int, list[Tensor]] = {}  # by length
        self._visits: tuple[Visit, ...] = ()
        self._ways: dict[tuple[Any, ...], Way | None] = {}
        self._expected_ways: dict[tuple[Any, ...], ExpectedWay | None] = {}
        self._spare_rows: Rows | None = None
        self._repaired: set[int] = set()
        self._dense = self.measuring = False
        self._names = {kind: str(coding.codec_of(kind)) for kind in KINDS}

    def coder(self, kind: Kind) -> Codec:
        """The codec in which sections of ``kind`` travel in this step."""
        return RAW if kind in self._raw else self.coding.codec_of(kind)

    def name(self, kind: Kind) -> str:
        """The name of ``coder``."""
        return str(RAW) if kind in self._raw else self._names[kind]

    @property
    def references(self) -> ReferenceStore:
        """What is remembered of rows, by a scheme that remembers."""
        assert self.store is not None
        return self.store

    def keys_of(self, visit: Visit) -> tuple[int, ...]:
        """What tells the rows of a visit apart: their places, where nothing is remembered."""
        return keys_of(visit) if self.store is not None else tuple(range(len(visit.lengths)))

    @property
    def _raw(self) -> tuple[Kind, ...]:
        return _DENSE if self._dense else ()

    def begin_step(self, visits: Sequence[Visit], dense: bool = False) -> None:
        if self.store is None:
            self._plan = [[Kind.DENSE if dense else Kind.VALUE] * len(v.lengths) for v in visits]
        else:
            self._plan_visits(self.store, visits, dense)
        if self.learned is not None:
            self.learned.begin()
        self._dense = dense
        self._visits = tuple(visits)
        self._values.clear()

    def _plan_visits(self, store: ReferenceStore, visits: Sequence[Visit], dense: bool) -> None:
        microbatches = [(keys_of(v), v.lengths) for v in visits]
        plan = store.plan(microbatches)
        store.begin(microbatches, plan)
        self._plan = [[KIND_OF[mode] for mode in modes] for modes in plan.visits]
        if self.coding.second != self.coding.change:
            self._mark_seconds(visits)
        if self._repaired:
            self._mark_repairs(visits)
        if dense:
            self._plan = [[k if k == Kind.VALUE else Kind.DENSE for k in ks] for ks in self._plan]

    def end_step(self) -> None:
        if self.learned is not None:
            self.learned.settle()

    def remembers(self, microbatch: int) -> bool:
        kinds = self._plan[microbatch]
        return bool(kinds) and all(kind in CHANGES for kind in kinds)

    def repair(self, keys: Sequence[int]) -> None:
        self.references.drop(keys)
        self._repaired.update(keys)

    def _mark_seconds(self, visits: Sequence[Visit]) -> None:
        for kinds, visit in zip(self._plan, visits, strict=True):
            for row, version in enumerate(self.references.versions(keys_of(visit))):
                if kinds[row] == Kind.CHANGE and version == 1:
                    kinds[row] = Kind.SECOND

    def _mark_repairs(self, visits: Sequence[Visit]) -> None:
        for kinds, visit in zip(self._plan, visits, strict=True):
            for row, key in enumerate(keys_of(visit)):
                if kinds[row] == Kind.FIRST and key in self._repaired:
                    kinds[row] = Kind.REPAIR
                    self._repaired.discard(key)

    def foresee(
        self, microbatch: int, visit: Visit, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Foreseen | None:
        kinds = self._plan[microbatch]
        if visit.padded or self.measuring or not kinds or kinds.count(kinds[0]) < len(kinds):
            return None
        if self.learned is not None:
            return self._foresee_expected(kinds[0], microbatch, visit, shape, dtype)
        make = _SHORT.get(kinds[0])
        if make is None:
            return None
        known = (kinds[0], shape, dtype)
        if known not in self._ways:
            coder = self.coder(kinds[0])
            self._ways[known] = Way.of(
                kinds[0], coder, self.keeping, shape, dtype, least_share(dtype)
            )
        way = self._ways[known]
        return None if way is None else make(way, self, keys_of(visit))

    def _foresee_expected(
        self,
        kind: Kind,
        microbatch: int,
        visit: Visit,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Foreseen | None:
        assert self.learned is not None
        if kind not in ((Kind.VALUE,) if self.store is None else _SHORT):
            return None
        change = kind in CHANGES
        plain = visit.scale == 1.0 or not (change and self.learned.follows)
        if not plain or not self.learned.tables_for(shape, change):
            return None
        known = (kind, shape, dtype)
        if known not in self._expected_ways:
            self._expected_ways[known] = ExpectedWay.of(self, *known)
        way = self._expected_ways[known]
        return None if way is None else ForeseenExpected(way, self, microbatch, visit)

    def kinds(self, microbatch: int, visit: Visit) -> list[Kind]:
        """The kind of each row, as planned unless its length came out otherwise.

        A sender may still turn changes into RESEED or SAME.
        """
        kinds = list(self._plan[microbatch])
        if visit is self._visits[microbatch]:
            return kinds
        held = self.references.lengths if self.store is not None else {}
        for row, (key, n) in enumerate(zip(self.keys_of(visit), visit.lengths, strict=True)):
            if kinds[row] in CHANGES and held.get(key) != n:
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
        for old in self.references.put(keys, rows, values):
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
            self.references.touch(keys)
        elif references is not None:
            self.put(keys, references, [visit.lengths[r] for r in rows])

    def kept(
        self, coder: Codec | None, payload: Tensor, y: Tensor, lengths: list[int] | None
    ) -> list[Tensor]:
        """The references that ``y`` [rows, n] float32 leaves, which ``payload`` of ``coder`` is of,
        if one alone is."""
        if coder is not None and self.keeping.holds(coder):
            return self.keeping.split(payload, lengths or [y.shape[1]] * len(y))
        return self.keeping.keep(y, lengths)

    # What both ends expect.

    def foundation(
        self,
        kind: Kind,
        rows: Sequence[int],
        keys: Sequence[int],
        microbatch: int,
        visit: Visit,
        shape: tuple[int, ...],
    ) -> Foundation | None:
        """What both ends know of ``rows``, which travel as ``kind``, before they are decoded; None
        where that is nothing, or their references alone."""
        if self.learned is None or kind == Kind.SAME or not math.prod(shape):
            return None
        lengths = lengths_at(visit, rows)
        part = Part(microbatch, kind, rows, shape, visit.context, visit.scale, lengths)
        if self._dense:
            return Foundation(part, self.learned.without(part), None, None, False)
        change, base = kind in CHANGES, None
        if change:
            width = math.prod(shape[1:])
            base = self.keeping.read(self.references.rows(keys), lengths, width)
        source = base if change else self.activations_of(microbatch, rows, shape)
        guess = self.learned.guess(part, source, change)
        return Foundation(part, guess, base, self.learned.rows(guess, part), change)

    def activations_of(
        self, microbatch: int, rows: Sequence[int], shape: Sequence[int]
    ) -> Tensor | None:
        """What both ends hold of the activations that ``rows`` of gradients belong to."""
        if self.activations is None:
            return None
        width = math.prod(shape[1:])
        found = self.activations.transmitted(microbatch, width)
        if found is None or found.shape != (shape[0], width):
            return None
        return rows_at(found, rows)

    def learn(self, known: Foundation | None, y: Tensor | None) -> None:
        """``y`` float32 [rows, n] was decoded of what was ``known``."""
        if known is None or y is None:
            return
        assert self.learned is not None
        if self.keeps and self.store is None:
            self.hold(known.part.microbatch, y)
        if known.change:
            self.learned.note(known.part, known.guess, y, known.base)
            if self.learned.follows:
                self.learned.note(known.part, self.learned.without(known.part), y)
        else:
            self.learned.note(known.part, known.guess, y)

    def hold(self, microbatch: int, y: Tensor) -> None:
        """``y`` float32 [rows, n] has travelled, for the link that goes back to know."""
        self._values[microbatch] = y

    def transmitted(self, microbatch: int, width: int) -> Tensor | None:
        if self.store is None:
            return self._values.get(microbatch)
        visit, kinds = self._visits[microbatch], self._plan[microbatch]
        keys = keys_of(visit)
        if Kind.VALUE in kinds or any(key not in self.store.lengths for key in keys):
            return None
        sizes = [self.store.lengths[key] for key in keys]
        if sizes != list(visit.lengths):
            return None
        return self.keeping.read(self.store.rows(keys), visit.valid, width)

    def digest(self) -> int:
        known = 0 if self.learned is None else self.learned.digest()
        return known if self.store is None else (known + self.store.digest()) % (1 << 64)

    def state_dict(self) -> dict[str, Any]:
        state = {} if self.store is None else self.store.state_dict()
        if self.learned is not None:
            state |= {f"{_LEARNED}{name}": t for name, t in self.learned.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.store is not None:
            self.store.load_state_dict(state)
        if self.learned is not None:
            part = {k.removeprefix(_LEARNED): t for k, t in state.items() if k.startswith(_LEARNED)}
            self.learned.load_state_dict(part)


_SHORT: dict[Kind, type[ForeseenChange | ForeseenFirst]] = {
    Kind.CHANGE: ForeseenChange,
    Kind.SECOND: ForeseenChange,
    Kind.FIRST: ForeseenFirst,
    Kind.REPAIR: ForeseenFirst,
}
