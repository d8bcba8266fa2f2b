"""What coding loses on a link: the values that are given to it beside those that arrive."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.base import within
from thinwire.counters import Gained, gain_db


@dataclasses.dataclass
class Fidelity:
    """Sums over the messages of a step that is measured, in float64."""

    values: int = 0
    given: float = 0.0  # sum of squares
    arrived: float = 0.0
    product: float = 0.0
    lost: float = 0.0
    peak: float = 0.0
    gained: Gained = dataclasses.field(default_factory=dict)

    def add(self, x: Tensor, y: Tensor, lengths: Sequence[int] | None) -> None:
        """Count ``x`` [rows, …], of which ``y`` arrives; ``lengths[i]`` values of row i, or all."""
        given, arrived = (t.detach().reshape(len(x), -1).to(torch.float64) for t in (x, y))
        if lengths is not None:
            valid = within(lengths, given.shape[1], x.device)
            given, arrived = given[valid], arrived[valid]
        if not given.numel():
            return
        self.values += given.numel()
        self.given += float(given.square().sum())
        self.arrived += float(arrived.square().sum())
        self.product += float((given * arrived).sum())
        self.lost += float((given - arrived).square().sum())
        self.peak = max(self.peak, float(given.abs().max()))

    def report(self) -> dict[str, Any]:
        """``relative_error``: the norm of what is lost by that of what was given. ``cosine``: of
        what was given and what arrives. ``outlier_ratio``: the largest magnitude by the root mean
        square. None without values, or where all are zero. ``gain_db``, where something was
        expected: see ``gain_db``."""
        found: dict[str, Any] = {"gain_db": gain_db(self.gained)} if self.gained else {}
        if not self.given:
            return dict.fromkeys(("relative_error", "cosine", "outlier_ratio")) | found
        norms = math.sqrt(self.given) * math.sqrt(self.arrived)
        return found | {
            "relative_error": math.sqrt(self.lost / self.given),
            "cosine": self.product / norms if norms else None,
            "outlier_ratio": self.peak / math.sqrt(self.given / self.values),
        }
