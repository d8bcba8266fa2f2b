"""What codecs and schemes are tried on: tensors and steps that are the same each time."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.schemes import Visit

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: The smallest first: without dimensions, empty, odd, longer than a group or a block of codes.
SHAPES = (
    (),
    (0,),
    (0, 5),
    (5, 0),
    (2, 3, 0),
    (1,),
    (3, 1),
    (7,),
    (3, 5, 7),
    (2, 3, 5, 7),
    (1, 257),
)

#: Of a tensor at an edge: positions and features.
POSITIONS, FEATURES = 6, 4
WIDTH = POSITIONS * FEATURES


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal float32 values; torch's global generator is left alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def told(x: Tensor, **options: object) -> str:
    """A tensor as it is shown: dtype, shape, and options of the call, but for None."""
    given = {name: value for name, value in options.items() if value is not None}
    more = "".join(f", {name} {value}" for name, value in given.items())
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}{more}"


def seeds(count: int) -> Tensor:
    """A seed a row."""
    return torch.arange(count, dtype=torch.int64) * 11 + 3


def encoded(
    codec: Codec,
    x: Tensor,
    lengths: Sequence[int] | None = None,
    seed: int | Tensor = 0,
) -> Tensor:
    """The payload of a copy of ``x``: what a codec does to its input is asked elsewhere."""
    return codec.encode(x.clone(memory_format=torch.contiguous_format), None, lengths, seed)


def round_trip(
    codec: Codec,
    x: Tensor,
    lengths: Sequence[int] | None = None,
    seed: int | Tensor = 0,
) -> Tensor:
    """What is decoded of the payload of ``x``."""
    payload = encoded(codec, x, lengths, seed)
    return codec.decode(payload, x.shape, x.dtype, None, lengths)


def relative_error(x: Tensor, y: Tensor) -> float:
    """The norm of the error over that of ``x``."""
    x, y = x.double(), y.double()
    return float((x - y).norm() / x.norm())


class Everything(Mapping[str, Tensor]):
    """A context that has whatever a scheme takes: int64 [rows, POSITIONS]."""

    def __init__(self, rows: int) -> None:
        self._ids = torch.arange(rows * POSITIONS).view(rows, POSITIONS) % 5

    def __getitem__(self, name: str) -> Tensor:
        return self._ids

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def visit(keys: Sequence[int] | None, lengths: Sequence[int], number: int = 0) -> Visit:
    """What both ends know of rows of ``WIDTH`` values."""
    known = Everything(len(lengths))
    own = torch.tensor([1000 * number + row for row in range(len(lengths))], dtype=torch.int64)
    padded = any(n != WIDTH for n in lengths)
    return Visit(None if keys is None else tuple(keys), tuple(lengths), own, padded, known)


Step = list[tuple[Visit, Tensor]]


@functools.cache
def steps(count: int) -> list[Step]:
    """Steps of some micro-batches: samples that come back, twice in a step too, rows of several
    lengths, sudden changes. Tensors are [rows, POSITIONS, FEATURES], and not to be changed."""
    return [_step(number) for number in range(count)]


def _step(number: int) -> Step:
    chance = random.Random(number)
    step = []
    for _ in range(1 if number == 0 else chance.choice([1, 2, 3])):
        rows = 1 if number == 0 else chance.choice([1, 2, 3])
        keys = [chance.randrange(8) - 2 for _ in range(rows)]
        whole = number < 2 or chance.random() < 0.5
        valid = [POSITIONS if whole else chance.randrange(POSITIONS + 1) for _ in keys]
        there = visit(keys, [n * FEATURES for n in valid], number)
        step.append((there, _values(keys, chance)))
    return step


def _values(keys: Sequence[int], chance: random.Random) -> Tensor:
    """A row for each sample: its own, and some drift."""
    rows = []
    for key in keys:
        own = random.Random(key)
        drift = 10.0 if chance.random() < 0.05 else 0.1
        rows.append([own.uniform(-1, 1) + drift * chance.uniform(-1, 1) for _ in range(WIDTH)])
    return torch.tensor(rows, dtype=torch.float32).view(len(keys), POSITIONS, FEATURES)


def shown(visit: Visit, x: Tensor) -> str:
    """A micro-batch as it is shown."""
    lengths = list(visit.lengths) if visit.padded else "whole"
    keys = "none" if visit.keys is None else list(visit.keys)
    return told(x, samples=keys, lengths=lengths)
