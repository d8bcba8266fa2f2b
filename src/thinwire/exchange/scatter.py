"""The first half of a requantized all-reduce, and the second, each by itself: for replicas that
hold a part of the parameters each.

Reduce-scatter: every rank sends rank r what the codec makes of part r; rank r decodes all of them,
its own as well, in the order of the ranks, and adds them up in full precision. All-gather: every
rank decodes what all have sent, its own as well, so that all hold the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.exchange.base import Residual, coded, decoded, summed, take_out, with_presence
from thinwire.exchange.peers import Peers
from thinwire.frame import Kind, Section

_SCATTER, _GATHER = 1, 2


class Scatter:
    """Reduce-scatters of one buffer; ``kept``: the dtype of a residual of all of it, if any."""

    def __init__(self, peers: Peers, bucket: int, codec: Codec, kept: torch.dtype | None) -> None:
        self._peers, self._bucket, self._codec, self._kept = peers, bucket, codec, kept
        self.residual: Residual | None = None

    def restore(self, rows: Tensor) -> None:
        """Go on from a residual of a row for each rank."""
        assert self._kept is not None
        self.residual = Residual([rows.shape[1]] * len(rows), self._kept, rows.device)
        self.residual.propose(list(rows.clone()))
        self.residual.commit()

    def sum(self, parts: Tensor, seed: int) -> Tensor | None:
        """``parts`` [ranks, n], of which this rank gets the sum over ranks of its own row, float32
        or float64; None on all ranks where a value of any is not finite."""
        peers = self._peers
        dtype = torch.float64 if parts.dtype == torch.float64 else torch.float32
        values = parts.to(dtype, copy=True)
        if self._kept is not None:
            if self.residual is None or len(self.residual.buffers[0]) != values.shape[1]:
                width = values.shape[1]
                self.residual = Residual([width] * peers.size, self._kept, values.device)
            self.residual.add_to(list(values))
        most = self._codec.max_nbytes((values.shape[1],), dtype)
        scattering = peers.round(_SCATTER, self._bucket, [most] * peers.size)
        sections = [one for row in values if (one := coded(self._codec, row, seed)) is not None]
        finite = len(sections) == len(values)
        for other in peers.others:
            section, count = (sections[other], values.shape[1]) if finite else (None, 0)
            scattering.send(other, with_presence(section, ()), count)
        if finite and self.residual is not None:
            for row, section in zip(values, sections, strict=True):
                take_out(self._codec, row, section)
            self.residual.propose(list(values))
        own = sections[peers.rank] if finite else None
        return summed(self._codec, own, (), values[0], scattering)[0]


def gather(peers: Peers, bucket: int, codec: Codec, x: Tensor, seed: int) -> Tensor:
    """Every rank's 1-D ``x``, one after the other, as all ranks decode them. Raises ValueError on a
    value that is not finite."""
    most = codec.max_nbytes((x.numel(),), x.dtype)
    gathering = peers.round(_GATHER, bucket, [most] * peers.size)
    payload = codec.encode(x, seed=seed)
    section = Section(Kind.VALUE, str(codec), x.dtype, tuple(x.shape), payload.cpu())
    for other in peers.others:
        gathering.send(other, [section], x.numel())
    found = []
    for source in range(peers.size):
        one = section if source == peers.rank else gathering.receive(source)[0]
        found.append(decoded(codec, one, x, gathering, source))
    gathering.close()
    return torch.cat(found)
