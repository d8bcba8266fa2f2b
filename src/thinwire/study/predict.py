"""How long a run would take on a slow link, from what it computed and sent: a prediction.

A step takes the longer of two times that overlap: compute, as if each stage had a processor of its
own, with the filling and draining of the pipeline; and the bytes of the busiest link on the wire.
Latency is left out: enough micro-batches hide it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def seconds_to(result: Mapping[str, Any], rate: float, target: float) -> float | None:
    """Seconds until the validation loss with the codec on comes down to ``target`` at ``rate``
    bit/s; None where it never does. Between two epochs both go in a straight line."""
    spent, before = 0.0, None
    for epoch in _epochs(result, rate):
        seconds, loss = epoch
        if loss <= target:
            part = 1.0 if before is None or before <= loss else (before - target) / (before - loss)
            return float(spent + seconds * part)
        spent, before = spent + seconds, loss
    return None


def seconds(result: Mapping[str, Any], rate: float) -> float:
    """Seconds of the whole run at ``rate`` bit/s."""
    return math.fsum(spent for spent, _ in _epochs(result, rate))


def compute_s(result: Mapping[str, Any]) -> float:
    """Seconds of compute in a step, stages side by side."""
    stages, parts = int(result["stages"]), int(result["microbatches"])
    return float(result["compute_ms"]) / 1e3 / stages * (parts + stages - 1) / parts


def _epochs(result: Mapping[str, Any], rate: float) -> list[tuple[float, float]]:
    """Seconds of each epoch, and the validation loss at its end."""
    compute, step, sent = compute_s(result), 0, dict[str, int]()
    found: list[tuple[float, float]] = []
    for point in result["curve"]:
        steps = point["step"] - step
        busiest = max((n - sent.get(link, 0) for link, n in point["bytes"].items()), default=0)
        found.append((max(steps * compute, 8 * busiest / rate), point["val_loss_codec"]))
        step, sent = point["step"], point["bytes"]
    return found


def loss_after(result: Mapping[str, Any], nbytes: float) -> float | None:
    """The validation loss, codec on, once all links together had carried ``nbytes``; None before
    the end of the first epoch. Between two epochs in a straight line."""
    before: tuple[float, float] | None = None
    for point in result["curve"]:
        sent, loss = float(sum(point["bytes"].values())), float(point["val_loss_codec"])
        if sent >= nbytes:
            if before is None:
                return loss if sent == nbytes else None
            share = (nbytes - before[0]) / (sent - before[0])
            return before[1] + share * (loss - before[1])
        before = sent, loss
    return None if before is None else before[1]
