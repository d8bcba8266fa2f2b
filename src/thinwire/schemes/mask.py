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

from thinwire.codecs import Codec
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

    @property
    def _coding(self) -> tuple[Codec, str]:
        """What codes the values that travel, and how sections call it."""
        return (RAW, str(RAW)) if self._dense else (self._codec.values, self._name)

    def _mask(self, microbatch: int, visit: Visit, width: int) -> tuple[Tensor, list[int]]:
        """What travels of a micro-batch, bool [rows, width], and how many values of each row."""
        mask = self.masks.pop(microbatch, None)
        if mask is None or mask.shape != (len(visit.lengths), width):
            raise FrameError(f"the forward link has transmitted no such values as {self._name}")
        kept = [n if self._dense else self._codec.kept(n) for n in visit.lengths]
        return mask, kept


def _spread(part: Tensor, mask: Tensor, kept: Sequence[int], y: Tensor) -> None:
    """Put the values ``part`` [rows, most kept] where ``mask`` says into ``y`` [rows, n]."""
    y[mask.to(y.device)] = part[_present(kept, part.shape[1]).to(y.device)]


class _MaskSender(MaskEnd, Sender):
    def encode(
        self, x: Tensor, microbatch: int, visit: Visit, out: Tensor | None = None
    ) -> list[Section]:
        coder, name = self._coding
        values = x.detach().reshape(len(visit.lengths), -1)
        if self._dense:
            check_finite(x, RAW, visit.valid)
            payload = coder.encode(values, len(values), visit.valid, out=out)
            self.sent = x if self.measuring else None
        else:
            mask, kept = self._mask(microbatch, visit, values.shape[1])
            check_finite(x, self._name, visit.valid)
            part, lengths = _gathered(values, mask.to(values.device), kept)
            payload = coder.encode(part, len(part), lengths, visit.seeds, out)
            if self.measuring:
                found = coder.decode(payload, part.shape, x.dtype, len(part), lengths)
                self.sent = torch.zeros_like(values)
                _spread(found, mask, kept, self.sent)
        return [Section(Kind.VALUE, name, x.dtype, tuple(x.shape), payload)]


class _MaskReceiver(MaskEnd, Receiver):
    def decode(self, sections: list[Section], microbatch: int, visit: Visit) -> Tensor:
        rows = len(visit.lengths)
        shape = expect_sections(sections, (Kind.VALUE,), rows, "a masked value")
        (section,) = sections
        coder, name = self._coding
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
    part[_present(kept, most).to(x.device)] = x[mask]
    return part, None if min(kept, default=0) == most else list(kept)


def _present(kept: Sequence[int], most: int) -> Tensor:
    """Bool [rows, most]: the first so many of each row."""
    return torch.arange(most) < torch.tensor(kept, dtype=torch.int64)[:, None]
