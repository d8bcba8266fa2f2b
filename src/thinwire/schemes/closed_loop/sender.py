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
from thinwire.schemes.closed_loop.against import (
    Against,
    Foundation,
    against,
    energy,
    gains,
    joined,
)
from thinwire.schemes.closed_loop.apart import Apart
from thinwire.schemes.closed_loop.coding import CHANGES, least_share
from thinwire.schemes.closed_loop.end import LoopEnd
from thinwire.schemes.rows import (
    Space,
    as_rows,
    digest_of,
    keys_at,
    lengths_at,
    rows_at,
    seeds_at,
    valid,
)


class LoopSender(LoopEnd, Sender):
    fits = True

    def encode(
        self, x: Tensor, microbatch: int, visit: Visit, out: Tensor | None = None
    ) -> list[Section]:
        keys = self.keys_of(visit)
        message = _Message(x, as_rows(x), microbatch, visit, keys, Space(out))
        if self.learned is not None and not self._dense:
            message.apart = Apart.of(valid(message.values, visit.valid), message.shape)
        kinds = self.kinds(microbatch, visit)
        coded: list[_Coded] = []
        try:
            for kind in sorted(set(kinds)):
                coded += self._code(kind, kinds, message)
        except NonFiniteError:
            coder = self.coder(kind)
            raise unfit_value(x, coder, visit.valid, len(keys)) from None
        sections = [self._section(one, message) for one in coded]
        sections += self._beside(message)
        if self.measuring:
            self.sent = self._sent(coded, message)
        for one in coded:
            self.settle(one.kind, keys_at(keys, one.rows), one.references, one.rows, visit)
            self.learn(one.known, one.y)
            if self.learned is not None:
                self.learned.sent(one.payload.numel(), one.kind in CHANGES)
            if one.gained is not None:
                self.gained.append((one.kind, *one.gained))
        return sections

    def _sent(self, coded: Sequence[_Coded], message: _Message) -> Tensor:
        """What the receiver will have of the values, before any reference moves."""
        values, visit = message.values, message.visit
        sent = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        for one in coded:
            lengths, coder = lengths_at(visit, one.rows), self.coder(one.kind)
            shape, keys = (len(one.rows), values.shape[1]), keys_at(message.keys, one.rows)
            if one.y is not None:
                y = one.y
            elif one.kind in CHANGES or one.kind == Kind.SAME:
                y = self.keeping.read(self.references.rows(keys), lengths, shape[1])
                if one.kind != Kind.SAME:
                    y = y + coder.decode(one.payload, shape, torch.float32, shape[0], lengths)
            else:
                y = coder.decode(one.payload, shape, values.dtype, shape[0], lengths)
            sent[one.rows] = y.to(torch.float32)
        return sent

    def _section(self, coded: _Coded, message: _Message) -> Section:
        x, keys = message.x, keys_at(message.keys, coded.rows)
        stateful = self.store is not None and coded.kind != Kind.VALUE
        return Section(
            coded.kind,
            self.name(coded.kind),
            x.dtype,
            tuple(x.shape),
            coded.payload,
            rows=None if len(keys) == x.shape[0] else coded.rows,
            versions=self.references.versions(keys) if stateful else None,
            keys=digest_of(message.visit, keys) if stateful else 0,
            predicted=coded.predicted,
        )

    def _beside(self, message: _Message) -> list[Section]:
        """What travels apart, and what the other end is to expect by from now on, if that has
        changed."""
        if self.learned is None or self._dense:
            return []
        told = [(Kind.MAP, payload) for payload in self.learned.offers()]
        if message.apart is not None:
            told.append((Kind.APART, message.apart.payload))
        dtype, shape, space = message.x.dtype, message.shape, message.space
        return [
            Section(kind, "", dtype, shape, space.put(payload), rows=[]) for kind, payload in told
        ]

    def _code(self, kind: Kind, kinds: list[Kind], message: _Message) -> list[_Coded]:
        """The rows of ``kind``: one section of them, or more if some changes turn out too large, or
        nothing."""
        rows = [r for r, k in enumerate(kinds) if k == kind]
        if kind not in CHANGES:
            return [self._coded(kind, rows, message)]
        coded = self._coded(kind, rows, message)
        least = least_share(message.values.dtype)
        for row, (change, value) in zip(rows, coded.energies, strict=True):
            if change > value and self.coding.reseeds:
                kinds[row] = Kind.RESEED
            elif change <= least * value and not coded.predicted and message.apart is None:
                kinds[row] = Kind.SAME
        found = [kinds[row] for row in rows]
        if Kind.RESEED not in found and Kind.SAME not in found:
            message.space.took(coded.payload)
            return [coded]
        several = self._code(kind, kinds, message) if kind in found else []
        if Kind.RESEED in found:
            large = [r for r in rows if kinds[r] == Kind.RESEED]
            several.append(self._coded(Kind.RESEED, large, message))
        if Kind.SAME in found:
            same = [r for r in rows if kinds[r] == Kind.SAME]
            several.append(_Coded(Kind.SAME, same, coded.payload[:0]))
        return several

    def _coded(self, kind: Kind, rows: list[int], message: _Message) -> _Coded:
        """``rows`` as ``kind``; changes have not taken their space yet."""
        keys = keys_at(message.keys, rows)
        visit, shape, apart = message.visit, message.shape, message.apart
        known = self.foundation(kind, rows, keys, message.microbatch, visit, shape)
        if kind in CHANGES and known is None:
            before = self.references.rows(keys)
            return self._against(
                kind, rows, message, Against(before, self.room(before), self.keeping)
            )
        if known is None or (known.base is None and known.expected is None):
            return self._value(kind, rows, message, known)
        x = valid(rows_at(message.values, rows).to(torch.float32), known.part.lengths)
        if apart is not None:
            x = apart.instead(x, known.base, rows, shape)
        steps = gains(x, known)
        there = against(known, steps)
        if apart is not None:
            x = apart.instead(x, there.base, rows, shape)
        coded = self._against(kind, rows, message, there, known, steps, x)
        assert coded.y is not None
        if apart is not None:
            apart.put(coded.y, rows, shape, known.part.lengths)
        if kind != Kind.VALUE:
            coded.references = self.keeping.keep(coded.y, known.part.lengths)
        if self.measuring and known.expected is not None:
            plain = x if known.base is None else x - known.base
            assert there.base is not None
            coded.gained = energy(plain, known.part), energy(x - there.base, known.part)
        if kind not in CHANGES:
            message.space.took(coded.payload)
        return coded

    def _against(
        self,
        kind: Kind,
        rows: list[int],
        message: _Message,
        there: Against,
        known: Foundation | None = None,
        steps: Tensor | None = None,
        x: Tensor | None = None,
    ) -> _Coded:
        """``rows``, or ``x`` in their place, as what they are beyond ``there``."""
        room = message.space.rest
        payload, energies = self.coder(kind).encode_change(
            rows_at(message.values, rows) if x is None else x,
            lengths_at(message.visit, rows),
            seeds_at(message.visit, rows),
            there.before,
            there.after,
            there.keeping,
            room if steps is None or room is None else room[len(rows) :],
        )
        if steps is not None:
            payload = joined(steps, payload, room)
        return _Coded(
            kind,
            rows,
            payload,
            references=list(there.after) if there.y is None else None,
            energies=energies,
            known=known,
            y=there.y,
            predicted=steps is not None,
        )

    def _value(
        self, kind: Kind, rows: list[int], message: _Message, known: Foundation | None
    ) -> _Coded:
        """``rows`` as values, and the references that they become."""
        coder, visit = self.coder(kind), message.visit
        lengths, part = lengths_at(visit, rows), rows_at(message.values, rows)
        widened = kind != Kind.VALUE or self.learned is not None
        if widened:  # as references are kept: some codecs' bytes depend on the dtype
            part = part.to(torch.float32)
        if message.apart is not None:
            part = message.apart.instead(part, None, rows, message.shape)
        space = message.space
        payload = coder.encode(part, len(rows), lengths, seeds_at(visit, rows), space.rest)
        space.took(payload)
        if coder == RAW:
            check_finite(part, coder, lengths)
        if not widened:
            return _Coded(kind, rows, payload)
        y = coder.decode(payload, part.shape, torch.float32, len(rows), lengths)
        changed = message.apart is not None and message.apart.put(y, rows, message.shape, lengths)
        kept = None
        if kind != Kind.VALUE and self.store is not None:
            kept = self.kept(None if changed else coder, payload, y, lengths)
        return _Coded(kind, rows, payload, kept, known=known, y=y)


@dataclasses.dataclass
class _Message:
    """A tensor of a micro-batch, and where its payloads go."""

    x: Tensor
    values: Tensor  # [rows, n]
    microbatch: int
    visit: Visit
    keys: Sequence[int]
    space: Space
    apart: Apart | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's."""
        return tuple(self.x.shape)


@dataclasses.dataclass
class _Coded:
    """What is to become a section, and the references that its rows will have.

    ``y``: what was decoded, where it is there. ``energies``: sums of squares of each row's change
    and value. ``gained``: see ``Sender.gained``.
    """

    kind: Kind
    rows: list[int]
    payload: Tensor
    references: list[Tensor] | None = None
    energies: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    known: Foundation | None = None
    y: Tensor | None = None
    predicted: bool = False
    gained: tuple[float, float] | None = None
