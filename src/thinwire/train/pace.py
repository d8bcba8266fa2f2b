"""The least time that a step takes, told before the first one: compute, link, and latency.

They overlap, so a step takes at least the longest of them; what is written a day, at most as much.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

import thinwire as tw
from thinwire.schemes import Delta, Scheme
from thinwire.train.config import Config, link_latency, link_rate
from thinwire.train.latency import least_crossings
from thinwire.train.stage import Stage
from thinwire.train.task import Model

_TURNS = 2  # of the forward that is timed; the fastest counts


class Link(NamedTuple):
    """An edge that crosses a link, and the ranks of its two stages."""

    edge: int
    upper: int
    lower: int


def links_of(config: Config) -> list[Link]:
    """Every edge that crosses a link; in memory all do."""
    ranks = config.nproc or 1
    owner = {
        stage: rank
        for rank in range(ranks)
        for stage in tw.stages_of_rank(config.pipeline.schedule, rank, ranks, config.num_stages)
    }
    edges = [Link(edge, owner[edge], owner[edge + 1]) for edge in range(config.num_stages - 1)]
    return [e for e in edges if config.link.transport == "memory" or e.upper != e.lower]


def least_step_s(
    config: Config, model: Model, room: float, stages: Sequence[Stage], device: torch.device
) -> float:
    """The least seconds that a step takes; ``room``: the part of the samples that is remembered."""
    return max(
        compute_s(config, model, stages, device),
        link_s(config, model, room),
        latency_s(config, model),
    )


def compute_s(config: Config, model: Model, stages: Sequence[Stage], device: torch.device) -> float:
    """Seconds that this rank's ``stages`` compute in a step, from a forward timed on zeros."""
    modes = [(module, module.training) for stage in stages for module in stage.modules()]
    seconds = 0.0
    with torch.no_grad():
        for stage in stages:
            stage.eval()
            example, _ = model.arguments(
                stage.stage_index, config.num_stages, config.microbatch_rows
            )
            x = torch.zeros_like(example, device=device)
            stage(x)  # once to warm up
            # a backward takes twice a forward, where there is something to learn
            seconds += (1 + 2 * _trained(stage)) * min(_timed(stage, x) for _ in range(_TURNS))
    for module, training in modes:  # one by one: those of frozen blocks may differ
        module.training = training
    return seconds * config.pipeline.microbatches


def _timed(stage: nn.Module, x: torch.Tensor) -> float:
    start = time.perf_counter()
    stage(x)
    return time.perf_counter() - start


def _trained(stage: nn.Module) -> float:
    """The part of a stage's parameters that is to learn."""
    sizes = [(p.numel(), p.requires_grad) for p in stage.parameters()]
    return sum(n for n, is_trained in sizes if is_trained) / max(sum(n for n, _ in sizes), 1)


def link_s(config: Config, model: Model, room: float) -> float:
    """Seconds for which the busiest host of an emulated link sends, or receives, in a step of later
    visits: both go on at once."""
    rate = link_rate(config.link)
    if rate is None or config.plan.forward == "off":
        return 0.0
    schemes = tw.scheme(config.plan.forward), tw.scheme(config.plan.backward)
    hosts: dict[tuple[int, str], float] = {}
    for link in links_of(config):
        # in memory each stage is a host of its own
        in_memory = config.link.transport == "memory"
        upper, lower = (link.edge, link.edge + 1) if in_memory else (link.upper, link.lower)
        values = model.values(link.edge)
        forward, back = (_sample_bytes(values, scheme, room) for scheme in schemes)
        if not model.has_gradients(link.edge):
            back = 0.0
        for sender, receiver, sent in ((upper, lower, forward), (lower, upper, back)):
            for way in ((sender, "out"), (receiver, "in")):
                hosts[way] = hosts.get(way, 0.0) + sent
    return 8 * config.train.batch * max(hosts.values(), default=0.0) / rate


def _sample_bytes(values: int, scheme: Scheme, room: float) -> float:
    """Bytes of a sample's values at a visit after its first."""
    if not isinstance(scheme, Delta):
        return scheme.row_nbytes(values, torch.float32)
    change, value = (c.row_nbytes(values, torch.float32) for c in (scheme.change, scheme.first))
    return room * change + (1 - room) * value


def latency_s(config: Config, model: Model) -> float:
    """Seconds of latency that a step waits for at least."""
    links = links_of(config)
    if links and not model.has_gradients(links[0].edge):  # none comes back
        return len(links) * link_latency(config.link)
    return least_crossings(config, len(links)) * link_latency(config.link)
