"""The gradients of a rank's parameters: accumulated, averaged over replicas, summed where they are
tied, clipped.

Torch adds a step's gradients to whatever is there. What is scaled, averaged, or tied and summed
over its owners, must not be so twice: such gradients are set apart before a step, and added after
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from thinwire.pipeline.assembly import Tie
from thinwire.pipeline.control import Control
from thinwire.pipeline.stage import PipelineStage

#: Parameters, and the gradients that earlier steps have left in them.
Earlier = list[tuple[nn.Parameter, Tensor | None]]


class Replicas(Protocol):
    """What averages the gradients of this rank's parameters over the replicas of its stages, as
    ``tw.GradientReducer`` does."""

    @property
    def size(self) -> int:
        """The number of replicas."""

    def average(self, scale: float = 1.0) -> bool:
        """Average all gradients in place; where one is not finite, some are NaN on all ranks, and
        the answer is no. What is remembered waits for ``settle``."""

    def settle(self, counts: bool) -> None:
        """The step counts, on all ranks of all replicas, or it does not."""

    def abort(self, kind: str, why: str) -> None:
        """Tell the replicas that this one gives up: the error's name, and its text."""


class Gradients:
    """Of the parameters of the local ``stages``; those in ``ties`` are other stages' too."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        ties: Sequence[Tie],
        control: Control,
        rank: int,
        replicas: Replicas | None = None,
    ) -> None:
        self._stages, self._ties, self._control, self._rank = stages, ties, control, rank
        self._replicas = replicas

    def parameters(self) -> Iterator[nn.Parameter]:
        """Each parameter of this rank once, also where two of its stages share it."""
        found = {id(p): p for stage in self._stages for p in stage.submod.parameters()}
        yield from found.values()

    def set_apart(self, scaled: bool) -> Earlier:
        """Before a step: take out what earlier steps have left and this one must not touch."""
        whole = scaled or self._replicas is not None
        apart = self.parameters() if whole else (tie.parameter for tie in self._ties)
        earlier = [(parameter, parameter.grad) for parameter in apart]
        for parameter, _ in earlier:
            parameter.grad = None
        return earlier

    def gather(self, earlier: Earlier, scale: float) -> None:
        """After it: average over replicas, sum what is tied over its owners (both collective),
        divide by ``scale``, and add what was taken out."""
        if self._replicas is not None:
            # before ties are summed: each owner's mean is coded in its own way, their sum is one
            self._replicas.average(scale)
        for tie in self._ties:
            self._sum(tie)
        for parameter, before in earlier:
            if parameter.grad is not None and scale != 1.0:
                parameter.grad.div_(scale)
            if before is not None:
                parameter.grad = before if parameter.grad is None else before + parameter.grad

    def _sum(self, tie: Tie) -> None:
        parameter = tie.parameter
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        total: Tensor | None = None
        for part in self._control.exchange_tensor(grad, tie.owners, tie.slot):
            total = part.clone() if total is None else total + part
        parameter.grad = total

    def square_norm(self) -> float:
        """Sum of squares of this rank's gradients in float64; a tied one counts at one owner."""
        elsewhere = {id(t.parameter) for t in self._ties if t.owners[0] != self._rank}
        total = 0.0
        for parameter in self.parameters():
            if parameter.grad is not None and id(parameter) not in elsewhere:
                total += float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2
        return total

    def clip(self, norm: float, most: float | None) -> None:
        """Scale all down where their global ``norm`` is above ``most``."""
        if most is None or (scale := most / (norm + 1e-6)) >= 1.0:
            return
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
