"""``powersgd:4``: matrices are averaged at rank 4, by one step of power iteration (Vogels et al.
2019, "PowerSGD", algorithm 1).

1. M <- gradient + residual, as [first dimension, the rest]
2. P <- mean of M Q over the ranks; its columns are made orthonormal
3. Q <- mean of M' P; the mean of M is taken to be P Q'; residual <- M - P Q'

Q is kept, so that the iteration goes on with the next step. Both means are exact and the same on
all ranks; what is computed of them is computed alike on any hardware: products are summed column by
column, without a library's matrix multiplication. A column that vanishes (no gradient, or a matrix
of lower rank) becomes noise from a counter hash for the next step, not NaN. Matrices that rank 4
would not make smaller by half, and vectors, are averaged exactly in the first round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import SpecError
from thinwire.exchange.base import Averaging, Call, Exchange, Member, Outcome, Steps
from thinwire.exchange.peers import Peers
from thinwire.exchange.requantized import EXACT, RequantizedAveraging
from thinwire.native import noise
from thinwire.spec import register

#: A matrix is compressed if what is sent of it is at most this share of it.
_WORTH = 0.5


@register("exchange", "powersgd")
@dataclasses.dataclass(frozen=True)
class PowerSGD(Exchange):
    """``rank`` columns; without ``warm`` Q is drawn anew each step, without ``ef`` nothing that is
    lost is kept."""

    rank: int = dataclasses.field(metadata={"positional": "4"})
    warm: bool = True
    ef: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 1024:
            raise SpecError(f"powersgd: rank {self.rank} is not within 1 … 1024")

    def averaging(
        self, members: Sequence[Member], dtype: torch.dtype, device: torch.device, peers: Peers
    ) -> LowRankAveraging:
        return LowRankAveraging(self, members, dtype, device, peers)


class LowRankAveraging(Averaging):
    """One rank's residuals, and the Q that all ranks have, of a bucket's matrices."""

    def __init__(
        self,
        exchange: PowerSGD,
        members: Sequence[Member],
        dtype: torch.dtype,
        device: torch.device,
        peers: Peers,
    ) -> None:
        super().__init__(members, dtype, device, peers)
        self._exchange = exchange
        self._shapes = [_matrix(m.shape) for m in members]
        self._low = [_is_worth(shape, exchange.rank) for shape in self._shapes]
        ranks = [min(exchange.rank, *shape) for shape in self._shapes]
        firsts, seconds = [], []
        self._q: list[Tensor] = []
        self._residual: list[Tensor] = []
        for member, (n, m), low, r in zip(members, self._shapes, self._low, ranks, strict=True):
            firsts.append(Member(member.name, member.number, (n, r) if low else member.shape))
            seconds.append(Member(member.name, member.number, (m, r) if low else (0,)))
            shape = (m, r) if low else (0, 0)
            self._q.append(_drawn(shape, member.number, 0).to(dtype).to(device))
            kept = (n, m) if low and exchange.ef else (0, 0)
            self._residual.append(torch.zeros(kept, dtype=dtype, device=device))
        self._first = RequantizedAveraging(EXACT, firsts, dtype, device, peers)
        self._second = RequantizedAveraging(EXACT, seconds, dtype, device, peers, first_round=3)
        self._next: tuple[list[Tensor], list[Tensor]] | None = None

    def average(self, tensors: Sequence[Tensor | None], call: Call) -> Steps:
        matrices: list[Tensor | None] = []
        sent: list[Tensor | None] = []
        for index, tensor in enumerate(tensors):
            if tensor is None or not self._low[index]:
                matrices.append(None)
                sent.append(tensor)
                continue
            matrix = tensor.to(self.dtype).view(self._shapes[index])
            if self._exchange.ef:
                matrix = matrix + self._residual[index]
            matrices.append(matrix)
            sent.append((matrix @ self._start(index, call.step)).view(-1))
        outcome = yield from self._first.average(sent, call)
        anywhere = outcome.present
        bases: list[Tensor | None] = [None] * len(tensors)
        answers: list[Tensor | None] = []
        for index, low in enumerate(self._low):
            if outcome.means is None or not low or not anywhere[index]:
                answers.append(None)
                continue
            n = self._shapes[index][0]
            base = bases[index] = orthonormal(outcome.means[index].view(n, -1))
            mine = matrices[index]
            # a rank without this gradient takes part with zeros
            answers.append(None if mine is None else (mine.t() @ base).reshape(-1))
        second = yield from self._second.average(answers, call)
        if outcome.means is None or second.means is None:
            return Outcome(None, anywhere)
        means, q_next, residual_next = [], list(self._q), list(self._residual)
        for index, basis in enumerate(bases):
            if basis is None:
                means.append(outcome.means[index])
                continue
            q = second.means[index].view(-1, basis.shape[1])
            mean = product(basis, q)
            means.append(mean.view(-1))
            q_next[index] = revived(q, self.members[index].number)
            mine = matrices[index]
            if self._exchange.ef and mine is not None:
                residual_next[index] = mine.sub_(mean)
        self._next = q_next, residual_next
        return Outcome(means, anywhere)

    def _start(self, index: int, step: int) -> Tensor:
        q = self._q[index]
        if self._exchange.warm:
            return q
        drawn = _drawn(tuple(q.shape), self.members[index].number, step)
        return drawn.to(q.dtype).to(q.device)

    def commit(self) -> None:
        if self._next is not None:
            self._q, self._residual = self._next
            self._next = None

    def discard(self) -> None:
        self._next = None

    def state(self) -> dict[str, Tensor]:
        found = {}
        for member, q, residual, low in zip(
            self.members, self._q, self._residual, self._low, strict=True
        ):
            if low:
                found[f"q.{member.name}"] = q
                found[f"worker.{member.name}"] = residual.view(-1)
        return found


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def _is_worth(shape: tuple[int, int], rank: int) -> bool:
    n, m = shape
    return 0 < rank * (n + m) <= _WORTH * n * m


def _drawn(shape: tuple[int, ...], number: int, draw: int) -> Tensor:
    """Values within -1 … 1 that are the same on all ranks, and others for each tensor and draw."""
    seeds = torch.tensor([(number << 32) + draw], dtype=torch.int64)
    return noise.uniform(seeds, math.prod(shape))[0].view(shape) * 2 - 1


def revived(q: Tensor, number: int) -> Tensor:
    """``q``, its columns scaled by powers of two to values about 1, with noise in place of those
    that are nothing."""
    largest = q.abs().amax(0)
    nothing = largest < torch.finfo(q.dtype).tiny ** 0.5
    q = torch.ldexp(q, -torch.frexp(largest)[1])
    if not bool(nothing.any()):
        return q
    return torch.where(nothing, _drawn(tuple(q.shape), number, 0).to(q), q)


def orthonormal(p: Tensor) -> Tensor:
    """Columns that span those of ``p`` [n, r], each of norm 1, or zero where it depends on those
    before it; in float64, by Gram-Schmidt, twice, with sums in a fixed order."""
    columns: list[Tensor] = []
    for column in p.to(torch.float64).unbind(1):
        size = float(total(column * column)) ** 0.5
        for _ in range(2):
            for other in columns:
                column = column - other * total(column * other)
        norm = float(total(column * column)) ** 0.5
        if norm <= 1e-7 * size or norm == 0.0:
            columns.append(torch.zeros_like(column))
        else:
            columns.append(column / norm)
    return torch.stack(columns, 1).to(p.dtype)


def total(x: Tensor) -> Tensor:
    """The sum of a 1-D tensor, halves added to each other: the same on any hardware."""
    while x.numel() > 1:
        half = (x.numel() + 1) // 2
        folded = x[:half].clone()
        folded[: x.numel() - half] += x[half:]
        x = folded
    return x.sum()


def product(p: Tensor, q: Tensor) -> Tensor:
    """p q' for p [n, r] and q [m, r], one column after the other: the same on any hardware."""
    found = torch.zeros((p.shape[0], q.shape[0]), dtype=p.dtype, device=p.device)
    for a, b in zip(p.unbind(1), q.unbind(1), strict=True):
        found.add_(a[:, None] * b[None, :])
    return found
