"""Both ends of a link without the link: sections go through a frame, as they would on a wire."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire import frame
from thinwire.contract.data import Step, shown
from thinwire.contract.requirement import on
from thinwire.frame import Place, Section
from thinwire.schemes import Receiver, Scheme, Sender, Visit

#: Bytes of a message.
Frame = bytes


class Ends:
    """A sender and a receiver of one scheme."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.sender: Sender = scheme.sender()
        self.receiver: Receiver = scheme.receiver()

    def own(self, step: Step) -> Step:
        """``step`` as the link would announce it: by places in the batch where the scheme tells
        rows apart by these."""
        if self.scheme.keyed is None or self.scheme.keyed.by != "slot":
            return step
        found: Step = []
        for visit, x in step:
            first = sum(len(before.lengths) for before, _ in found)
            slots = tuple(range(first, first + len(visit.lengths)))
            found.append((visit._replace(keys=slots), x))
        return found

    def begin(self, step: Step, dense: bool = False) -> None:
        visits = [visit for visit, _ in step]
        self.sender.begin_step(visits, dense)
        self.receiver.begin_step(visits, dense)

    def end(self) -> None:
        """The step counts."""
        self.sender.end_step()
        self.receiver.end_step()

    def send(self, x: Tensor, microbatch: int, visit: Visit, out: Tensor | None = None) -> Frame:
        """The message of a copy of ``x``."""
        return on_the_wire(self.sender.encode(x.clone(), microbatch, visit, out))

    def take(self, data: Frame, microbatch: int, visit: Visit) -> Tensor:
        return self.receiver.decode(off_the_wire(data), microbatch, visit)

    def step(
        self, step: Step, shuffled: int | None = None, dense: bool = False
    ) -> tuple[list[Frame], list[Tensor]]:
        """A training step from end to end: its messages, and what was received.

        ``shuffled``: the two ends go through the micro-batches in orders of their own.
        """
        step = self.own(step)
        self.begin(step, dense)
        orders = [list(range(len(step))) for _ in range(2)]
        if shuffled is not None:
            for place, order in enumerate(orders):
                random.Random(2 * shuffled + place).shuffle(order)
        sent: dict[int, Frame] = {}
        received: dict[int, Tensor] = {}
        for k in orders[0]:
            with on(shown(*step[k])):
                sent[k] = self.send(step[k][1], k, step[k][0])
        for k in orders[1]:
            with on(shown(*step[k])):
                received[k] = self.take(sent[k], k, step[k][0])
        self.end()
        places = range(len(step))
        return [sent[k] for k in places], [received[k] for k in places]

    @property
    def digests(self) -> tuple[int, int]:
        return self.sender.digest(), self.receiver.digest()

    @property
    def states(self) -> tuple[Any, ...]:
        """All that is known of both ends' states, to be compared with ``equal``."""
        return (*self.digests, *(_copy(end.state_dict()) for end in (self.sender, self.receiver)))


def _copy(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }


def on_the_wire(sections: Sequence[Section]) -> Frame:
    sections = [_on_the_host(section) for section in sections]
    return b"".join(frame.build(Place(), sections))


def _on_the_host(section: Section) -> Section:
    section.payload = section.payload.cpu().contiguous()
    return section


def off_the_wire(data: Frame) -> list[Section]:
    return frame.parse(data, Place())[1]


def equal(one: Any, other: Any) -> bool:
    """Whether two states are equal: tensors, and what holds them."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
