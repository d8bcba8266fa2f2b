"""The sparse all-gather: every rank sends all others what its codec has kept, of any length.

u <- tensor + residual; m <- codec.encode(u); residual <- u - decode(m); the mean is the sum of all
ranks' decode(m), in their order, divided by their number. For codecs that keep few of the values,
other ones on each rank: Aji and Heafield 2017, "Sparse Communication for Distributed Gradient
Descent". A rank sends (n - 1) times its coded bytes among n ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.exchange.base import (
    RESIDUALS,
    Averaging,
    Call,
    Coded,
    Member,
    Outcome,
    Residual,
    Steps,
    coded,
    summed,
    take_out,
    with_presence,
)
from thinwire.exchange.layout import Layout
from thinwire.exchange.peers import Peers
from thinwire.frame import Section


@dataclasses.dataclass(frozen=True)
class Sparse(Coded):
    """A sparse all-gather in ``codec``."""

    def averaging(
        self, members: Sequence[Member], dtype: torch.dtype, device: torch.device, peers: Peers
    ) -> SparseAveraging:
        return SparseAveraging(self, members, dtype, device, peers)


class SparseAveraging(Averaging):
    """One rank's residual of a bucket."""

    def __init__(
        self,
        exchange: Sparse,
        members: Sequence[Member],
        dtype: torch.dtype,
        device: torch.device,
        peers: Peers,
    ) -> None:
        super().__init__(members, dtype, device, peers)
        self.codec = exchange.codec  # may be another one in each step
        self.sent: Section | None = None  # of the step
        self.layout = Layout([m.numel for m in members], [m.number for m in members], 1, 1)
        self._residual: Residual | None = None
        if exchange.residual:
            kept = RESIDUALS[exchange.residual] or dtype
            self._residual = Residual(self.layout.lengths, kept, device)

    def average(self, tensors: Sequence[Tensor | None], call: Call) -> Steps:
        peers, codec = self.peers, self.codec
        (length,) = self.layout.lengths
        most = codec.max_nbytes((length,), self.dtype) + -(-len(tensors) // 8)
        gathering = peers.round(1, call.bucket, [most] * peers.size)
        present = [tensor is not None for tensor in tensors]
        absent = [index for index, here in enumerate(present) if not here]
        (values,) = self.layout.gather(tensors, self.dtype, self.device)
        if self._residual is not None:
            self._residual.add_to([values])
            for where in self.layout.of(absent, 0):
                values[where] = 0
        mine = self.sent = coded(codec, values, call.seed)
        for other in peers.others:
            gathering.send(other, with_presence(mine, present), length if mine else 0)
        if mine is not None and self._residual is not None:
            self._residual.propose([take_out(codec, values, mine)])
            for where in self.layout.of(absent, 0):
                self._residual.stay(0, where)
        yield

        total, anywhere = summed(codec, mine, present, values, gathering)
        if total is None or not bool(torch.isfinite(total.div_(peers.size)).all()):
            return Outcome(None, anywhere)
        found = [torch.empty(m.numel, dtype=self.dtype, device=self.device) for m in self.members]
        self.layout.scatter([total], found)
        return Outcome(found, anywhere)

    def commit(self) -> None:
        if self._residual is not None:
            self._residual.commit()

    def discard(self) -> None:
        if self._residual is not None:
            self._residual.discard()

    def state(self) -> dict[str, Tensor]:
        if self._residual is None:
            return {}
        (buffer,) = self._residual.buffers
        (spans,) = self.layout.spans
        whole = {m.name: buffer.new_empty(0) for m in self.members}
        whole |= {self.members[span.tensor].name: buffer[span.here] for span in spans}
        return {f"worker.{name}": x for name, x in whole.items()}
