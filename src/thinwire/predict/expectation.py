"""What is expected of a kind of values, and how it is learned from those that came.

Tables by ids, and a map to what they leave. They stay as they are during a step, and learn once it
counts: both ends then hold the same, whatever the order in which its micro-batches were decoded.
Positions of a magnitude far beyond the others', as attention sinks have, teach nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.predict.exact import Map
from thinwire.predict.far import is_far
from thinwire.predict.fit import SAMPLED, Fit
from thinwire.predict.lessons import Lessons
from thinwire.predict.ops import ops
from thinwire.predict.tables import Tables


@dataclasses.dataclass
class Guess:
    """What is expected of positions with ``ids`` [n] each, float32 [n, width]; None: nothing.
    ``shown``: what a map leads from at ``every`` so manieth of them, to which it is fitted;
    ``activation``: at all of them, [n, inputs]."""

    ids: list[Tensor]
    values: Tensor | None = None
    shown: Tensor | None = None
    every: int = 1
    activation: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Some of a message's positions, with what a map leads from."""

    ids: list[Tensor]
    values: Tensor
    source: Tensor


class Expectation:
    """``centre``: tables of what the map leads from, None without a map. ``fits``: whether the map
    is found here."""

    def __init__(self, count: int, centre: Tables | None, fits: bool) -> None:
        self.tables = Tables(count)
        self.centre = centre
        self.fit = Fit() if fits and centre is not None else None
        self._map: Map | None = None
        #: A map that was found, until it has been sent in a step that counts.
        self.found: Map | None = None
        #: A map that was sent or has arrived in this step.
        self.passed: Map | None = None
        self._count = count
        self._lessons: dict[int, Lessons] = {}  # by width
        self._samples: dict[tuple[int, int], _Sample] = {}

    def begin(self) -> None:
        """A step begins: what the last one has shown is gone, unless it counted."""
        self._clear()
        self.passed = None

    def _clear(self) -> None:
        for lessons in self._lessons.values():
            lessons.clear()
        self._samples.clear()

    def guess(self, ids: list[Tensor], source: Tensor | None) -> Guess:
        """What to expect at positions of these ``ids``; ``source``: the map's, float32."""
        values = self.tables(ids)
        width = None if source is None else source.shape[1]
        if self.centre is None or source is None or self.centre.width not in (None, width):
            return Guess(ids, values, activation=source)
        codes, scales = self.centre.centred(ids, source)
        fits = self._map is not None and self._map.codes.shape == (width, width)
        if fits and self.tables.width in (None, width):
            assert self._map is not None
            if values is None:
                values = self._map(codes, scales)
            else:
                self._map.add_to(values, codes, scales)
        shown, every = None, 1
        if self.fit is not None:
            every = max(1, len(codes) // SAMPLED)
            shown = codes[::every] * scales[::every, None]
        return Guess(ids, values, shown, every, source)

    def note(
        self,
        place: tuple[int, int],
        guess: Guess,
        y: Tensor,
        base: Tensor | None = None,
        factor: float = 1.0,
        kept: Tensor | None = None,
    ) -> None:
        """Where ``guess`` was expected y - base came, times ``factor``, [n, width], at this
        ``place`` of the step; ``kept`` indexes the positions that travelled, None: all."""
        ids = guess.ids
        if kept is not None:
            ids, y = [one[kept] for one in ids], y[kept]
            base = None if base is None else base[kept]
        values = self.room(len(y), y.shape[1], y.device)
        if base is None:
            values.copy_(y)
        else:
            torch.sub(y, base, out=values)
        if factor != 1.0:
            values.mul_(factor)
        self.noted(place, guess, ids, values, kept)

    def room(self, n: int, width: int, device: torch.device) -> Tensor:
        """Where values of the next ``n`` positions are to stand, float32 [n, width]; ``noted``
        says that they do."""
        lessons = self._lessons.get(width)
        if lessons is None:
            lessons = self._lessons[width] = Lessons(self._count)
        return lessons.room(n, width, device)

    def noted(
        self,
        place: tuple[int, int],
        guess: Guess,
        ids: list[Tensor],
        values: Tensor,
        kept: Tensor | None = None,
    ) -> None:
        """As ``note``, of ``values`` in the ``room`` that was asked for last, and their ``ids``."""
        self._lessons[values.shape[1]].add(place, ids, len(values))
        if guess.shown is not None:
            self._samples[place] = _sample(guess, ids, values, kept)

    def settle(self) -> None:
        """The step counts: learn from it."""
        if self.passed is not None:
            self._map, self.found = self.passed, None
        for width in sorted(self._lessons):
            if len(self._lessons[width]):
                self._learn(*self._lessons[width].all())
        self._clear()

    def _learn(self, ids: list[Tensor], values: Tensor) -> None:
        shown = [self._samples[place] for place in sorted(self._samples)]
        self._fit([one for one in shown if one.values.shape[1] == values.shape[1]])
        largest = ops(values).largest(values)
        near = _near(largest)
        if near is not None:
            ids, values, largest = [one[near] for one in ids], values[near], largest[near]
        self.tables.learn(ids, values, largest)

    def _fit(self, samples: Sequence[_Sample]) -> None:
        """Fit the map to what the tables leave of ``samples``."""
        if self.fit is None or not samples or len({len(one.source.T) for one in samples}) > 1:
            return
        ids = [torch.cat(part) for part in zip(*[one.ids for one in samples], strict=True)]
        source = torch.cat([one.source for one in samples])
        left = torch.cat([one.values for one in samples])
        known = self.tables(ids)
        if known is not None and known.shape == left.shape:
            left = left - known
        near = _near(ops(left).largest(left))
        if near is not None:
            source, left = source[near], left[near]
        self.fit.add(source, left)
        self.found = self.fit.due() or self.found

    def forget(self) -> None:
        """Begin anew."""
        self.tables.forget()
        self._map = self.found = self.passed = None
        if self.fit is not None:
            self.fit.forget()
        self._clear()

    def shared_state(self) -> dict[str, Tensor]:
        """What both ends hold alike."""
        return self.tables.state_dict() | _as_state("map", self._map)

    def state_dict(self) -> dict[str, Tensor]:
        """What ``load_state_dict`` restores, between two steps."""
        state = self.shared_state() | _as_state("found", self.found)
        if self.fit is not None:
            state |= {f"fit.{name}": tensor for name, tensor in self.fit.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError, KeyError, TypeError or RuntimeError where it is another's."""
        self.forget()
        if self.fit is not None:
            self.fit.load_state_dict(part_of(state, "fit"))
        own = ("map.", "found.", "fit.")
        self.tables.load_state_dict(
            {name: tensor for name, tensor in state.items() if not name.startswith(own)}
        )
        self._map, self.found = _map_of(state, "map"), _map_of(state, "found")
        for one in (self._map, self.found):
            if one is not None and (self.centre is None or len(one.codes) != one.codes.shape[1]):
                raise ValueError("a map where none belongs")


def _sample(guess: Guess, ids: Sequence[Tensor], values: Tensor, kept: Tensor | None) -> _Sample:
    """The positions that ``guess`` shows, those of them that are ``kept``, of which ``ids`` and
    ``values`` are."""
    shown = guess.shown
    assert shown is not None
    some = torch.arange(len(shown), device=values.device) * guess.every
    if kept is not None:
        there = torch.isin(some, kept)
        some, shown = torch.searchsorted(kept, some[there]), shown[there]
    return _Sample([one[some] for one in ids], values[some], shown)


def _near(largest: Tensor) -> Tensor | None:
    """The indices of vectors that are not far beyond the others; None: all. ``largest``: their
    greatest magnitudes."""
    far = is_far(largest)
    return None if far is None else (~far).nonzero()[:, 0]


def part_of(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors below ``name``."""
    start = f"{name}."
    return {key.removeprefix(start): t for key, t in state.items() if key.startswith(start)}


def _as_state(name: str, found: Map | None) -> dict[str, Tensor]:
    if found is None:
        return {}
    return {f"{name}.codes": found.codes, f"{name}.exponents": found.exponents}


def _map_of(state: Mapping[str, Tensor], name: str) -> Map | None:
    part = part_of(state, name)
    if not part:
        return None
    codes, exponents = part["codes"], part["exponents"]
    return Map.parsed(Map(codes, exponents).payload, *codes.shape)
