"""Which codec a closed loop uses for what, and what both of its ends may do with it."""

from __future__ import annotations

import dataclasses

import torch

from thinwire.codecs import Codec
from thinwire.frame import Kind
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
    """What a scheme is to its ends: ``name`` is its spec, ``ref`` how references are kept.

    ``reseeds``: where a change has more energy than the value, the value is sent.
    """

    name: str
    change: Codec
    first: Codec
    second: Codec
    ref: str
    reseeds: bool = True

    def codec_of(self, kind: Kind) -> Codec:
        """The codec in which sections of ``kind`` travel."""
        if kind in _IN_SECOND:
            return self.second
        return self.change if kind in _IN_CHANGE else self.first


def least_share(dtype: torch.dtype) -> float:
    """The part of a value's energy below which a change is lost in the value's own rounding."""
    return (torch.finfo(dtype).eps / 2) ** 2
