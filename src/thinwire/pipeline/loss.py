"""The training loss: a sum over valid tokens, or labels, over their number in the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenLoss:
    """Cross-entropy of each micro-batch, summed, over the batch's number of valid tokens.

    The micro-batches' losses add up to the mean over all valid tokens of the batch, whatever the
    number of micro-batches and however unequal their padding. ``Pipeline`` sets the count before
    each step; positions whose target is ``ignore_index`` do not count.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index
        self.count: float = 1

    def tokens(self, target: Tensor) -> int:
        """Valid tokens of a target."""
        return int((target != self.ignore_index).sum())

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """``output`` [rows, …, V] logits, ``target`` [rows, …] int64; returns a scalar."""
        wide = torch.promote_types(output.dtype, torch.float32)
        total = torch.nn.functional.cross_entropy(
            output.reshape(-1, output.shape[-1]).to(wide),
            target.reshape(-1),
            ignore_index=self.ignore_index,
            reduction="sum",
        )
        return total / (self.count or 1)


class ClassLoss(TokenLoss):
    """``TokenLoss`` of one label a row, which in evaluation counts the right predictions too."""

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__(ignore_index)
        self.correct = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """``output`` [rows, classes] logits, ``target`` [rows] int64; returns a scalar."""
        if not torch.is_grad_enabled():
            # a row that doesn't count has a target that is no class
            self.correct += int((output.argmax(-1) == target).sum())
        return super().__call__(output, target)
