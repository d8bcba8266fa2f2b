"""Which scheme each link of a pipeline uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from thinwire.errors import SpecError
from thinwire.schemes import Scheme, scheme

OFF = "off"
#: Epochs from which remembering samples pays: before, most of their visits are first ones.
_DELTA_FROM = 3
_RESTING_FROM = 2  # after their first visit they cost nothing at all


def default_forward(epochs: float, *, resting: bool = False) -> str:
    """The scheme of the activations for a run of so many epochs.

    Below three the traffic is mostly first visits, which ``delta`` sends in 8 bits: ``tile`` sends
    every visit in 4, and remembers nothing. ``resting``: stages are frozen that compute and send
    each sample once, if the end behind them remembers it; then ``delta`` pays from two on.
    """
    return "delta(int4)" if epochs >= (_RESTING_FROM if resting else _DELTA_FROM) else "tile"


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
                for text in pair:
                    scheme(text)

    def schemes(self, edge: int) -> tuple[Scheme, Scheme] | None:
        """(forward, backward) schemes of an edge; None where it is off."""
        forward, backward = self.edges.get(edge, (self.forward, self.backward))
        return None if forward == OFF else (scheme(forward), scheme(backward))
