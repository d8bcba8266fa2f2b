"""``dgc:0.001``: deep gradient compression (Lin et al. 2018), momentum inside the exchange.

u <- momentum u + g; v <- v + u; the largest values of v travel, in a sparse all-gather; where a
value has been sent, v keeps what its codec has lost (nothing, as a rule) and u becomes 0, so that
momentum does not send it again ("momentum factor masking"). Vectors, such as biases, are averaged
exactly, and have the same momentum. The optimizer is therefore to have none: SGD(momentum=0).

In ``warmup`` steps the share falls from a quarter to its own, in five stages of equal ratios.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs import share as shares
from thinwire.codecs.topk import TopK
from thinwire.errors import SpecError
from thinwire.exchange.base import Averaging, Call, Exchange, Member, Outcome, Steps
from thinwire.exchange.peers import Peers
from thinwire.exchange.requantized import EXACT, RequantizedAveraging
from thinwire.exchange.sparse import Sparse, SparseAveraging
from thinwire.spec import register

_FIRST_SHARE = 0.25
_STAGES = 5


@register("exchange", "dgc")
@dataclasses.dataclass(frozen=True)
class DGC(Exchange):
    """``share`` as ``topk`` takes it; with ``nesterov`` the momentum looks ahead; without ``mask``
    u stays where it was sent."""

    share: str = dataclasses.field(metadata={"positional": "0.001"})
    momentum: float = 0.9
    nesterov: bool = False
    mask: bool = True
    warmup: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", shares.canonical("dgc", self.share))
        if not 0 <= self.momentum < 1:
            raise SpecError(f"dgc: momentum={self.momentum} is not within 0 … 1, without 1")
        if self.warmup < 0:
            raise SpecError(f"dgc: warmup={self.warmup} is no number of steps")

    def codec_at(self, step: int) -> TopK:
        """What codes v in ``step``, from 1."""
        stage = (
            min(_STAGES * (step - 1) // self.warmup, _STAGES - 1) if self.warmup else _STAGES - 1
        )
        return _codec_of(self.share, stage)

    def averaging(
        self, members: Sequence[Member], dtype: torch.dtype, device: torch.device, peers: Peers
    ) -> DGCAveraging:
        return DGCAveraging(self, members, dtype, device, peers)


@functools.lru_cache(maxsize=64)
def _codec_of(share: str, stage: int) -> TopK:
    number, slash, values = share.partition("/")
    last = float(number)
    if stage == _STAGES - 1 or last >= _FIRST_SHARE:
        return TopK(share)
    at = _FIRST_SHARE * (last / _FIRST_SHARE) ** (stage / (_STAGES - 1))
    return TopK(f"{at:.9f}{slash}{values}")


class DGCAveraging(Averaging):
    """One rank's u and v of a bucket's matrices, and the momentum of its vectors, which is the same
    on all ranks."""

    def __init__(
        self,
        exchange: DGC,
        members: Sequence[Member],
        dtype: torch.dtype,
        device: torch.device,
        peers: Peers,
    ) -> None:
        super().__init__(members, dtype, device, peers)
        self._exchange = exchange
        self._sparse = [i for i, m in enumerate(members) if len(m.shape) > 1]
        self._dense = [i for i, m in enumerate(members) if len(m.shape) <= 1]
        chosen = [members[i] for i in self._sparse]
        rest = [members[i] for i in self._dense]
        largest = Sparse(exchange.codec_at(1))
        self._gathering = SparseAveraging(largest, chosen, dtype, device, peers)
        # a round after that of what is sparse
        self._exact = RequantizedAveraging(EXACT, rest, dtype, device, peers, first_round=2)
        self._u = [torch.zeros(m.numel, dtype=dtype, device=device) for m in members]
        self._v = [torch.zeros(m.numel, dtype=dtype, device=device) for m in chosen]
        self._next: tuple[list[Tensor], list[Tensor]] | None = None

    def average(self, tensors: Sequence[Tensor | None], call: Call) -> Steps:
        u_next, v_next = list(self._u), list(self._v)
        sent: list[Tensor | None] = []
        for at, index in enumerate(self._sparse):
            tensor = tensors[index]
            if tensor is None:
                sent.append(None)
                continue
            u_next[index], change = self._moved(self._u[index], tensor)
            v_next[at] = self._v[at] + change
            sent.append(v_next[at])
        self._gathering.codec = self._exchange.codec_at(call.step)
        first = yield from self._gathering.average(sent, call)
        if first.means is not None:
            self._mask(u_next, v_next, sent)
        second = yield from self._exact.average([tensors[i] for i in self._dense], call)
        present = [False] * len(tensors)
        for index, here in zip(self._sparse, first.present, strict=True):
            present[index] = here
        for index, here in zip(self._dense, second.present, strict=True):
            present[index] = here
        if first.means is None or second.means is None:
            return Outcome(None, present)
        means: list[Tensor] = [u_next[0]] * len(tensors)
        for index, mean in zip(self._sparse, first.means, strict=True):
            means[index] = mean
        for index, mean in zip(self._dense, second.means, strict=True):
            means[index] = mean
            if present[index]:
                u_next[index], means[index] = self._moved(self._u[index], mean)
        # the same on all ranks, since means and the momentum of vectors are
        if not all(bool(torch.isfinite(means[index]).all()) for index in self._dense):
            return Outcome(None, present)
        self._next = u_next, v_next
        return Outcome(means, present)

    def _moved(self, u: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """u after the gradient ``g``, and by how much it moves the parameter."""
        g = g.to(u.dtype)
        if self._exchange.nesterov:
            u = (u + g).mul_(self._exchange.momentum)
            return u, u + g
        u = (u * self._exchange.momentum).add_(g)
        return u, u

    def _mask(self, u: list[Tensor], v: list[Tensor], sent: Sequence[Tensor | None]) -> None:
        """Take what has been sent out of ``v``, and out of ``u`` where that is wanted."""
        section, gathering = self._gathering.sent, self._gathering
        assert section is not None
        payload = section.payload.to(self.device)
        coder = gathering.codec
        kept = coder.transmitted(payload, section.shape, section.dtype, 1, None)[0]
        values = coder.decode(payload, section.shape, section.dtype)
        (spans,) = gathering.layout.spans
        for span in spans:
            if sent[span.tensor] is None:
                continue
            v[span.tensor] = v[span.tensor] - values[span.here]
            if self._exchange.mask:
                index = self._sparse[span.tensor]
                u[index] = u[index].masked_fill(kept[span.here].to(u[index].device), 0.0)

    def commit(self) -> None:
        if self._next is not None:
            self._u, self._v = self._next
            self._next = None

    def discard(self) -> None:
        self._next = None

    def state(self) -> dict[str, Tensor]:
        found = {f"u.{m.name}": u for m, u in zip(self.members, self._u, strict=True)}
        for index, v in zip(self._sparse, self._v, strict=True):
            found[f"v.{self.members[index].name}"] = v
        return found
