"""What is expected of a kind of values, and how it is learned from those that came.

Tables by ids, and a map to what they leave. They stay as they are during a step, and learn once it
counts: both ends then hold the same, whatever the order in which its micro-batches were decoded.
Positions of a magnitude far beyond the others', as attention sinks have, teach nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.predict.exact import Map, on_grid
from thinwire.predict.fit import SAMPLED, Fit
from thinwire.predict.tables import Tables

_FAR, _ORDINARY = 8.0, 0.95  # times the magnitude that this share of the positions stays below


@dataclasses.dataclass
class Guess:
    """What is expected of positions, float32 [n, width]; None: nothing. ``ids`` [n] each and
    ``source`` [n, inputs] are what it is made of."""

    ids: list[Tensor]
    source: Tensor | None
    values: Tensor | None


@dataclasses.dataclass(frozen=True)
class _Lesson:
    ids: list[Tensor]
    values: Tensor
    source: Tensor | None


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
        self._lessons: dict[tuple[int, int], _Lesson] = {}

    def begin(self) -> None:
        """A step begins: what the last one has shown is gone, unless it counted."""
        self._lessons.clear()
        self.passed = None

    def guess(self, ids: list[Tensor], source: Tensor | None) -> Guess:
        """What to expect at positions of these ``ids``; ``source``: the map's, float32."""
        values = self.tables(ids)
        if self.centre is None or source is None:
            return Guess(ids, None, values)
        mean = self.centre(ids)
        codes, scales = on_grid(source if mean is None else source - mean)
        if self._map is not None and self._map.codes.shape[0] == codes.shape[1]:
            part = self._map(codes, scales)
            values = part if values is None else values.add_(part)
        return Guess(ids, codes.mul_(scales) if self.fit is not None else None, values)

    def note(self, place: tuple[int, int], guess: Guess, y: Tensor, kept: Tensor | None) -> None:
        """Values ``y`` [n, width] came where ``guess`` was expected, at this ``place`` of the step;
        ``kept`` indexes those that travelled, None: all."""
        ids, source = guess.ids, guess.source
        if kept is not None:
            ids, y = [one[kept] for one in ids], y[kept]
            source = None if source is None else source[kept]
        self._lessons[place] = _Lesson(ids, y, source)

    def settle(self) -> None:
        """The step counts: learn from it."""
        lessons = [self._lessons[place] for place in sorted(self._lessons)]
        self._lessons.clear()
        if self.passed is not None:
            self._map, self.found = self.passed, None
        if lessons:
            self._learn(lessons)

    def _learn(self, lessons: Sequence[_Lesson]) -> None:
        values = torch.cat([lesson.values for lesson in lessons])
        parts = zip(*[lesson.ids for lesson in lessons], strict=True)
        ids = [torch.cat(part) for part in parts]
        near = _near(values)
        if near is not None:
            ids, values = [one[near] for one in ids], values[near]
        left = self.tables.learn(ids, values)
        if self.fit is None or any(lesson.source is None for lesson in lessons):
            return
        source = torch.cat([lesson.source for lesson in lessons if lesson.source is not None])
        if near is not None:
            source = source[near]
        every = max(1, len(source) // SAMPLED)
        self.fit.add(source[::every], left[::every])
        self.found = self.fit.due() or self.found

    def forget(self) -> None:
        """Begin anew."""
        self.tables.forget()
        self._map = self.found = self.passed = None
        if self.fit is not None:
            self.fit.forget()
        self._lessons.clear()

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
        self._map, self.found = _map_of(state, "map"), _map_of(state, "found")
        if self.fit is not None:
            self.fit.load_state_dict(part_of(state, "fit"))
        own = ("map.", "found.", "fit.")
        self.tables.load_state_dict(
            {name: tensor for name, tensor in state.items() if not name.startswith(own)}
        )


def _near(values: Tensor) -> Tensor | None:
    """The indices of vectors that are not far beyond the others; None: all."""
    largest = values.abs().amax(1)
    if not len(largest):
        return None
    ordinary = largest.kthvalue(max(1, math.ceil(_ORDINARY * len(largest)))).values
    near = largest <= _FAR * ordinary
    return None if bool(near.all()) else near.nonzero()[:, 0]


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
