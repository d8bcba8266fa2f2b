"""The sending end of a closed loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.base import unfit_value
from thinwire.errors import NonFiniteError
from thinwire.frame import Kind, Section
from thinwire.schemes.base import RAW, Sender, Visit, check_finite
from thinwire.schemes.closed_loop.coding import CHANGES, least_share
from thinwire.schemes.closed_loop.end import LoopEnd
from thinwire.schemes.rows import (
    Space,
    as_rows,
    digest_of,
    keys_at,
    keys_of,
    lengths_at,
    rows_at,
    seeds_at,
)
from thinwire.store import ReferenceStore


class LoopSender(LoopEnd, Sender):
    store: ReferenceStore

    def encode(
        self, x: Tensor, microbatch: int, visit: Visit, out: Tensor | None = None
    ) -> list[Section]:
        keys = keys_of(visit)
        values = as_rows(x)
        kinds = self.kinds(microbatch, visit)
        space = Space(out)
        sections, moves = [], []
        try:
            for kind in sorted(set(kinds)):
                for coded in self._code(kind, values, kinds, visit, space):
                    there = keys_at(keys, coded.rows)
                    sections.append(self._section(coded, there, x, visit))
                    moves.append((coded, there))
        except NonFiniteError:
            coder = self.coder(kind)
            raise unfit_value(x, coder, visit.valid, len(keys)) from None
        if self.measuring:
            self.sent = self._sent(moves, values, visit)
        for coded, there in moves:
            self.settle(coded.kind, there, coded.references, coded.rows, visit)
        return sections

    def _sent(
        self, moves: Sequence[tuple[_Coded, Sequence[int]]], values: Tensor, visit: Visit
    ) -> Tensor:
        """What the receiver will have of ``values``, before any reference moves."""
        sent = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        for coded, keys in moves:
            lengths, coder = lengths_at(visit, coded.rows), self.coder(coded.kind)
            shape = len(coded.rows), values.shape[1]
            if coded.kind in CHANGES or coded.kind == Kind.SAME:
                y = self.keeping.read(self.store.rows(keys), lengths, shape[1])
                if coded.kind != Kind.SAME:
                    y = y + coder.decode(coded.payload, shape, torch.float32, shape[0], lengths)
            else:
                dtype = values.dtype if coded.kind == Kind.VALUE else torch.float32
                y = coder.decode(coded.payload, shape, dtype, shape[0], lengths)
            sent[coded.rows] = y.to(torch.float32)
        return sent

    def _section(self, coded: _Coded, keys: Sequence[int], x: Tensor, visit: Visit) -> Section:
        return Section(
            coded.kind,
            self.name(coded.kind),
            x.dtype,
            tuple(x.shape),
            coded.payload,
            rows=None if len(keys) == x.shape[0] else coded.rows,
            versions=None if coded.kind == Kind.VALUE else self.store.versions(keys),
            keys=digest_of(visit, keys),
        )

    def _code(
        self, kind: Kind, values: Tensor, kinds: list[Kind], visit: Visit, space: Space
    ) -> list[_Coded]:
        """The rows of ``kind``: one section of them, or more if some changes turn out too large, or
        nothing."""
        rows = [r for r, k in enumerate(kinds) if k == kind]
        if kind not in CHANGES:
            return [self._value(kind, values, rows, visit, space)]
        before = self.store.rows(keys_at(keys_of(visit), rows))
        after = self.room(before)
        payload, energies = self.coder(kind).encode_change(
            rows_at(values, rows),
            lengths_at(visit, rows),
            seeds_at(visit, rows),
            before,
            after,
            self.keeping,
            space.rest,
        )
        least = least_share(values.dtype)
        for row, (change, value) in zip(rows, energies, strict=True):
            if change > value and self.coding.reseeds:
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
        self, kind: Kind, values: Tensor, rows: list[int], visit: Visit, space: Space
    ) -> _Coded:
        """``rows`` as values, and the references that they become."""
        coder = self.coder(kind)
        lengths, part = lengths_at(visit, rows), rows_at(values, rows)
        if kind != Kind.VALUE:  # as references are kept: some codecs' bytes depend on the dtype
            part = part.to(torch.float32)
        payload = coder.encode(part, len(rows), lengths, seeds_at(visit, rows), space.rest)
        space.took(payload)
        if coder == RAW:
            check_finite(part, coder, lengths)
        if kind == Kind.VALUE:
            return _Coded(kind, rows, payload, None)
        y = coder.decode(payload, part.shape, torch.float32, len(rows), lengths)
        return _Coded(kind, rows, payload, self.kept(coder, payload, y, lengths))


@dataclasses.dataclass
class _Coded:
    """What is to become a section, and the references that its rows will have."""

    kind: Kind
    rows: list[int]
    payload: Tensor
    references: list[Tensor] | None
