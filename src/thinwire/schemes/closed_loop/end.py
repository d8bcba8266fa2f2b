"""What the two ends of a closed loop have in common: the references, and how they move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs.keeping import KEEPINGS
from thinwire.frame import Kind
from thinwire.schemes.base import RAW, Foreseen, Form, Visit
from thinwire.schemes.closed_loop.coding import CHANGES, KIND_OF, KINDS, Coding, least_share
from thinwire.schemes.rows import keys_of
from thinwire.schemes.short import ForeseenChange, ForeseenFirst, Rows, Way
from thinwire.store import Held, ReferenceStore

_DENSE = (Kind.VALUE, Kind.DENSE)


class LoopEnd:
    """What both ends share: the references, the step's plan, and how they move.

    New references are made beside the old ones, and put in their place once the whole tensor is
    coded: an error leaves no trace, and what was replaced is room for the next.
    """

    def __init__(self, coding: Coding) -> None:
        self.coding, self.keeping = coding, KEEPINGS[coding.ref]
        self.store = ReferenceStore(self.keeping)
        self._plan: list[list[Kind]] = []
        self._spare: dict[int, list[Tensor]] = {}  # by length
        self._visits: tuple[Visit, ...] = ()
        self._ways: dict[tuple[Any, ...], Way | None] = {}
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
    def _raw(self) -> tuple[Kind, ...]:
        return _DENSE if self._dense else ()

    def begin_step(self, visits: Sequence[Visit], dense: bool = False) -> None:
        microbatches = [(keys_of(v), v.lengths) for v in visits]
        plan = self.store.plan(microbatches)
        self.store.begin(microbatches, plan)
        self._plan = [[KIND_OF[mode] for mode in modes] for modes in plan.visits]
        if self.coding.second != self.coding.change:
            self._mark_seconds(visits)
        if self._repaired:
            self._mark_repairs(visits)
        self._dense = dense
        if dense:
            self._plan = [[k if k == Kind.VALUE else Kind.DENSE for k in ks] for ks in self._plan]
        self._visits = tuple(visits)

    def remembers(self, microbatch: int) -> bool:
        kinds = self._plan[microbatch]
        return bool(kinds) and all(kind in CHANGES for kind in kinds)

    def repair(self, keys: Sequence[int]) -> None:
        self.store.drop(keys)
        self._repaired.update(keys)

    def _mark_seconds(self, visits: Sequence[Visit]) -> None:
        for kinds, visit in zip(self._plan, visits, strict=True):
            for row, version in enumerate(self.store.versions(keys_of(visit))):
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

    def kinds(self, microbatch: int, visit: Visit) -> list[Kind]:
        """The kind of each row, as planned unless its length came out otherwise.

        A sender may still turn changes into RESEED or SAME.
        """
        kinds = list(self._plan[microbatch])
        if visit is self._visits[microbatch]:
            return kinds
        held = self.store.lengths
        for row, (key, n) in enumerate(zip(keys_of(visit), visit.lengths, strict=True)):
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
