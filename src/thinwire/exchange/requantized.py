"""The requantized all-reduce: two messages between any two ranks, both in few bits.

1. u <- tensor + worker residual, cut into a part for each rank
2. every rank sends to rank r what its codec makes of part r; residual <- u - decoded
3. rank r decodes the parts r of all ranks, in their order, and averages them in full precision
4. s <- mean + server residual; rank r sends all ranks what the codec makes of s;
   server residual <- s - decoded
5. every rank, r too, decodes those bytes: the mean is the same everywhere

Tang et al. 2021, "1-bit Adam", section 4.2 (compressed all-reduce with error feedback at both
ends); without residuals any codec, and ``raw`` gives the exact mean. A rank sends
2 (n - 1) / n times the coded bytes of the bucket among n ranks, as a ring would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.codecs import Codec, codec
from thinwire.codecs.integer import Integer
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
    decoded,
    summed,
    take_out,
    with_presence,
)
from thinwire.exchange.layout import Layout
from thinwire.exchange.peers import Peers, Round
from thinwire.frame import Kind, Section


@dataclasses.dataclass(frozen=True)
class Requantized(Coded):
    """A requantized all-reduce in ``codec`` both ways."""

    def averaging(
        self, members: Sequence[Member], dtype: torch.dtype, device: torch.device, peers: Peers
    ) -> RequantizedAveraging:
        return RequantizedAveraging(self, members, dtype, device, peers)


#: Exact means, for what is not to be coded.
EXACT = Requantized(codec("raw"))


def alignment(coder: Codec) -> int:
    """Of how many values what shares a scale consists: parts of tensors begin at multiples."""
    return coder.group if isinstance(coder, Integer) and isinstance(coder.group, int) else 1


class RequantizedAveraging(Averaging):
    """One rank's residuals of a bucket: worker residuals of all of it, and the server residual of
    the part that this rank averages."""

    def __init__(
        self,
        exchange: Requantized,
        members: Sequence[Member],
        dtype: torch.dtype,
        device: torch.device,
        peers: Peers,
        first_round: int = 1,
    ) -> None:
        super().__init__(members, dtype, device, peers)
        self._codec, self._first = exchange.codec, first_round
        sizes, numbers = [m.numel for m in members], [m.number for m in members]
        self._layout = Layout(sizes, numbers, peers.size, alignment(exchange.codec))
        lengths = self._layout.lengths
        self._worker: Residual | None = None
        self._server: Residual | None = None
        if exchange.residual:
            kept = RESIDUALS[exchange.residual] or dtype
            self._worker = Residual(lengths, kept, device)
            self._server = Residual([lengths[peers.rank]], kept, device)

    def average(self, tensors: Sequence[Tensor | None], call: Call) -> Steps:
        sizes = [self._codec.max_nbytes((n,), self.dtype) for n in self._layout.lengths]
        most = sizes[self.peers.rank] + -(-len(tensors) // 8)
        scattering = self.peers.round(self._first, call.bucket, [most] * self.peers.size)
        gathering = self.peers.round(self._first + 1, call.bucket, sizes)
        present = [tensor is not None for tensor in tensors]
        parts = self._send_parts(tensors, present, scattering, call)
        yield
        rank = self.peers.rank
        like = torch.empty(self._layout.lengths[rank], dtype=self.dtype, device=self.device)
        own = None if parts is None else parts[rank]
        total, anywhere = summed(self._codec, own, present, like, scattering)
        nowhere = [index for index, here in enumerate(anywhere) if not here]
        mean = None if total is None else self._encode_mean(total, nowhere, call.seed)
        values = like.numel() if mean else 0
        for other in self.peers.others:
            gathering.send(other, [mean or Section(Kind.NONFINITE)], values)
        yield
        return Outcome(self._receive_means(mean, gathering), anywhere)

    def _send_parts(
        self,
        tensors: Sequence[Tensor | None],
        present: Sequence[bool],
        scattering: Round,
        call: Call,
    ) -> list[Section] | None:
        """Send every other rank its part; all parts as they are coded, None where one cannot be."""
        codec = self._codec
        parts = self._layout.gather(tensors, self.dtype, self.device)
        absent = [index for index, here in enumerate(present) if not here]
        self._add(self._worker, parts, absent)
        sections = [one for part in parts if (one := coded(codec, part, call.seed)) is not None]
        finite = len(sections) == len(parts)
        for other in self.peers.others:
            section, values = (sections[other], parts[other].numel()) if finite else (None, 0)
            scattering.send(other, with_presence(section, present), values)
        if not finite:
            return None
        if self._worker is not None:
            for part, section in zip(parts, sections, strict=True):
                take_out(codec, part, section)
            self._propose(self._worker, parts, absent)
        return sections

    def _receive_means(self, mean: Section | None, gathering: Round) -> list[Tensor] | None:
        """The means of all parts by tensor; None where one is not finite."""
        finite, buffers = mean is not None, []
        for source, length in enumerate(self._layout.lengths):
            section = mean if source == self.peers.rank else gathering.receive(source)[0]
            finite = finite and section is not None and section.kind != Kind.NONFINITE
            if finite and section is not None:
                like = torch.empty(length, dtype=self.dtype, device=self.device)
                buffers.append(decoded(self._codec, section, like, gathering, source))
        gathering.close()
        if not finite:
            return None
        found = [torch.empty(m.numel, dtype=self.dtype, device=self.device) for m in self.members]
        self._layout.scatter(buffers, found)
        return found

    def _encode_mean(self, total: Tensor, nowhere: Sequence[int], seed: int) -> Section | None:
        """What all ranks get of the mean of this rank's part, of which ``total`` is the sum; None
        where it is not finite."""
        rank = self.peers.rank
        total.div_(self.peers.size)
        if self._server is not None:
            self._server.add_to([total])
            for where in self._layout.of(nowhere, rank):
                total[where] = 0
        section = coded(self._codec, total, seed ^ 1)
        if section is not None and self._server is not None:
            take_out(self._codec, total, section)
            self._layout.clear_between(total, rank)
            self._server.propose([total])
            for where in self._layout.of(nowhere, rank):
                self._server.stay(0, where)
        return section

    def _add(
        self, residual: Residual | None, parts: Sequence[Tensor], absent: Sequence[int]
    ) -> None:
        if residual is None:
            return
        residual.add_to(parts)
        for rank, part in enumerate(parts):
            for where in self._layout.of(absent, rank):
                part[where] = 0

    def _propose(self, residual: Residual, parts: Sequence[Tensor], absent: Sequence[int]) -> None:
        for rank, part in enumerate(parts):
            self._layout.clear_between(part, rank)
        residual.propose(parts)
        for rank in range(len(parts)):
            for where in self._layout.of(absent, rank):
                residual.stay(rank, where)

    def commit(self) -> None:
        for residual in (self._worker, self._server):
            if residual is not None:
                residual.commit()

    def discard(self) -> None:
        for residual in (self._worker, self._server):
            if residual is not None:
                residual.discard()

    def state(self) -> dict[str, Tensor]:
        if self._worker is None or self._server is None:
            return {}
        whole = [self._worker.buffers[0].new_empty(m.numel) for m in self.members]
        self._layout.scatter(self._worker.buffers, whole)
        found = {f"worker.{m.name}": x for m, x in zip(self.members, whole, strict=True)}
        for span in self._layout.spans[self.peers.rank]:
            found[f"server.{self.members[span.tensor].name}"] = self._server.buffers[0][span.here]
        return found

    def _take(self, state: Mapping[str, Tensor]) -> None:
        if self._worker is None or self._server is None:
            return
        kept = self._worker.buffers[0]
        whole = [state[f"worker.{m.name}"].to(kept.device) for m in self.members]
        self._worker.buffers = self._layout.gather(whole, kept.dtype, kept.device)
        for span in self._layout.spans[self.peers.rank]:
            name = f"server.{self.members[span.tensor].name}"
            self._server.buffers[0][span.here] = state[name].to(kept.device)
