"""What the rows of a section are coded against: references, what both ends expect, or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.keeping import KEEPINGS, Keeping
from thinwire.predict import Guess, Part, as_vectors
from thinwire.predict.ops import ops

_STEPS = 64  # of the gain, in one
_EXACT = KEEPINGS["fp32"]


@dataclasses.dataclass
class Foundation:
    """What both ends know of some rows before any of them is decoded.

    ``base`` float32 [rows, n]: their references, None where they are zero; ``expected``: what is
    expected beyond them, None where nothing is.
    """

    part: Part
    guess: Guess
    base: Tensor | None
    expected: Tensor | None
    change: bool


@dataclasses.dataclass
class Against:
    """Rows for ``encode_change``: ``before``, in a keeping, and room for what they become.

    ``base`` and ``y`` float32 [rows, n]: what ``before`` and ``after`` are parts of, if any.
    """

    before: Sequence[Tensor]
    after: Sequence[Tensor]
    keeping: Keeping
    base: Tensor | None = None
    y: Tensor | None = None


def against(known: Foundation, steps: Tensor | None) -> Against:
    """The rows of ``known``, with the gains ``steps`` uint8 [rows] of what is expected."""
    base, expected = known.base, known.expected
    if expected is not None:
        assert steps is not None
        base = ops(expected).stand(base, expected, steps.to(torch.float32) / _STEPS)
    assert base is not None
    y = torch.empty_like(base)
    before, after, lengths = base.unbind(0), y.unbind(0), known.part.lengths
    if lengths is not None:
        y.zero_()
        before, after = (
            tuple(row[:size] for row, size in zip(rows, lengths, strict=True))
            for rows in (before, after)
        )
    return Against(before, after, _EXACT, base, y)


def gains(x: Tensor, known: Foundation) -> Tensor | None:
    """The steps of the gain of each row of ``x`` float32 [rows, n], uint8, with which what is
    expected leaves least of it; None where nothing is."""
    expected = known.expected
    if expected is None:
        return None
    inner, energy = ops(x).weigh(x, known.base, expected).unbind(1)
    best = (_STEPS * inner / energy.clamp(min=1e-300)).nan_to_num(0.0)
    return best.round().clamp(0, 255).to(torch.uint8)


def joined(steps: Tensor, payload: Tensor, out: Tensor | None) -> Tensor:
    """Gains and what they leave, end to end, in ``out`` where that has the rest already."""
    rows = len(steps)
    if out is None or payload.data_ptr() != out[rows:].data_ptr():
        return torch.cat([steps, payload])
    out[:rows] = steps
    return out[: rows + len(payload)]


def energy(x: Tensor, part: Part) -> float:
    """What a codec has to code of ``x`` [rows, n] float32: its sum of squares beside the mean of
    each position, which takes no bits worth counting."""
    vectors = as_vectors(x, part.shape)
    return float((vectors - vectors.mean(1, keepdim=True)).square().sum())
