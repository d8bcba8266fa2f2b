"""The receiving end of a closed loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.base import saturated
from thinwire.errors import FrameError
from thinwire.frame import Kind, Section
from thinwire.schemes.base import Receiver, Visit, expect_sections
from thinwire.schemes.closed_loop.against import Foundation, against
from thinwire.schemes.closed_loop.apart import Apart
from thinwire.schemes.closed_loop.coding import CHANGES, KINDS
from thinwire.schemes.closed_loop.end import LoopEnd
from thinwire.schemes.rows import digest_of, keys_at, keys_of, lengths_at

_BESIDE = (Kind.MAP, Kind.APART)
#: What a receiver may have planned of rows that come as these. That a first visit is a repair is
#: known only to an end that has dropped the sample, which the other may never have had.
_PLANNED = {kind: (kind,) for kind in KINDS} | {
    Kind.RESEED: CHANGES,
    Kind.SAME: CHANGES,
    Kind.REPAIR: (Kind.FIRST, Kind.REPAIR),
    Kind.FIRST: (Kind.FIRST, Kind.REPAIR),
}


class LoopReceiver(LoopEnd, Receiver):
    def decode(self, sections: list[Section], microbatch: int, visit: Visit) -> Tensor:
        keys = self.keys_of(visit)
        beside = [section for section in sections if section.kind in _BESIDE]
        sections = [section for section in sections if section.kind not in _BESIDE]
        shape = expect_sections(sections, KINDS, len(keys), "a delta-coded tensor")
        self._check(sections, self.kinds(microbatch, visit), visit)
        head = sections[0]
        result = torch.empty(shape, dtype=head.dtype, device=head.payload.device)
        result = result.view(len(keys), result.numel() // max(len(keys), 1))
        apart = self._apart(beside, shape)
        moves = []
        for section in sections:
            rows = list(range(len(keys))) if section.rows is None else section.rows
            there = keys_at(keys, rows)
            y = result if section.rows is None else result.new_empty((len(rows), result.shape[1]))
            known = self.foundation(section.kind, rows, there, microbatch, visit, shape)
            try:
                decoded = self._decode(section, there, rows, visit, known, apart, y)
            except ValueError as error:
                raise FrameError(f"a {section.kind.name} section: {error}") from None
            moves.append((section.kind, there, rows, known, decoded))
            if section.rows is not None:
                result[rows] = y
        self._take(beside, shape)
        for kind, there, rows, known, decoded in moves:
            self.settle(kind, there, decoded.references, rows, visit)
            self.learn(known, decoded.y)
        return result.view(shape)

    def _apart(self, beside: Sequence[Section], shape: tuple[int, ...]) -> Apart | None:
        """What travels apart from the rows of a tensor."""
        found = [section for section in beside if section.kind == Kind.APART]
        if len(found) > 1 or any(section.rows != [] for section in beside):
            raise FrameError("sections beside the rows that are none")
        if beside and (self.learned is None or self._dense):
            raise FrameError("sections beside the rows, of which this end has no use")
        try:
            return Apart.parsed(found[0].payload, shape) if found else None
        except ValueError as error:
            raise FrameError(str(error)) from None

    def _take(self, beside: Sequence[Section], shape: tuple[int, ...]) -> None:
        """Learn what both ends are to expect by from now on."""
        maps = [section.payload for section in beside if section.kind == Kind.MAP]
        if maps:
            assert self.learned is not None
            try:
                self.learned.take(maps, shape)
            except ValueError as error:
                raise FrameError(str(error)) from None

    def _decode(
        self,
        section: Section,
        keys: Sequence[int],
        rows: Sequence[int],
        visit: Visit,
        known: Foundation | None,
        apart: Apart | None,
        y: Tensor,
    ) -> _Decoded:
        """The values of ``section`` into ``y`` [keys, n]."""
        coder, payload, lengths = self.coder(section.kind), section.payload, lengths_at(visit, rows)
        predicted = known is not None and known.expected is not None
        if section.predicted != predicted:
            ends = ("the other end", "this one") if section.predicted else ("this end", "the other")
            raise ValueError("{} expects something of it, {} nothing".format(*ends))
        if section.kind == Kind.SAME:
            if payload.numel():
                raise ValueError(f"{payload.numel()} payload bytes where none belong")
            y.copy_(self._held(keys, lengths, y.shape[1], y.dtype))
            return _Decoded()
        if known is not None and (predicted or known.base is not None):
            return self._decode_against(section, known, apart, y)
        if section.kind in CHANGES:
            before = self.references.rows(keys)
            after = self.room(before)
            coder.decode_change(payload, lengths, before, after, self.keeping, y)
            return _Decoded(after)
        if section.kind == Kind.VALUE and self.learned is None:
            coder.decode(payload, y.shape, y.dtype, len(keys), lengths, out=y)
            return _Decoded()
        value = coder.decode(payload, y.shape, torch.float32, len(keys), lengths)
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"codec {coder}: the payload holds values that are not finite")
        changed = apart is not None and apart.put(value, rows, section.shape, lengths)
        y.copy_(saturated(value, y.dtype))
        if section.kind == Kind.VALUE or self.store is None:
            return _Decoded(None, value)
        return _Decoded(self.kept(None if changed else coder, payload, value, lengths), value)

    def _decode_against(
        self, section: Section, known: Foundation, apart: Apart | None, y: Tensor
    ) -> _Decoded:
        """What ``section`` says beyond what is ``known``."""
        payload, steps, count = section.payload, None, len(y)
        if section.predicted:
            if len(payload) < count:
                raise ValueError(f"{len(payload)} payload bytes, fewer than its {count} gains")
            steps, payload = payload[:count], payload[count:]
        there = against(known, steps)
        assert there.y is not None
        coder, lengths = self.coder(section.kind), known.part.lengths
        coder.decode_change(payload, lengths, there.before, there.after, there.keeping, y)
        if apart is not None and apart.put(there.y, known.part.rows, section.shape, lengths):
            y.copy_(saturated(there.y, y.dtype))
        if section.kind == Kind.VALUE or self.store is None:
            return _Decoded(None, there.y)
        return _Decoded(self.keeping.keep(there.y, lengths), there.y)

    def recall(self, visit: Visit, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        width = math.prod(shape[1:])
        return self._held(keys_of(visit), visit.valid, width, dtype).to(dtype).view(shape)

    def _held(
        self, keys: Sequence[int], lengths: Sequence[int] | None, width: int, dtype: torch.dtype
    ) -> Tensor:
        """The references of ``keys``, a copy [keys, width] within the range of ``dtype``."""
        return saturated(self.keeping.read(self.references.rows(keys), lengths, width), dtype)

    def _check(self, sections: list[Section], planned: list[Kind], visit: Visit) -> None:
        """Refuse sections coded against another state, before anything is touched."""
        keys = self.keys_of(visit)
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
            if self.store is None:
                if any(planned[r] != section.kind for r in rows):
                    raise FrameError(f"{section.kind.name} where a value belongs")
                continue
            if section.keys != digest_of(visit, there):
                raise FrameError("the two ends hold different sample ids for this micro-batch")
            held = self.references.versions(there)
            if section.versions != held or any(planned[r] not in fitting for r in rows):
                sent = section.versions or [-1] * len(there)
                k = next((k for k, v in enumerate(sent) if v != held[k]), 0)
                raise FrameError(
                    f"sample {there[k]}: sent as {section.kind.name} against version {sent[k]} of "
                    f"its reference, this end holds version {held[k]}"
                )


@dataclasses.dataclass
class _Decoded:
    """The references that a section leaves, if any, and its values float32 [rows, n], if known."""

    references: list[Tensor] | None = None
    y: Tensor | None = None
