"""What every rank knows after a step, or after an evaluation."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step: loss, valid tokens (0 without TokenLoss), global norm.

    ``stop``: some rank was asked to stop (``Pipeline.ask_to_stop``) before this step ended.
    ``overflow``: with a ``loss_scale`` the gradient was not finite, and has been left out.
    """

    loss: float
    tokens: int
    grad_norm: float
    stop: bool = False
    overflow: bool = False


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Sum of the loss over valid tokens, and their number; equal on all ranks.

    Under another loss than TokenLoss: its mean over micro-batches, and 0. ``correct``: the right
    predictions among them, under a ClassLoss.
    """

    loss_sum: float
    tokens: int
    correct: int | None = None

    @property
    def loss(self) -> float:
        """Mean loss a token."""
        return self.loss_sum / max(self.tokens, 1)
