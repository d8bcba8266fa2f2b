"""One stage's end of an edge: encode, frame, send, receive, decode, count.

An edge joins stage s and stage s + 1 by two directed links. Each stage holds an ``EdgeEnd`` for
each neighbour on another endpoint; it sends on one link and receives on the other.
"""

from __future__ import annotations

from thinwire.boundary import StepPlan
from thinwire.edge.link import Link, Names
from thinwire.edge.receiver import LinkReceiver
from thinwire.edge.sender import LinkSender
from thinwire.schemes.mask import MaskEnd

__all__ = ["EdgeEnd", "LinkReceiver", "LinkSender", "Names"]


class EdgeEnd:
    """One stage's end of an edge: it sends on one link and receives on the other."""

    def __init__(self, outgoing: LinkSender, incoming: LinkReceiver) -> None:
        self.outgoing, self.incoming = outgoing, incoming
        #: The other end, where it lives in this process.
        self.peer: EdgeEnd | None = None
        self._share()

    def _share(self) -> None:
        """Let the backward link, if it wants to, know what the forward link has transmitted."""
        ways: list[Link] = [self.outgoing, self.incoming]
        forward, backward = sorted(ways, key=lambda link: link.place.direction)
        for index, state in backward.states.items():
            if isinstance(state, MaskEnd):
                forward.states[index].supports = state.masks
            if backward.scheme.by_activations and forward.scheme.tells:
                state.activations = forward.states[index]
                state.activations.keeps = True

    def begin_step(self, plan: StepPlan, receives: bool, sends: bool) -> None:
        """Start a step; gradients neither go nor come in evaluation."""
        if sends:
            self.outgoing.begin_step(plan)
        if receives:
            self.incoming.begin_step(plan)
