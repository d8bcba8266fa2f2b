"""What the stages of all models have in common: a number, and how first weights are drawn."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


class Stage(nn.Module):
    """A stage of a model."""

    def __init__(self, stage_index: int) -> None:
        super().__init__()
        self.stage_index = stage_index


def draw(tensor: Tensor, bound: float, seed: int, name: str) -> None:
    """Fill with values within ``-bound … bound`` that depend on the seed and the name alone.

    Uniform: torch.randn differs between CPUs.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    tensor.uniform_(-bound, bound, generator=generator)
