"""That a failure on one rank ends the pipeline on all, with its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from thinwire.edge import EdgeEnd
from thinwire.errors import LinkError, NonFiniteError, PeerAborted
from thinwire.network import Transport, TransportError
from thinwire.pipeline.control import Control
from thinwire.pipeline.gradients import Replicas

_DRAIN_SECONDS = 1.0


class Failures:
    """This rank's failures, and what the others are told of them.

    ``reason``: why the pipeline has given up, None while it has not.
    """

    def __init__(
        self,
        rank: int,
        control: Control,
        transport: Transport,
        ends: Sequence[EdgeEnd],
        replicas: Replicas | None = None,
    ) -> None:
        self._replicas = replicas
        self._rank, self._control, self._transport, self._ends = rank, control, transport, ends
        self.reason: str | None = None

    def check(self) -> None:
        """Raise LinkError where the pipeline has given up."""
        if self.reason is not None:
            raise LinkError(f"this pipeline has given up: {self.reason}")

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """If anything is raised inside, tell the other ranks why; the pipeline is then unusable."""
        try:
            yield
        except BaseException as error:
            origin = origin_of(error, self._rank)
            kind, self.reason = reason_of(origin, self._rank)
            tell = [*(end.outgoing.abort for end in self._ends), self._control.abort]
            tell += [] if self._replicas is None else [self._replicas.abort]
            for abort in tell:
                with contextlib.suppress(TransportError):  # that one is gone: the others are not
                    abort(kind, self.reason)
            self._transport.drain(_DRAIN_SECONDS)
            if origin is not error:
                raise origin from error
            raise


def origin_of(error: BaseException, rank: int) -> BaseException:
    """The error of ours inside one that torch's schedule wrapped around it, else the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LinkError | NonFiniteError):
            return cause
        if isinstance(cause, TransportError):
            return LinkError(f"rank {rank}: {cause}")
        cause = cause.__cause__
    return error


def reason_of(error: BaseException, rank: int) -> tuple[str, str]:
    """(kind, text) of an error for the other ranks: ours as it is, others by their first cause."""
    if isinstance(error, PeerAborted):
        return error.kind, str(error)
    if isinstance(error, LinkError | NonFiniteError):
        return type(error).__name__, str(error)
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    kind = type(first).__name__
    return kind, f"a stage of rank {rank} failed with {kind}: {' '.join(str(first).split())}"
