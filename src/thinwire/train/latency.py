"""How many latencies a step takes: messages that can only leave once another has arrived.

A schedule sends so many micro-batches ahead of the gradients that come back, and then waits.
"""

from __future__ import annotations

import math

from thinwire.train.config import Config

_WARM_UP = {"1F1B": 1, "InterleavedZeroBubble": 1, "Interleaved1F1B": 2}  # a stage further back
_ALL_AHEAD = ("GPipe", "LoopedBFS")


_UNCERTAIN = 0.2  # of an estimate, beside what was measured


def crossings(config: Config, hops: int) -> int:
    """One-way latencies of a step whose compute takes no time; ``hops`` edges cross a link.

    Exact for one stage a rank. Otherwise an estimate, within 20 % of what was measured.
    """
    if not hops:
        return 0
    # beside the micro-batches: the step's header, and loss and norm at its end
    agreement = 1 if config.link.transport == "memory" else 2
    pipeline, stages = config.pipeline, config.num_stages
    if pipeline.schedule in _WARM_UP and config.nproc == stages:
        ahead = _WARM_UP[pipeline.schedule]
        return _one_forward_one_backward(stages, pipeline.microbatches, ahead) + agreement
    return 2 * hops * _rounds(config) + agreement


def least_crossings(config: Config, hops: int) -> int:
    """As ``crossings``, but no estimate above what there is."""
    found = crossings(config, hops)
    return found if config.nproc == config.num_stages else int((1 - _UNCERTAIN) * found)


def waits_for_gradients(config: Config) -> bool:
    """Whether the schedule holds micro-batches back until gradients of others have come."""
    one_trip = 2 * (config.num_stages - 1) + 2
    return config.pipeline.schedule not in _ALL_AHEAD and (
        crossings(config, config.num_stages - 1) > one_trip
    )


def _rounds(config: Config) -> int:
    """How often micro-batches go through all stages and back, one round after the other."""
    pipeline = config.pipeline
    if pipeline.schedule in _ALL_AHEAD:
        return 1
    in_flight = 2 if config.link.transport == "memory" else 2 * (config.nproc or 1) - 1
    return math.ceil(pipeline.microbatches / in_flight)


def _one_forward_one_backward(stages: int, microbatches: int, ahead: int) -> int:
    """Latencies until the last gradient is back: each stage does ``ahead`` forwards for each stage
    behind it, then a forward and a backward in turn, each as soon as its message is there.
    """
    work: list[list[tuple[str, int]]] = []
    for stage in range(stages):
        warm = min(microbatches, ahead * (stages - 1 - stage))
        order = [("forward", part) for part in range(warm)]
        for part in range(microbatches - warm):
            order += [("forward", warm + part), ("backward", part)]
        work.append(
            order + [("backward", part) for part in range(microbatches - warm, microbatches)]
        )
    arrived: dict[tuple[int, str, int], int] = {}  # at a stage, of a micro-batch's message
    for part in range(microbatches):
        arrived[0, "forward", part] = arrived[stages - 1, "backward", part] = 0
    now = [0] * stages
    while any(work):
        for stage, order in enumerate(work):
            while order and (stage, *order[0]) in arrived:
                kind, part = order.pop(0)
                now[stage] = max(now[stage], arrived[stage, kind, part])
                to = stage + (1 if kind == "forward" else -1)
                arrived.setdefault((to, kind, part), now[stage] + 1)
    return max(now)
