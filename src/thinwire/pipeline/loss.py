"""The training loss: a sum over valid tokens divided by their number in the whole batch."""

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
        self.count = 1

    def tokens(self, target: Tensor) -> int:
        """Valid tokens of a target."""
        return int((target != self.ignore_index).sum())

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """``output`` [rows, T, V] logits, ``target`` [rows, T] int64; returns a scalar."""
        total = torch.nn.functional.cross_entropy(
            output.reshape(-1, output.shape[-1]).float(),
            target.reshape(-1),
            ignore_index=self.ignore_index,
            reduction="sum",
        )
        return total / max(self.count, 1)
