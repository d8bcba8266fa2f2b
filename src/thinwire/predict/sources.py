"""What both ends of a link know of a position beside its value: ids, by which tables are read, and
vectors, from which maps lead.

A source of ids names what it takes of the step's ``context``, and makes of it an id for each
position of each row. Positions are the second dimension of a tensor [rows, positions, width], or
the pixels of one [rows, channels, height, width].
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from thinwire import spec
from thinwire.errors import SpecError

Context = Mapping[str, Tensor]

#: What a map leads from: of a change, the reference that it belongs to; of a gradient, the
#: activation that it belongs to, as both ends have it.
DRIFT, ACTIVATION = "drift", "activation"
_VECTORS = (DRIFT, ACTIVATION)
OFF = "off"


class Source(ABC):
    """An id for each position; ``takes`` names the tensors of ``context`` that it is made of."""

    takes: tuple[str, ...] = ()

    @abstractmethod
    def ids(self, context: Context, rows: int, positions: int) -> Tensor:
        """int64 [rows, positions], from whole numbers alone: the same at both ends. Below zero
        stands for none."""


_SOURCES: dict[str, Source] = {}


def register_source(name: str) -> Callable[[type[Source]], type[Source]]:
    """Class decorator that makes a source reachable by ``name`` in ``by=name+…``."""

    def add(cls: type[Source]) -> type[Source]:
        if name in (OFF, *_VECTORS):
            raise ValueError(f"{name!r} is the name of another source")
        takes: object = cls.takes
        if not isinstance(takes, tuple) or not all(isinstance(one, str) for one in takes):
            raise TypeError(f"takes of {cls.__name__} is a tuple of names, as ('token',)")
        _SOURCES[name] = cls()
        spec.note(cls, name)
        return cls

    return add


@dataclasses.dataclass(frozen=True)
class By:
    """What a scheme predicts by: sources of ids, the most telling first, and of vectors."""

    ids: tuple[Source, ...] = ()
    vectors: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.ids or self.vectors)

    @property
    def takes(self) -> frozenset[str]:
        """The names of the tensors of ``context`` that it needs."""
        return frozenset(name for source in self.ids for name in source.takes)


def sources(text: str) -> By:
    """The sources that ``text`` names, as ``target+token``; ``off``: none. Raises SpecError."""
    names = text.split("+")
    if names == [OFF]:
        return By()
    for name in names:
        if name not in _SOURCES and name not in _VECTORS:
            known = ", ".join([*sorted([*_SOURCES, *_VECTORS]), OFF])
            raise SpecError(f"nothing is predicted by {name!r}; known: {known}")
        if names.count(name) > 1:
            raise SpecError(f"by={text}: {name} stands there twice")
    vectors = frozenset(names) & frozenset(_VECTORS)
    return By(tuple(_SOURCES[name] for name in names if name not in vectors), vectors)


def tables_of(text: str) -> str:
    """Those of the sources that ``text`` names by which tables are read; ``off``: none."""
    return "+".join(name for name in text.split("+") if name not in _VECTORS) or OFF


def _spread(ids: Tensor, positions: int) -> Tensor:
    """Ids [rows, at least ``positions``], or [rows] for all positions of a row."""
    if ids.dim() == 1:
        return ids[:, None].expand(-1, positions)
    return ids[:, :positions]


@register_source("token")
class Token(Source):
    """The token at a position."""

    takes = ("token",)

    def ids(self, context: Context, rows: int, positions: int) -> Tensor:
        return _spread(context["token"], positions)


@register_source("previous")
class Previous(Source):
    """The token before it."""

    takes = ("token",)

    def ids(self, context: Context, rows: int, positions: int) -> Tensor:
        token = _spread(context["token"], positions)[:, : max(positions - 1, 0)]
        return torch.nn.functional.pad(token, (min(positions, 1), 0), value=-1)


@register_source("target")
class Target(Source):
    """What is to be predicted there: a token, or of an image its class."""

    takes = ("target",)

    def ids(self, context: Context, rows: int, positions: int) -> Tensor:
        return _spread(context["target"], positions)


@register_source("position")
class Position(Source):
    """Where it is."""

    def ids(self, context: Context, rows: int, positions: int) -> Tensor:
        return torch.arange(positions).expand(rows, -1)


@register_source("mean")
class Mean(Source):
    """The same everywhere."""

    def ids(self, context: Context, rows: int, positions: int) -> Tensor:
        return torch.zeros(rows, positions, dtype=torch.int64)
