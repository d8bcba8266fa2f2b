"""What both ends of a link know of a position beside its value: an id, by which tables are read.

A source names what it takes of the step's ``context``, and makes of it an id for each position of
each row. Positions are the second dimension of a tensor [rows, positions, width], or the pixels
of one [rows, channels, height, width].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from thinwire.errors import SpecError

Context = Mapping[str, Tensor]


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
        _SOURCES[name] = cls()
        return cls

    return add


def sources(text: str) -> tuple[Source, ...]:
    """The sources that ``text`` names, as ``target+token``. Raises SpecError."""
    found = []
    for name in text.split("+"):
        if name not in _SOURCES:
            raise SpecError(
                f"nothing is predicted by {name!r}; known: {', '.join(sorted(_SOURCES))}"
            )
        found.append(_SOURCES[name])
    return tuple(found)


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
        token = _spread(context["token"], positions)
        return torch.cat([torch.full_like(token[:, :1], -1), token[:, :-1]], dim=1)


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
