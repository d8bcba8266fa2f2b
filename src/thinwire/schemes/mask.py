"""``topk:0.1,mask=shared``: gradients of what the forward link has transmitted, and no positions.

Rudakov et al. 2024 ("index reuse"). Going forward ``topk`` sets all but some values of a row to
zero; of the others the gradient is zero, whatever is computed. So going back only the gradients at
those positions travel, which both ends of the edge know: it is the gradient of the masked network.
What was transmitted counts, also where it was a zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.base import within
from thinwire.codecs.topk import TopK
from thinwire.errors import FrameError
from thinwire.frame import Kind, Section
from thinwire.schemes.base import (
    RAW,
    End,
    Receiver,
    Scheme,
    Sender,
    Visit,
    check_finite,
    expect_sections,
)
from thinwire.schemes.rows import as_rows
from thinwire.schemes.value import Value


@dataclasses.dataclass(frozen=True)
class SharedMask(Scheme):
    """Prints as its codec."""

    codec: TopK

    def __str__(self) -> str:
        return str(self.codec)

    @property
    def own(self) -> TopK:
        """The same with positions of its own."""
        return TopK(self.codec.share)

    @property
    def stochastic(self) -> bool:
        return self.codec.stochastic

    def sender(self) -> Sender:
        return _MaskSender(self.own, str(self))

    def receiver(self) -> Receiver:
        return _MaskReceiver(self.own, str(self))

    def stateless(self) -> Scheme:
        return Value(self.own)

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return self.codec.values.most_row_nbytes(self.codec.kept(n), dtype)


class MaskEnd(End):
    """``masks``, by micro-batch, are what the forward link's end here has transmitted."""

    def __init__(self, codec: TopK, name: str) -> None:
        self._codec, self._name = codec, name
        self.masks: dict[int, Tensor] = {}
        self._dense = False

    def begin_step(self, visits: Sequence[Visit], dense: bool = False) -> None:
        self._dense = dense
        self.masks.clear()

    def _mask(self, microbatch: int, visit: Visit, width: int) -> tuple[Tensor, list[int]]:
        """What travels of a micro-batch, bool [rows, width], and how many values of each row."""
        mask = self.masks.pop(microbatch, None)
        if mask is None or mask.shape != (len(visit.lengths), width):
            raise FrameError(f"the forward link has transmitted no such values as {self._name}")
        return mask, [self._codec.kept(n) for n in visit.lengths]


def _spread(part: Tensor, mask: Tensor, kept: Sequence[int], y: Tensor) -> None:
    """Put the values ``part`` [rows, most kept] where ``mask`` says into ``y`` [rows, n]."""
    y[mask.to(y.device)] = part[within(kept, part.shape[1], y.device)]


class _MaskSender(MaskEnd, Sender):
    def encode(
        self, x: Tensor, microbatch: int, visit: Visit, out: Tensor | None = None
    ) -> list[Section]:
        if self._dense:
            return [self.as_it_is(x, microbatch, visit, out)]
        coder, values = self._codec.values, as_rows(x)
        mask, kept = self._mask(microbatch, visit, values.shape[1])
        check_finite(x, self._name, visit.valid)
        part, lengths = _gathered(values, mask.to(values.device), kept)
        payload = coder.encode(part, len(part), lengths, visit.seeds, out)
        if self.measuring:
            found = coder.decode(payload, part.shape, x.dtype, len(part), lengths)
            self.sent = torch.zeros_like(values)
            _spread(found, mask, kept, self.sent)
        return [Section(Kind.VALUE, self._name, x.dtype, tuple(x.shape), payload)]


class _MaskReceiver(MaskEnd, Receiver):
    def decode(self, sections: list[Section], microbatch: int, visit: Visit) -> Tensor:
        rows = len(visit.lengths)
        kind = Kind.DENSE if self._dense else Kind.VALUE
        shape = expect_sections(sections, (kind,), rows, "a masked value")
        (section,) = sections
        coder, name = self._codec.values, self._name
        if self._dense:
            coder, name = RAW, str(RAW)
        if section.codec != name:
            raise FrameError(f"coded as {section.codec!r}, this end expects {name}")
        if self._dense:
            return coder.decode(section.payload, shape, section.dtype, rows, visit.valid)
        y = torch.zeros(shape, dtype=section.dtype, device=section.payload.device).view(rows, -1)
        mask, kept = self._mask(microbatch, visit, y.shape[1])
        most = max(kept, default=0)
        lengths = None if min(kept, default=0) == most else kept
        part = coder.decode(section.payload, (rows, most), section.dtype, rows, lengths)
        _spread(part, mask, kept, y)
        return y.view(shape)


def _gathered(x: Tensor, mask: Tensor, kept: Sequence[int]) -> tuple[Tensor, list[int] | None]:
    """The values of ``x`` [rows, n] that travel [rows, most kept], and lengths if they differ."""
    most = max(kept, default=0)
    part = x.new_zeros((len(kept), most))
    part[within(kept, most, x.device)] = x[mask]
    return part, None if min(kept, default=0) == most else list(kept)
