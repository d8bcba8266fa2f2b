"""``value``: each tensor as it is, through a codec. A bare codec string names this scheme."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.errors import FrameError
from thinwire.frame import Kind, Section
from thinwire.schemes.base import Receiver, Scheme, Sender, Visit, expect_sections


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
        return self.codec.row_nbytes(n, dtype)


class _ValueSender(Sender):
    def __init__(self, codec: Codec) -> None:
        self._codec = codec

        self._name = str(codec)

    def encode(
        self, x: Tensor, microbatch: int, visit: Visit, out: Tensor | None = None
    ) -> list[Section]:
        payload = self._codec.encode(x, len(visit.lengths), visit.valid, visit.seeds, out)
        return [Section(Kind.VALUE, self._name, x.dtype, tuple(x.shape), payload)]


class _ValueReceiver(Receiver):
    def __init__(self, codec: Codec) -> None:
        self._codec, self._name = codec, str(codec)

    def decode(self, sections: list[Section], microbatch: int, visit: Visit) -> Tensor:
        rows = len(visit.lengths)
        shape = expect_sections(sections, (Kind.VALUE,), rows, "a value")
        (section,) = sections
        if section.codec != self._name:
            raise FrameError(f"coded as {section.codec!r}, this end expects {self._codec}")
        return self._codec.decode(section.payload, shape, section.dtype, rows, visit.valid)
