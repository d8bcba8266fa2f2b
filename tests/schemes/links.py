"""Both ends of a link without the link: sections go through a frame, as they would on a wire."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire import frame
from thinwire.frame import Kind, Place, Section
from thinwire.schemes import Visit, scheme

WIDTH = 96


def visit(
    keys: Sequence[int] | None, lengths: Sequence[int], width: int = WIDTH, step: int = 0
) -> Visit:
    seeds = [hash((step, row)) for row in range(len(lengths))]
    return Visit(
        None if keys is None else tuple(keys),
        tuple(lengths),
        torch.tensor(seeds, dtype=torch.int64),
        any(n != width for n in lengths),
    )


def full(keys: Sequence[int], width: int = WIDTH) -> Visit:
    return visit(keys, [width] * len(keys), width)


def on_the_wire(sections: Sequence[Section]) -> bytes:
    return b"".join(frame.build(Place(), sections))


def off_the_wire(data: bytes | memoryview) -> list[Section]:
    return frame.parse(data, Place())[1]


class Link:
    """A sender and a receiver of one scheme."""

    def __init__(self, spec: str) -> None:
        self.scheme = scheme(spec)
        self.sender: Any = self.scheme.sender()
        self.receiver: Any = self.scheme.receiver()
        self.kinds: list[Kind] = []

    def begin(self, *visits: Visit, dense: bool = False) -> None:
        self.sender.begin_step(visits, dense)
        self.receiver.begin_step(visits, dense)

    def move(self, x: Tensor, microbatch: int, there: Visit) -> Tensor:
        """One micro-batch from end to end."""
        sections = self.sender.encode(x, microbatch, there)
        self.kinds = [s.kind for s in sections]
        y: Tensor = self.receiver.decode(off_the_wire(on_the_wire(sections)), microbatch, there)
        return y

    def step(
        self, x: Tensor, keys: Sequence[int], dense: bool = False, counts: bool = True
    ) -> Tensor:
        """A training step of one micro-batch [rows, width] with full rows; whether it counts."""
        there = full(keys, x[0].numel())
        self.begin(there, dense=dense)
        y = self.move(x, 0, there)
        if counts:
            self.sender.end_step()
            self.receiver.end_step()
        return y

    def evaluate(self, x: Tensor) -> Tensor:
        """What edges do in evaluation: a fresh stateless pair."""
        plain = self.scheme.stateless()
        there = full(range(len(x)), x[0].numel())
        sections = plain.sender().encode(x, 0, there)
        return plain.receiver().decode(off_the_wire(on_the_wire(sections)), 0, there)

    @property
    def digests(self) -> tuple[int, int]:
        return self.sender.digest(), self.receiver.digest()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


#: What a step of mixed traffic is: [(keys, lengths)] by micro-batch, and the tensors.
Step = tuple[list[tuple[list[int], list[int]]], list[Tensor]]


def mixed_step(number: int) -> Step:
    """Random ids of 40 samples, repeats within the step, three lengths, sudden changes.

    Python's generator and single torch operations: the same in every process.
    """
    chance = random.Random(number)
    microbatches, tensors = [], []
    for _ in range(chance.choice([1, 2, 3])):
        rows = chance.choice([1, 2, 4])
        keys = [chance.randrange(40) - 5 for _ in range(rows)]
        lengths = [chance.choice([WIDTH, WIDTH, WIDTH, 64, 33]) for _ in keys]
        values = []
        for key in keys:
            own = random.Random(key)
            drift = 10.0 if chance.random() < 0.05 else 0.1
            values.append(
                [own.uniform(-1, 1) + drift * chance.uniform(-1, 1) for _ in range(WIDTH)]
            )
        microbatches.append((keys, lengths))
        tensors.append(torch.tensor(values))
    return microbatches, tensors


def visits_of(number: int, step: Step) -> list[Visit]:
    return [
        visit(keys, lengths, step=number)._replace(
            context={"token": torch.tensor(keys, dtype=torch.int64) % 7}
        )
        for keys, lengths in step[0]
    ]
