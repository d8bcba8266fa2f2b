"""``delta(change, first=int8, second=change)``: the change since the sample's last visit (AQ-SGD).

Wang et al. 2022, "Fine-tuning Language Models over Slow Networks using Activation Compression
with Guarantees", Algorithm 1. Both ends hold, for each sample, the reference m: what the receiver
has computed on at the last visit. On a visit with value x

1. seen for the first time: y <- decode(first.encode(x));
2. later: y <- m + decode(change.encode(x - m)), a closed loop, since m includes old errors; at its
   second visit, where the change is largest, by ``second``;
3. where the change has more energy than the value: y <- decode(second.encode(x));
4. where the change is less than an int8 reference is off anyway: y <- m, and only that is sent;
5. the receiver computes on y; the sender back-propagates through its exact x;
6. m <- y as ``ref`` keeps it: fp32, bf16, int8 or int4.

"First" is per sample, not per epoch. A sample's second occurrence in a step, one for which there
is no room, and evaluation, send a value in the ``first`` codec and leave m alone. Both ends add the
same decoded payload with one addition a value, and keep the sum by the same function, so their
copies are equal to the bit.

With ``by`` both ends expect something of a value by what is known of its positions, and of a change
by its reference too, as in ``predicted``: in each row that, times the gain that leaves least, is
added to what is above, so that zero, the reference and the prediction are the same scheme.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Literal

from thinwire.codecs import Codec, codec
from thinwire.predict import sources
from thinwire.predict.sources import OFF
from thinwire.schemes.base import Keyed, Scheme, needs_alone
from thinwire.schemes.closed_loop import Coding, LoopScheme
from thinwire.schemes.predicted import by_tables
from thinwire.schemes.value import Value
from thinwire.spec import register

#: Not float32: the first epoch would otherwise bound the speed-up of the whole run.
FIRST_VISIT = codec("int8")


@register("scheme", "delta")
@dataclasses.dataclass(frozen=True)
class Delta(LoopScheme):
    """``change`` codes the later visits, ``first`` each sample's first, ``second`` the one after;
    ``ref`` keeps what both ends remember; ``by`` predicts values and changes."""

    change: Codec
    first: Codec = FIRST_VISIT
    second: Codec = dataclasses.field(
        default=None,  # type: ignore[assignment]  # filled in
        metadata={"derive": operator.attrgetter("change")},
    )
    ref: Literal["fp32", "bf16", "int8", "int4"] = "int8"
    by: str = OFF

    def __post_init__(self) -> None:
        if self.second is None:
            object.__setattr__(self, "second", self.change)  # type: ignore[unreachable]
        needs_alone("delta", *self._codecs)
        sources(self.by)

    @property
    def _codecs(self) -> tuple[Codec, Codec, Codec]:
        return self.change, self.first, self.second

    @property
    def coding(self) -> Coding:
        change, first, second = self._codecs
        return Coding(str(self), change, first, second, self.ref, by=self.by)

    @property
    def keyed(self) -> Keyed:
        return Keyed("sample", shared=True, kept=self.ref)

    def stateless(self) -> Scheme:
        return Value(self.first)

    def evaluated(self) -> Scheme:
        return by_tables(self.first, self.by)
