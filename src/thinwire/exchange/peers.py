"""The ranks of a group, as one of them exchanges frames with all others.

What they do, they do in the same order: a message's place says which step, bucket and round it is
of, and any other is refused. Receives are posted before anything is sent, so that transfers run
while this rank computes. All from the thread that calls.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from thinwire import frame
from thinwire.counters import LinkCounters
from thinwire.errors import FrameError, LinkError, PeerAborted
from thinwire.frame import Direction, Kind, Place, Section
from thinwire.network import Transport
from thinwire.network.transport import Handle, TransportError

_SETUP = 0
_MOST_SETUP = 1 << 24
#: A bucket's rounds have a channel each, after that of what is agreed on.
ROUNDS = 4
_DRAIN_SECONDS = 1.0
#: A small message still has room for the reason why a rank gives up.
_LEAST = 4096


class Peers:
    """This rank among the ``addresses`` of ``transport`` (default: all of them), in their order.

    ``deadline``: seconds that a message may take. ``what``: whose messages these are, for errors
    and counters.
    """

    def __init__(
        self,
        transport: Transport,
        addresses: Sequence[int] | None = None,
        deadline: float = 300.0,
        what: str = "gradients",
    ) -> None:
        self.transport, self.deadline, self._what = transport, deadline, what
        self.addresses = list(range(transport.size) if addresses is None else addresses)
        self.rank = self.addresses.index(transport.address)
        self.size = len(self.addresses)
        self.counters = LinkCounters(-1, "exchange", what)
        self.run = 0
        self.step = 0
        self._agreed = 0
        # all ranks take that of the first
        self.run = int(self.gather(random.SystemRandom().getrandbits(63))[0])

    @property
    def others(self) -> list[int]:
        """All ranks but this one, the next one first: not all send to the same at once."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def gather(self, value: Any) -> list[Any]:
        """All ranks' JSON values, in rank order (collective)."""
        text = json.dumps(value, separators=(",", ":"))
        section = frame.text_section(Kind.CONTROL, text)
        if section.payload.numel() > _MOST_SETUP:
            raise LinkError(f"{self._what}: {len(text)} characters are too much to agree on")
        one = Round(self, _SETUP, self._agreed, [_MOST_SETUP] * self.size)
        self._agreed += 1
        for other in self.others:
            one.send(other, [section], 0)
        values = [value] * self.size
        for other in self.others:
            (found,) = one.receive(other)
            try:
                values[other] = json.loads(bytes(found.payload.numpy()))
            except ValueError as error:
                raise LinkError(f"{self._what}: rank {other} sent what is no JSON") from error
        one.close()
        return values

    def begin_step(self) -> None:
        """All ranks are at the next step."""
        try:  # what the step before has sent is taken by now, or nearly
            self.transport.flush(self.deadline)
        except TransportError as error:
            raise LinkError(f"rank {self.rank}: {self._what} of the last step: {error}") from error
        self.step += 1

    def round(self, number: int, bucket: int, most: Sequence[int]) -> Round:
        """Round ``number``, from 1 to ``ROUNDS``, of a bucket: each rank sends one message to every
        other, with up to ``most[r]`` payload bytes from rank r."""
        assert 1 <= number <= ROUNDS, number
        return Round(self, number, bucket, most)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Tell the others why this rank leaves what is inside by an exception."""
        try:
            yield
        except BaseException as error:
            kind = error.kind if isinstance(error, PeerAborted) else type(error).__name__
            self.abort(kind, f"rank {self.rank}: {error}")
            raise

    def abort(self, kind: str, why: str) -> None:
        """Tell all ranks, wherever they wait for this one, that it gives up: the name of its error,
        and the text."""
        section = frame.abort_section(kind, why)
        parts = frame.build(Place(self.run, self.step, 0, 0, Direction.EXCHANGE), [section])
        for channel in range(1 + ROUNDS):
            for other in self.others:
                with contextlib.suppress(TransportError):  # that one is gone: the others are not
                    self.transport.send(self.addresses[other], channel, parts)
        self.transport.drain(_DRAIN_SECONDS)

    def close(self) -> None:
        """Release the transport."""
        self.transport.close()


class Round:
    """One message from each rank to every other; the receives are posted here."""

    def __init__(self, peers: Peers, number: int, bucket: int, most: Sequence[int]) -> None:
        self.peers, self._number = peers, number
        self._place = Place(peers.run, peers.step, bucket, number, Direction.EXCHANGE)
        self._handles: dict[int, Handle] = {}
        for other in peers.others:
            room = frame.MIN_BYTES + 2 * frame.MAX_ENTRY_BYTES + most[other] + _LEAST
            try:
                self._handles[other] = peers.transport.post_receive(
                    peers.addresses[other], number, room
                )
            except TransportError as error:
                raise self._error("from", other, error) from error

    def send(self, target: int, sections: Sequence[Section], values: int) -> None:
        """Send ``sections``, the first of which holds ``values`` values, to rank ``target``."""
        peers = self.peers
        found = list(sections)
        sizes = [values] + [0] * (len(found) - 1)
        peers.counters.count(found, frame.nbytes(found), sizes, True)
        try:
            parts = frame.build(self._place, found)
            peers.transport.send(peers.addresses[target], self._number, parts)
        except TransportError as error:
            raise self._error("to", target, error) from error

    def receive(self, source: int) -> list[Section]:
        """What rank ``source`` has sent; its payloads are valid until ``close``."""
        peers = self.peers
        try:
            data = peers.transport.wait(self._handles[source], peers.deadline)
            place, sections = frame.parse(data)
            frame.raise_abort(sections)
            if place != self._place:
                raise FrameError(f"a frame for {place} arrived where {self._place} was expected")
        except (TransportError, FrameError) as error:
            raise self._error("from", source, error) from error
        return sections

    def refuse(self, source: int, why: str) -> LinkError:
        """The error of a message that does not fit."""
        return self._error("from", source, why)

    def close(self) -> None:
        """All that has arrived is decoded."""
        for handle in self._handles.values():
            self.peers.transport.release(handle)

    def _error(self, way: str, other: int, why: Exception | str) -> LinkError:
        where = (
            f"bucket {self._place.microbatch}, round {self._number}" if self._number else "setup"
        )
        return LinkError(
            f"rank {self.peers.rank}: no {self.peers._what} {way} rank {other} ({where}): {why}"
        )
