"""Small messages between the ranks of a pipeline: a step's header, its result, and giving up."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from thinwire import frame
from thinwire.counters import LinkCounters
from thinwire.errors import FrameError, LinkError
from thinwire.frame import Direction, Kind, Place, Section
from thinwire.network import Handle, Transport, TransportError
from thinwire.store.references import PARTS

_INIT, _HEADER, _RESULT = range(3)
_SMALL = 16384
_DIGITS = 24  # of a digest, with what parts it from the next


class Control:
    """Messages among all ranks of a pipeline, framed, counted and bounded like all others.

    ``addresses``: the ranks' transport addresses, in order; this one is ``addresses[rank]``.
    ``names``: how an error names each rank.
    Its channels are the first of the transport's; links have those after them.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        addresses: Sequence[int],
        names: Sequence[str] | None = None,
    ) -> None:
        self.transport, self.rank, self.addresses = transport, rank, list(addresses)
        self._names = list(names or [f"rank {r}" for r in range(len(self.addresses))])
        self.deadline = 60.0
        self.counters = LinkCounters(-1, "control", "raw")
        self.run = 0
        self._sequence = dict.fromkeys((_INIT, _HEADER, _RESULT), 0)
        self._max = {_INIT: 1 << 20, _HEADER: _SMALL, _RESULT: _SMALL}
        self._posted: dict[tuple[int, int], Handle] = {}

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [r for r in range(len(self.addresses)) if r != self.rank]

    def allow_rows(self, rows: int, tensors: int) -> None:
        """Make room for what is told of a step's rows: ids, lengths and versions as digits; and of
        the ``tensors`` that cross links: versions of rows, and digests in parts."""
        self._max[_HEADER] = _SMALL + 96 * rows
        self._max[_RESULT] = _SMALL + 96 * rows + tensors * (_DIGITS * PARTS + 48 * rows)

    # What the ranks tell each other.

    def gather_setup(self, value: Any) -> list[Any]:
        """All ranks' JSON values, in rank order."""
        return self._gather(_INIT, value)

    def gather_result(self, value: Any) -> list[Any]:
        """All ranks' JSON values at the end of a step, in rank order."""
        values = self._gather(_RESULT, value)
        for other in self.others:
            # after its last step a rank may be gone at once; who needs it again is told then
            with contextlib.suppress(LinkError):
                self._post(_RESULT, other)
        return values

    def broadcast_header(self, value: Any | None, root: int) -> Any:
        """``root``'s JSON value on every rank."""
        if self.rank == root:
            for other in self.others:
                self._send(_HEADER, other, value)
        else:
            value = self._receive(_HEADER, root)
        self._sequence[_HEADER] += 1
        if self.rank != root:
            self._post(_HEADER, root)
        return value

    def exchange_tensor(
        self, x: torch.Tensor, owners: Sequence[int], slot: int
    ) -> list[torch.Tensor]:
        """Every owner's tensor of one shape and dtype, in owner order; this rank is an owner."""
        step = self._sequence[_RESULT]
        place = self._place(3 + slot, step)
        size = frame.MIN_BYTES + frame.MAX_ENTRY_BYTES + x.nbytes + _SMALL
        handles = {r: self._receive_from(r, 3 + slot, size) for r in owners if r != self.rank}
        payload = x.detach().contiguous().view(-1).view(torch.uint8).cpu()
        section = Section(Kind.VALUE, "raw", x.dtype, tuple(x.shape), payload)
        for r in handles:
            self._transmit(place, section, r, 3 + slot, x.numel())
        found = []
        for r in owners:
            if r == self.rank:
                found.append(x)
                continue
            (got,) = self._parse(handles[r], place, r)
            if got.shape != tuple(x.shape) or got.dtype != x.dtype:
                raise LinkError(
                    f"rank {r} sent a tied gradient of shape {got.shape}, not {x.shape}"
                )
            found.append(got.payload.view(x.dtype).view(x.shape).to(x.device))
        return found

    def abort(self, kind: str, why: str) -> None:
        """Tell all ranks, wherever they wait for this one, that it gives up."""
        section = frame.abort_section(kind, why)
        for sub in (_INIT, _HEADER, _RESULT):
            place = self._place(sub, self._sequence[sub])
            parts = frame.build(place, [section])
            for other in self.others:
                with contextlib.suppress(TransportError):  # that one is gone: the others are not
                    self.transport.send(self.addresses[other], sub, parts)

    # How.

    def _gather(self, sub: int, value: Any) -> list[Any]:
        for other in self.others:
            self._post(sub, other)
        for other in self.others:
            self._send(sub, other, value)
        values = [
            value if r == self.rank else self._receive(sub, r) for r in range(len(self.addresses))
        ]
        self._sequence[sub] += 1
        return values

    def _place(self, sub: int, sequence: int) -> Place:
        return Place(self.run if sub != _INIT else 0, sequence, sub, 0xFFFF, Direction.CONTROL)

    def _post(self, sub: int, source: int) -> None:
        if (sub, source) not in self._posted:
            self._posted[sub, source] = self._receive_from(source, sub, self._max[sub])

    def _send(self, sub: int, target: int, value: Any) -> None:
        section = frame.text_section(Kind.CONTROL, json.dumps(value, separators=(",", ":")))
        place = self._place(sub, self._sequence[sub])
        size = frame.nbytes([section])
        if size > self._max[sub]:
            raise LinkError(f"a control message of {size} bytes; at most {self._max[sub]} are read")
        self._transmit(place, section, target, sub, 0)

    def _transmit(self, place: Place, section: Section, target: int, sub: int, values: int) -> None:
        self.counters.count([section], frame.nbytes([section]), [values], True)
        parts = frame.build(place, [section])
        try:
            self.transport.send(self.addresses[target], sub, parts)
        except TransportError as error:
            raise self._error("to", target, error) from error

    def _receive_from(self, source: int, sub: int, max_bytes: int) -> Handle:
        try:
            return self.transport.post_receive(self.addresses[source], sub, max_bytes)
        except TransportError as error:
            raise self._error("from", source, error) from error

    def _error(self, way: str, other: int, why: Exception) -> LinkError:
        here, there = f"rank {self.rank}", self._names[other]
        return LinkError(f"{here}: no control message {way} {there}: {why}")

    def _receive(self, sub: int, source: int) -> Any:
        self._post(sub, source)
        place = self._place(sub, self._sequence[sub])
        (section,) = self._parse(self._posted.pop((sub, source)), place, source)
        try:
            return json.loads(bytes(section.payload.numpy()))
        except ValueError as error:
            raise LinkError(f"rank {source} sent a control message that is no JSON") from error

    def _parse(self, handle: Handle, place: Place, source: int) -> list[Section]:
        try:
            data = self.transport.wait(handle, self.deadline)
            found, sections = frame.parse(data)
            frame.raise_abort(sections)
            if found != place or len(sections) != 1:
                raise FrameError(f"a frame for {found} arrived where {place} was expected")
        except (TransportError, FrameError) as error:
            raise self._error("from", source, error) from error
        return sections
