"""``value``: each tensor as it is, through a codec. A bare codec string names this scheme."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.errors import FrameError
from thinwire.frame import Kind, Section, entry
from thinwire.native import Bound
from thinwire.schemes.base import (
    End,
    Foreseen,
    Form,
    Receiver,
    Scheme,
    Sender,
    Visit,
    expect_sections,
)


@dataclasses.dataclass(frozen=True)
class Value(Scheme):
    """No prediction, no state. Prints as its codec."""

    codec: Codec

    def __str__(self) -> str:
        return str(self.codec)

    @property
    def stochastic(self) -> bool:
        return self.codec.stochastic

    def sender(self) -> Sender:
        return _ValueSender(self.codec)

    def receiver(self) -> Receiver:
        return _ValueReceiver(self.codec)

    def stateless(self) -> Scheme:
        return self

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return self.codec.most_row_nbytes(n, dtype)


class _ValueEnd(End):
    def __init__(self, codec: Codec) -> None:
        self._codec, self._name = codec, str(codec)
        self._foreseen: dict[tuple[Any, ...], _ForeseenValue | None] = {}

    def foresee(
        self, microbatch: int, visit: Visit, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Foreseen | None:
        known = (len(visit.lengths), shape, dtype)
        if known not in self._foreseen:
            self._foreseen[known] = self._foresee(*known)
        return None if visit.padded else self._foreseen[known]

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


class _ValueSender(_ValueEnd, Sender):
    def encode(
        self, x: Tensor, microbatch: int, visit: Visit, out: Tensor | None = None
    ) -> list[Section]:
        payload = self._codec.encode(x, len(visit.lengths), visit.valid, visit.seeds, out)
        return [Section(Kind.VALUE, self._name, x.dtype, tuple(x.shape), payload)]


class _ValueReceiver(_ValueEnd, Receiver):
    def decode(self, sections: list[Section], microbatch: int, visit: Visit) -> Tensor:
        rows = len(visit.lengths)
        shape = expect_sections(sections, (Kind.VALUE,), rows, "a value")
        (section,) = sections
        if section.codec != self._name:
            raise FrameError(f"coded as {section.codec!r}, this end expects {self._codec}")
        return self._codec.decode(section.payload, shape, section.dtype, rows, visit.valid)
