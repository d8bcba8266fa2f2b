"""``value``: each tensor as it is, through a codec. A bare codec string names this scheme."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs.topk import TopK
from thinwire.errors import FrameError
from thinwire.frame import Kind, Section, entry
from thinwire.native import Bound
from thinwire.schemes.base import (
    RAW,
    End,
    Foreseen,
    Form,
    Receiver,
    Scheme,
    Sender,
    Visit,
    expect_sections,
)
from thinwire.schemes.rows import as_rows


@dataclasses.dataclass(frozen=True)
class Value(Scheme):
    """No prediction, no state. Prints as its codec."""

    codec: Codec

    def __str__(self) -> str:
        return str(self.codec)

    @property
    def stochastic(self) -> bool:
        return self.codec.stochastic

    @property
    def sparse(self) -> bool:
        return self.codec.sparse

    @property
    def tells(self) -> bool:
        return True

    @property
    def support(self) -> TopK | None:
        return self.codec if isinstance(self.codec, TopK) else None

    def sender(self) -> Sender:
        return ValueSender(self.codec)

    def receiver(self) -> Receiver:
        return ValueReceiver(self.codec)

    def stateless(self) -> Scheme:
        return self

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return self.codec.most_row_nbytes(n, dtype)


class _ValueEnd(End):
    def __init__(self, codec: Codec) -> None:
        self._codec, self._name = codec, str(codec)
        self._foreseen: dict[tuple[Any, ...], _ForeseenValue | None] = {}
        #: Whether values travel as they are in this step.
        self.dense = False
        self.measuring = False
        self._transmitted: dict[int, Tensor] = {}

    def begin_step(self, visits: Sequence[Visit], dense: bool = False) -> None:
        self.dense = dense
        self._transmitted.clear()

    def transmitted(self, microbatch: int, width: int) -> Tensor | None:
        return self._transmitted.get(microbatch)

    def _keep(self, microbatch: int, y: Tensor) -> None:
        if self.keeps:
            self._transmitted[microbatch] = as_rows(y).to(torch.float32)

    def foresee(
        self, microbatch: int, visit: Visit, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Foreseen | None:
        if visit.padded or self.dense or self.measuring or self.keeps:
            return None
        known = (len(visit.lengths), shape, dtype)
        if known not in self._foreseen:
            self._foreseen[known] = self._foresee(*known)
        return self._foreseen[known]

    def _foresee(
        self, rows: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> _ForeseenValue | None:
        kernels = self._codec.bound(dtype, rows, math.prod(shape) // max(rows, 1))
        if kernels is None:
            return None
        form = Form(Kind.VALUE, shape, dtype, self._codec.max_nbytes(shape, dtype, rows))
        section = Section(Kind.VALUE, self._name, dtype, shape)
        return _ForeseenValue(form, entry(section, form.nbytes), kernels)


class _ForeseenValue(Foreseen):
    """The same for all micro-batches."""

    def __init__(self, form: Form, entry: bytes, kernels: Bound) -> None:
        super().__init__(form, entry)
        self._kernels = kernels

    def encode(self, x: int, payload: Any) -> bool:
        return self._kernels.encode(x, payload)

    def decode(self, payload: Any, y: int) -> bool:
        return self._kernels.decode(payload, y)


class ValueSender(_ValueEnd, Sender):
    """Stateless."""

    def encode(
        self, x: Tensor, microbatch: int, visit: Visit, out: Tensor | None = None
    ) -> list[Section]:
        if self.dense:
            self._keep(microbatch, x)
            return [self.as_it_is(x, microbatch, visit, out)]
        payload = self._codec.encode(x, len(visit.lengths), visit.valid, visit.seeds, out)
        section = Section(Kind.VALUE, self._name, x.dtype, tuple(x.shape), payload)
        self.note_support(self._codec, section, microbatch, visit)
        if self.measuring or self.keeps:
            y = self._codec.decode(payload, x.shape, x.dtype, len(visit.lengths), visit.valid)
            self.sent = y if self.measuring else None
            self._keep(microbatch, y)
        return [section]


class ValueReceiver(_ValueEnd, Receiver):
    """Stateless."""

    def decode(self, sections: list[Section], microbatch: int, visit: Visit) -> Tensor:
        rows = len(visit.lengths)
        kind = Kind.DENSE if self.dense else Kind.VALUE
        shape = expect_sections(sections, (kind,), rows, "a value")
        (section,) = sections
        coder, name = (RAW, str(RAW)) if self.dense else (self._codec, self._name)
        if section.codec != name:
            raise FrameError(f"coded as {section.codec!r}, this end expects {coder}")
        y = coder.decode(section.payload, shape, section.dtype, rows, visit.valid)
        self.note_support(coder, section, microbatch, visit)
        self._keep(microbatch, y)
        return y
