"""``ef21(change)``: both ends hold g, the change of the value from it is sent, and moves it.

Richtárik, Sokolov, Fatkhullin 2021, "EF21: A New, Simpler, Theoretically Better, and Practically
Faster Error Feedback": y <- g + decode(change.encode(x - g)); g <- y, from g = 0. The receiver
computes on y, which is dense whatever the codec. ``delta`` differs in that it sends first visits
by a codec of their own, and values where changes are larger.

Rows are told apart by sample, or with ``key=slot`` by their place in the batch, as in Rudakov et
al. 2024: then x is of another sample than g.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from thinwire.codecs import Codec
from thinwire.schemes.base import Keyed, Scheme, needs_alone
from thinwire.schemes.closed_loop import Coding, LoopScheme
from thinwire.schemes.delta import FIRST_VISIT
from thinwire.schemes.value import Value
from thinwire.spec import register


@register("scheme", "ef21")
@dataclasses.dataclass(frozen=True)
class EF21(LoopScheme):
    """``change`` codes every visit; ``ref`` keeps g."""

    change: Codec
    key: Literal["sample", "slot"] = "sample"
    ref: Literal["fp32", "bf16", "int8", "int4"] = "fp32"

    def __post_init__(self) -> None:
        needs_alone("ef21", self.change)

    @property
    def coding(self) -> Coding:
        change = self.change
        return Coding(str(self), change, change, change, self.ref, reseeds=False)

    @property
    def keyed(self) -> Keyed:
        return Keyed(self.key, shared=True, kept=self.ref)

    def stateless(self) -> Scheme:
        """Dense, as what the model was trained on: ``change`` alone would be another function."""
        return Value(FIRST_VISIT)
