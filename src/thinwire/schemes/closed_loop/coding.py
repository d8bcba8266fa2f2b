"""Which codec a closed loop uses for what, and what both of its ends may do with it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from thinwire.codecs import Codec
from thinwire.frame import Kind
from thinwire.predict import Expectations, sources
from thinwire.predict.sources import ACTIVATION, OFF
from thinwire.schemes.closed_loop import apart
from thinwire.store import Visit as Mode

CHANGES = (Kind.CHANGE, Kind.SECOND)
_IN_SECOND = (Kind.SECOND, Kind.RESEED)
_IN_CHANGE = (Kind.CHANGE, Kind.SAME)
KINDS = (
    *(Kind.VALUE, Kind.FIRST, Kind.REPAIR),
    *(Kind.CHANGE, Kind.SECOND, Kind.RESEED, Kind.SAME),
    Kind.DENSE,
)
KIND_OF = {
    Mode.FIRST: Kind.FIRST,
    Mode.AGAIN: Kind.CHANGE,
    Mode.REPEAT: Kind.VALUE,
    Mode.UNKEPT: Kind.VALUE,
}


@dataclasses.dataclass(frozen=True)
class Coding:
    """What a scheme is to its ends: ``name`` is its spec, ``ref`` how references are kept, None
    where none are, ``by`` what values and changes are predicted by.

    ``reseeds``: where a change has more energy than the value, the value is sent.
    """

    name: str
    change: Codec
    first: Codec
    second: Codec
    ref: str | None
    reseeds: bool = True
    by: str = OFF

    def codec_of(self, kind: Kind) -> Codec:
        """The codec in which sections of ``kind`` travel."""
        if kind in _IN_SECOND:
            return self.second
        return self.change if kind in _IN_CHANGE else self.first

    def expectations(self, fits: bool) -> Expectations | None:
        """What an end expects before anything was learned; None where nothing ever is."""
        by = sources(self.by)
        return Expectations(by, self.ref is not None, fits) if by else None

    @functools.cached_property
    def by_activations(self) -> bool:
        """Whether values are predicted by what has travelled forward."""
        return ACTIVATION in sources(self.by).vectors

    @property
    def takes(self) -> frozenset[str]:
        """The names of the tensors of ``Visit.context`` that it needs in training."""
        return sources(self.by).takes

    @property
    def codecs(self) -> set[Codec]:
        """All that it uses."""
        return {self.change, self.first, self.second}

    def row_nbytes(self, n: int) -> int:
        """The most payload bytes of a row of up to ``n`` values."""
        return (self.by != OFF) + max(c.most_row_nbytes(n, torch.float32) for c in self.codecs)

    def told_nbytes(self, shape: Sequence[int]) -> int:
        """The most payload bytes beside the rows of a tensor of ``shape``."""
        found = self.expectations(fits=False)
        return 0 if found is None else found.most_told(shape) + apart.most_nbytes(shape)


def least_share(dtype: torch.dtype) -> float:
    """The part of a value's energy below which a change is lost in the value's own rounding."""
    return (torch.finfo(dtype).eps / 2) ** 2
