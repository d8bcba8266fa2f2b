"""``predicted(codec, by=target+token)``: what differs from what both ends expect.

Both ends hold tables of what values were like where the same was known of a position: its token,
the one before it, what is to be predicted there; and maps from what has travelled there before.
With e what they say of a row x, and of the gain g the nearest of 256 steps to what leaves least of
x, a byte that travels beside the row,

1. p <- g e, or 0 where nothing is known yet;
2. y <- p + decode(codec.encode(x - p));
3. the receiver computes on y; both ends learn from y, once the step counts.

With g = 0 that is the value, and ``delta(…, by=…)`` is the same with the sample's reference added
to p. Gradients change in size faster than tables do, not in direction: the gain makes up for it.
It needs no samples to come again: the first epoch is predicted too, and so are gradients, times the
number of positions of the batch, by which a mean loss divides them. In evaluation values travel
through the codec, less what tables say of them where the context is known.
"""

from __future__ import annotations

import dataclasses

from thinwire.codecs import Codec
from thinwire.errors import SpecError
from thinwire.predict import sources, tables_of
from thinwire.predict.sources import DRIFT, OFF
from thinwire.schemes.base import Scheme, needs_alone
from thinwire.schemes.closed_loop import Coding, LoopScheme
from thinwire.schemes.value import Value
from thinwire.spec import register


@register("scheme", "predicted")
@dataclasses.dataclass(frozen=True)
class Predicted(LoopScheme):
    """``by``: the sources of what is expected, the most telling first."""

    codec: Codec
    by: str = "target+token"

    def __post_init__(self) -> None:
        needs_alone("predicted", self.codec)
        if DRIFT in sources(self.by).vectors:
            raise SpecError(f"by={self.by}: drift is of changes, which delta(…,by=…) sends")

    @property
    def coding(self) -> Coding:
        return Coding(str(self), self.codec, self.codec, self.codec, None, by=self.by)

    def stateless(self) -> Scheme:
        return Value(self.codec)

    def evaluated(self) -> Scheme:
        return by_tables(self.codec, self.by)


def by_tables(codec: Codec, by: str) -> Scheme:
    """What codes values through ``codec`` by those of the sources ``by`` that are tables."""
    tables = tables_of(by)
    return Value(codec) if tables == OFF else Predicted(codec, tables)
