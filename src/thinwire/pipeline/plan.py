"""Which scheme each link of a pipeline uses."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from thinwire.codecs.topk import TopK
from thinwire.errors import SpecError
from thinwire.schemes import Delta, Scheme, SharedMask, scheme

_LOG = logging.getLogger(__name__)
OFF = "off"
#: Epochs from which remembering samples pays: before, most of their visits are first ones.
_DELTA_FROM = 3
_RESTING_FROM = 2  # after their first visit they cost nothing at all


def default_forward(epochs: float, *, resting: bool = False, tokens: bool = False) -> str:
    """The scheme of the activations for a run of so many epochs.

    Below three the traffic is mostly first visits, which ``delta`` sends in 8 bits: ``tile`` sends
    every visit in 4, and remembers nothing; with ``tokens``, if steps have them in their context,
    it sends only what they do not tell. ``resting``: stages are frozen that compute and send each
    sample once, if the end behind them remembers it; then ``delta`` pays from two on.
    """
    if epochs >= (_RESTING_FROM if resting else _DELTA_FROM):
        return "delta(int4)"
    return "predicted(tile,by=token+previous)" if tokens else "tile"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Scheme strings for the forward and backward links of every edge, and exceptions by edge.

    ``off`` in both directions leaves an edge to torch's own operations, without any message of
    ours. ``edges`` maps an edge (the number of its upper stage) to a (forward, backward) pair.
    Raises SpecError on a string that cannot be read.
    """

    forward: str = "delta(int4)"
    backward: str = "int8"
    edges: Mapping[int, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for pair in [(self.forward, self.backward), *self.edges.values()]:
            if (pair[0] == OFF) != (pair[1] == OFF):
                raise SpecError(
                    f"'off' stands for torch's own operations both ways; found {pair[0]!r} forward "
                    f"and {pair[1]!r} backward: use raw for an uncompressed direction"
                )
            if pair[0] != OFF:
                _check_pair(*map(scheme, pair))

    def schemes(self, edge: int) -> tuple[Scheme, Scheme] | None:
        """(forward, backward) schemes of an edge; None where it is off."""
        forward, backward = self.edges.get(edge, (self.forward, self.backward))
        return None if forward == OFF else (scheme(forward), scheme(backward))


def _check_pair(forward: Scheme, backward: Scheme) -> None:
    """Raise SpecError where a link is to know what the other one does not tell."""
    if forward.by_activations:
        raise SpecError(
            f"{forward}: activations are known once they have travelled; predict gradients by them"
        )
    if isinstance(forward, SharedMask):
        raise SpecError(f"{forward}: the mask is the forward link's own; share it on the backward")
    if not isinstance(backward, SharedMask):
        return
    if forward.support is None:
        raise SpecError(
            f"backward {backward} takes its mask from the forward link, but {forward} transmits "
            "all values; use topk:… or ef(topk:…) forward"
        )
    if forward.support.fraction != backward.codec.fraction:
        raise SpecError(
            f"backward {backward} keeps another share than forward {forward}, whose mask it takes"
        )


#: Of a change, below which a small GPT ended far above one whose changes had two bits each.
_FEW = 0.3


class Schemes:
    """The schemes of all edges of a pipeline, alike on all ranks."""

    def __init__(self, plan: Plan, edges: int) -> None:
        #: (forward, backward) by edge; None where it is off.
        self.pairs = [plan.schemes(edge) for edge in range(edges)]
        self._all = [one for pair in self.pairs if pair for one in pair]

    @property
    def needs_keys(self) -> bool:
        """Whether steps need sample ids."""
        return any(one.needs_keys for one in self._all)

    @property
    def takes(self) -> frozenset[str]:
        """What steps need of a context."""
        return frozenset().union(*[one.takes for one in self._all])

    @property
    def remembers(self) -> bool:
        """Whether any end of a link remembers rows."""
        return any(one.keyed is not None for one in self._all)

    @property
    def agrees(self) -> bool:
        """Whether two ends remember the same samples, and must agree on them."""
        return any(one.recalls for one in self._all)

    def warn(self) -> None:
        """Say where what one sample leaves is used for another, and where gradients are kept at
        positions whose values were not sent."""
        for one in dict.fromkeys(self._all):
            if one.keyed is not None and one.keyed.by == "slot":
                _LOG.warning(
                    "%s tells rows apart by their place in the batch: what one sample leaves is "
                    "used for another; leave key=slot out to keep samples apart",
                    one,
                )
            if (
                isinstance(one, Delta)
                and isinstance(one.change, TopK)
                and one.change.fraction < _FEW
            ):
                _LOG.warning(
                    "%s sends less than %.0f %% of each change: a small GPT lost far more by that "
                    "than by two bits for all of it, as delta(int2) sends",
                    one,
                    100 * _FEW,
                )
        for forward, backward in dict.fromkeys(pair for pair in self.pairs if pair):
            if backward.by_activations and not forward.tells:
                _LOG.warning(
                    "backward %s: of forward %s not both ends hold what the receiver computes on, "
                    "so that activation says nothing",
                    backward,
                    forward,
                )
            if forward.support is not None and backward.support is not None:
                _LOG.warning(
                    "backward %s chooses positions of its own, most of which forward %s does not "
                    "send: transformers diverged so; topk:…,mask=shared sends gradients at those "
                    "that it does",
                    backward,
                    forward,
                )
