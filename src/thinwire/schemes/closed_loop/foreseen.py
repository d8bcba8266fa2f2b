"""The short way of micro-batches of which both ends expect something: all rows whole, of one kind,
on the CPU.

A call of a kernel is what a message costs beside what a map needs. What is unusual of it, as
positions far beyond the others, changes that are too large, or a map that is to be told, takes the
long way, which gives the same bytes and the same state.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.codecs.integer import Integer
from thinwire.frame import Kind, Section, entry, state
from thinwire.native.expected import Around
from thinwire.predict import Guess, Part, form_of
from thinwire.predict.far import ordinary_of
from thinwire.schemes.base import Foreseen, Form, Visit, keys_digest
from thinwire.schemes.closed_loop import apart
from thinwire.schemes.closed_loop.coding import CHANGES
from thinwire.schemes.short import Rows

if TYPE_CHECKING:
    from thinwire.schemes.closed_loop.end import LoopEnd


@dataclasses.dataclass(frozen=True)
class ExpectedWay:
    """How micro-batches of one form travel, in ``coder``; ``entry`` lacks the state, if any.
    ``ordinary``: that manieth magnitude says what is far beyond; 0: nothing is."""

    form: Form
    entry: bytes
    coder: Integer
    ordinary: int

    @classmethod
    def of(
        cls, end: LoopEnd, kind: Kind, shape: tuple[int, ...], dtype: torch.dtype
    ) -> ExpectedWay | None:
        """None where there is no such way."""
        coder, keeping = end.coder(kind), end.keeping
        laid_out = 2 <= len(shape) != 4 and math.prod(shape) > 0
        if not laid_out or not isinstance(coder, Integer) or keeping.how == torch.bfloat16:
            return None
        if dtype not in (torch.float32, torch.bfloat16):
            return None
        if coder.bound(torch.float32, shape[0], math.prod(shape[1:])) is None:
            return None
        stateful = end.store is not None
        nbytes = shape[0] + coder.max_nbytes(shape, torch.float32, shape[0])
        section = Section(kind, str(coder), dtype, shape, versions=[] if stateful else None)
        section.predicted = True
        rows, positions, _ = form_of(shape)
        ordinary = ordinary_of(rows * positions) if apart.most(shape) else 0
        return cls(Form(kind, shape, dtype, nbytes), entry(section, nbytes), coder, ordinary)


@dataclasses.dataclass
class _Ready:
    """What a message's kernel is given, and what is done once it has run. ``lesson``: of what the
    message shows beyond its references; ``follows``: of its values too."""

    around: Around
    guess: Guess
    y: Tensor
    after: Rows | None
    lesson: Tensor
    follows: Tensor | None

    @property
    def out(self) -> tuple[Tensor, Any, Tensor | None]:
        """What the kernel fills: lessons apart, unless they are what the receiver has."""
        lesson = None if self.lesson is self.y else self.lesson
        return self.y, None if self.after is None else self.after.addresses, lesson


class ForeseenExpected(Foreseen):
    """One micro-batch's message."""

    def __init__(self, way: ExpectedWay, end: LoopEnd, microbatch: int, visit: Visit) -> None:
        keys = end.keys_of(visit)
        known = b""
        if end.store is not None:
            known = state(keys_digest(keys), end.references.versions(keys))
        super().__init__(way.form, way.entry + known)
        assert end.learned is not None
        self._way, self._end, self._keys, self._learned = way, end, keys, end.learned
        kind, shape = way.form.kind, way.form.shape
        rows = range(shape[0])
        self._part = Part(microbatch, kind, rows, shape, visit.context, visit.scale, None)
        self._change = kind in CHANGES
        if self._change:
            self._held = end.references.held(keys)
            self._before = Rows(way.form, end.references.rows(keys))

    def encode(self, x: int, payload: Any) -> bool:
        end, way, learned = self._end, self._way, self._learned
        if learned.offering:
            return False
        ready = self._ready()
        energies = ready.around.encode(
            way.coder.format,
            way.form.dtype,
            x,
            payload,
            *ready.out,
            way.ordinary,
        )
        if energies is None:
            return False
        if self._change and end.coding.reseeds and any(left > value for left, value in energies):
            return False
        self._done(ready)
        learned.sent(self.form.nbytes, self._change)
        return True

    def decode(self, payload: Any, y: int) -> bool:
        ready, way = self._ready(), self._way
        if not ready.around.decode(way.coder.format, payload, way.form.dtype, y, *ready.out):
            return False
        self._done(ready)
        return True

    def _ready(self) -> _Ready:
        end, part, learned, change = self._end, self._part, self._learned, self._change
        rows, width = self.form.shape[0], self.form.width
        base = None
        if change:
            source = None
            if learned.follows:
                source = base = end.keeping.read(self._before.rows, None, width)
        else:
            source = end.activations_of(part.microbatch, part.rows, part.shape)
        guess = learned.without(part) if source is None else learned.guess(part, source, change)
        around = Around(
            (rows, width),
            form_of(part.shape)[2],
            ids=guess.ids,
            tables=learned.tables_for(part.shape, change) or (),
            ready=guess.values,
            scale=part.scale,
            base=base,
            references=self._before.addresses if change and base is None else None,
            how=end.keeping.how,
        )
        lesson = learned.room(part, change)
        follows = learned.room(part, False) if change and learned.follows else None
        y = follows
        if y is None:
            as_it_is = not change and part.scale == 1.0 and not end.keeps
            y = lesson if as_it_is else torch.empty((rows, width))
        after = None
        if change:
            after = end.rows_like(self.form)
        elif end.store is not None:
            after = Rows(self.form, [end.keeping.empty(width) for _ in range(rows)])
        return _Ready(around, guess, y, after, lesson, follows)

    def _done(self, ready: _Ready) -> None:
        """The message is through: references move, and what it has shown is noted."""
        end, part, learned = self._end, self._part, self._learned
        rows, width = self.form.shape[0], self.form.width
        if self._change:
            assert ready.after is not None
            end.move(self._held, self._before, ready.after)
        elif ready.after is not None:
            end.put(self._keys, ready.after.rows, [width] * rows)
        elif end.keeps:
            end.hold(part.microbatch, ready.y)
        learned.noted(part, ready.guess, ready.lesson, self._change)
        if ready.follows is not None:
            learned.noted(part, learned.without(part), ready.follows, False)
