"""``predicted(codec, by=target+token)``: what differs from what both ends expect.

Both ends hold tables of what values were like where the same was known of a position: its token,
the one before it, what is to be predicted there. With e what they say of a row x, and of the gain g
the nearest of 256 steps to what leaves least of x, a byte that travels beside the row,

1. p <- g e, or 0 where nothing is known yet;
2. y <- p + decode(codec.encode(x - p));
3. the receiver computes on y; both ends learn from y, once the step counts.

With g = 0 that is the value. Gradients change in size faster than tables do, not in direction: the
gain makes up for it. It needs no samples to come again: the first epoch is predicted too, and so
are gradients, times the number of positions of the batch, by which a mean loss divides them. In
evaluation values travel through the codec.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs.base import saturated, within
from thinwire.errors import FrameError
from thinwire.frame import Kind, Section
from thinwire.predict import Expectation, Source, sources
from thinwire.schemes.base import (
    RAW,
    End,
    Receiver,
    Scheme,
    Sender,
    Visit,
    check_finite,
    expect_sections,
    needs_alone,
)
from thinwire.schemes.rows import as_rows
from thinwire.schemes.value import Value
from thinwire.spec import register

_KINDS = (Kind.VALUE, Kind.PREDICTED)
_STEPS = 64  # of the gain, in one


@register("scheme", "predicted")
@dataclasses.dataclass(frozen=True)
class Predicted(Scheme):
    """``by``: the sources of what is expected, the most telling first."""

    codec: Codec
    by: str = "target+token"

    def __post_init__(self) -> None:
        needs_alone("predicted", self.codec)
        sources(self.by)

    @functools.cached_property
    def sources(self) -> tuple[Source, ...]:
        return sources(self.by)

    @property
    def takes(self) -> frozenset[str]:
        return frozenset(name for source in self.sources for name in source.takes)

    @property
    def stochastic(self) -> bool:
        return self.codec.stochastic

    def sender(self) -> Sender:
        return _PredictedSender(self)

    def receiver(self) -> Receiver:
        return _PredictedReceiver(self)

    def stateless(self) -> Scheme:
        return Value(self.codec)

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return 1 + self.codec.most_row_nbytes(n, torch.float32)


class PredictedEnd(End):
    def __init__(self, scheme: Predicted) -> None:
        self._codec, self._name = scheme.codec, str(scheme.codec)
        self.expectation = Expectation(scheme.sources)
        self._dense = False

    def begin_step(self, visits: Sequence[Visit], dense: bool = False) -> None:
        self.expectation.begin()
        self._dense = dense

    def end_step(self) -> None:
        self.expectation.settle()

    def digest(self) -> int:
        return self.expectation.digest()

    def state_dict(self) -> dict[str, Any]:
        return self.expectation.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.expectation.load_state_dict(state)

    def _expected(self, visit: Visit, shape: Sequence[int]) -> Tensor | None:
        return None if self._dense else self.expectation.of(visit.context, shape, visit.scale)

    def _note(self, microbatch: int, visit: Visit, y: Tensor, shape: Sequence[int]) -> None:
        self.expectation.note(microbatch, visit.context, y, shape, visit.scale, visit.valid)

    def _sum(
        self, payload: Tensor, predicted: Tensor | None, shape: Sequence[int], visit: Visit
    ) -> Tensor:
        """What a payload stands for beside what was predicted, float32 [rows, n]."""
        y = self._codec.decode(payload, shape, torch.float32, shape[0], visit.valid)
        return y if predicted is None else predicted + y


def _valid(x: Tensor, visit: Visit) -> Tensor:
    """``x`` [rows, n], zero beyond each row's length."""
    if visit.valid is None:
        return x
    return x.masked_fill(~within(visit.valid, x.shape[1], x.device), 0.0)


class _PredictedSender(PredictedEnd, Sender):
    def encode(
        self, x: Tensor, microbatch: int, visit: Visit, out: Tensor | None = None
    ) -> list[Section]:
        rows, shape = len(visit.lengths), tuple(x.shape)
        values = as_rows(x).to(torch.float32)
        if self._dense:
            section = self.as_it_is(x, microbatch, visit, out)
            self._note(microbatch, visit, values, shape)
            return [section]
        check_finite(values, self._codec, visit.valid)
        expected = self._expected(visit, shape)
        if expected is None:
            kind, payload, predicted = Kind.VALUE, self._encode(values, visit, out), None
        else:
            kind, predicted = Kind.PREDICTED, _valid(expected, visit)
            steps = _gains(_valid(values, visit), predicted)
            predicted = predicted * _gain(steps)
            room = None if out is None else out[rows:]
            payload = _joined(steps, self._encode(values - predicted, visit, room), out)
        y = self._sum(payload[rows * (kind == Kind.PREDICTED) :], predicted, values.shape, visit)
        self._note(microbatch, visit, y, shape)
        self.sent = saturated(y, x.dtype).view(shape) if self.measuring else None
        return [Section(kind, self._name, x.dtype, shape, payload)]

    def _encode(self, values: Tensor, visit: Visit, out: Tensor | None) -> Tensor:
        return self._codec.encode(values, len(values), visit.valid, visit.seeds, out)


def _gains(x: Tensor, expected: Tensor) -> Tensor:
    """The steps of the gain of each row, uint8, with which ``expected`` leaves least of it."""
    inner, energy = (x * expected).sum(1), expected.square().sum(1)
    best = (_STEPS * inner / energy.clamp(min=1e-38)).nan_to_num(0.0)
    return best.round().clamp(0, 255).to(torch.uint8)


def _gain(steps: Tensor) -> Tensor:
    """A factor for each row [rows, 1]."""
    return steps.to(torch.float32)[:, None] / _STEPS


def _joined(steps: Tensor, payload: Tensor, out: Tensor | None) -> Tensor:
    """Gains and what they leave, end to end, in ``out`` where that has the rest already."""
    rows = len(steps)
    if out is None or payload.data_ptr() != out[rows:].data_ptr():
        return torch.cat([steps, payload])
    out[:rows] = steps
    return out[: rows + len(payload)]


class _PredictedReceiver(PredictedEnd, Receiver):
    def decode(self, sections: list[Section], microbatch: int, visit: Visit) -> Tensor:
        rows = len(visit.lengths)
        kinds = (Kind.DENSE,) if self._dense else _KINDS
        shape = expect_sections(sections, kinds, rows, "a predicted tensor")
        (section,) = sections
        name = str(RAW) if self._dense else self._name
        if section.codec != name:
            raise FrameError(f"coded as {section.codec!r}, this end expects {name}")
        size = (rows, math.prod(shape[1:]))
        if self._dense:
            y = RAW.decode(section.payload, shape, section.dtype, rows, visit.valid)
            self._note(microbatch, visit, y.reshape(size).to(torch.float32), shape)
            return y
        payload, predicted = section.payload, None
        if section.kind == Kind.PREDICTED:
            expected = self._expected(visit, shape)
            if expected is None:
                raise FrameError("the other end expects something of it, this one nothing")
            if len(payload) < rows:
                raise ValueError(f"{len(payload)} payload bytes, fewer than its {rows} gains")
            predicted = _valid(expected, visit) * _gain(payload[:rows])
            payload = payload[rows:]
        value = self._sum(payload, predicted, size, visit)
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"codec {self._codec}: the payload holds values that are not finite")
        self._note(microbatch, visit, value, shape)
        return saturated(value, section.dtype).view(shape)
