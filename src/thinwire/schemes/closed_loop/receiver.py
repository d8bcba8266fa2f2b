"""The receiving end of a closed loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.base import saturated
from thinwire.errors import FrameError
from thinwire.frame import Kind, Section
from thinwire.schemes.base import Receiver, Visit, expect_sections
from thinwire.schemes.closed_loop.coding import CHANGES, KINDS
from thinwire.schemes.closed_loop.end import LoopEnd
from thinwire.schemes.rows import digest_of, keys_at, keys_of, lengths_at
from thinwire.store import ReferenceStore

#: What a receiver may have planned of rows that come as these. That a first visit is a repair is
#: known only to an end that has dropped the sample, which the other may never have had.
_PLANNED = {kind: (kind,) for kind in KINDS} | {
    Kind.RESEED: CHANGES,
    Kind.SAME: CHANGES,
    Kind.REPAIR: (Kind.FIRST, Kind.REPAIR),
    Kind.FIRST: (Kind.FIRST, Kind.REPAIR),
}


class LoopReceiver(LoopEnd, Receiver):
    store: ReferenceStore

    def decode(self, sections: list[Section], microbatch: int, visit: Visit) -> Tensor:
        keys = keys_of(visit)
        shape = expect_sections(sections, KINDS, len(keys), "a delta-coded tensor")
        self._check(sections, self.kinds(microbatch, visit), visit)
        head = sections[0]
        result = torch.empty(shape, dtype=head.dtype, device=head.payload.device)
        result = result.view(len(keys), result.numel() // max(len(keys), 1))
        moves = []
        for section in sections:
            rows = list(range(len(keys))) if section.rows is None else section.rows
            there = keys_at(keys, rows)
            y = result if section.rows is None else result.new_empty((len(rows), result.shape[1]))
            try:
                moves.append((section.kind, there, rows, self._decode(section, there, visit, y)))
            except ValueError as error:
                raise FrameError(f"a {section.kind.name} section: {error}") from None
            if section.rows is not None:
                result[rows] = y
        for kind, there, rows, references in moves:
            self.settle(kind, there, references, rows, visit)
        return result.view(shape)

    def _decode(
        self, section: Section, keys: Sequence[int], visit: Visit, y: Tensor
    ) -> list[Tensor] | None:
        """The values of ``section`` into ``y`` [keys, n]; returns the references they leave."""
        coder, count = self.coder(section.kind), len(keys)
        lengths = lengths_at(visit, range(count) if section.rows is None else section.rows)
        if section.kind in CHANGES:
            before = self.store.rows(keys)
            after = self.room(before)
            coder.decode_change(section.payload, lengths, before, after, self.keeping, y)
            return after
        if section.kind == Kind.SAME:
            if section.payload.numel():
                raise ValueError(f"{section.payload.numel()} payload bytes where none belong")
            y.copy_(self._held(keys, lengths, y.shape[1], y.dtype))
            return None
        if section.kind == Kind.VALUE:
            coder.decode(section.payload, y.shape, y.dtype, count, lengths, out=y)
            return None
        value = coder.decode(section.payload, y.shape, torch.float32, count, lengths)
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"codec {coder}: the payload holds values that are not finite")
        y.copy_(saturated(value, y.dtype))
        return self.kept(coder, section.payload, value, lengths)

    def recall(self, visit: Visit, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        width = math.prod(shape[1:])
        return self._held(keys_of(visit), visit.valid, width, dtype).to(dtype).view(shape)

    def _held(
        self, keys: Sequence[int], lengths: Sequence[int] | None, width: int, dtype: torch.dtype
    ) -> Tensor:
        """The references of ``keys``, a copy [keys, width] within the range of ``dtype``."""
        return saturated(self.keeping.read(self.store.rows(keys), lengths, width), dtype)

    def _check(self, sections: list[Section], planned: list[Kind], visit: Visit) -> None:
        """Refuse sections coded against another state, before anything is touched."""
        keys = keys_of(visit)
        for section in sections:
            rows = range(len(keys)) if section.rows is None else section.rows
            there = keys_at(keys, rows)
            fitting = _PLANNED[section.kind]
            if section.codec != self.name(section.kind):
                raise FrameError(
                    f"{section.kind.name} coded as {section.codec!r}; "
                    f"this end has {self.coding.name}"
                )
            if section.kind == Kind.VALUE:
                continue
            if section.keys != digest_of(visit, there):
                raise FrameError("the two ends hold different sample ids for this micro-batch")
            held = self.store.versions(there)
            if section.versions != held or any(planned[r] not in fitting for r in rows):
                sent = section.versions or [-1] * len(there)
                k = next((k for k, v in enumerate(sent) if v != held[k]), 0)
                raise FrameError(
                    f"sample {there[k]}: sent as {section.kind.name} against version {sent[k]} of "
                    f"its reference, this end holds version {held[k]}"
                )
