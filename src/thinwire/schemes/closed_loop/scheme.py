"""What schemes whose ends are those of a closed loop have in common: what follows from coding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from thinwire.schemes.base import Receiver, Scheme, Sender
from thinwire.schemes.closed_loop.coding import Coding
from thinwire.schemes.closed_loop.receiver import LoopReceiver
from thinwire.schemes.closed_loop.sender import LoopSender


class LoopScheme(Scheme):
    """A scheme with ``coding``."""

    @property
    @abstractmethod
    def coding(self) -> Coding:
        """Which codec it uses for what."""

    @property
    def by_activations(self) -> bool:
        return self.coding.by_activations

    @property
    def tells(self) -> bool:
        return True

    @property
    def takes(self) -> frozenset[str]:
        return self.coding.takes

    @property
    def stochastic(self) -> bool:
        return any(c.stochastic for c in self.coding.codecs)

    def sender(self) -> Sender:
        return LoopSender(self.coding)

    def receiver(self) -> Receiver:
        return LoopReceiver(self.coding)

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return self.coding.row_nbytes(n)

    def told_nbytes(self, shape: Sequence[int]) -> int:
        return self.coding.told_nbytes(shape)
