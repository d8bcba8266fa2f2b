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
from thinwire.train.model import learns

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
    config: Config, room: float, stages: Sequence[nn.Module], device: torch.device
) -> float:
    """The least seconds that a step takes; ``room``: the part of the samples that is remembered."""
    return max(compute_s(config, stages, device), link_s(config, room), latency_s(config))


def compute_s(config: Config, stages: Sequence[nn.Module], device: torch.device) -> float:
    """Seconds that this rank's ``stages`` compute in a step, from a forward timed on zeros."""
    rows, model = config.microbatch_rows, config.model
    was_training = [stage.training for stage in stages]
    seconds = 0.0
    with torch.no_grad():
        for stage in stages:
            stage.eval()
            x: torch.Tensor = torch.zeros(rows, model.context, model.dim, device=device)
            if getattr(stage, "embedding", None) is not None:
                x = torch.zeros(rows, model.context, dtype=torch.int64, device=device)
            stage(x)  # once to warm up
            # a backward takes twice a forward, where there is something to learn
            seconds += (1 + 2 * _trained(stage)) * min(_timed(stage, x) for _ in range(_TURNS))
    for stage, training in zip(stages, was_training, strict=True):
        stage.train(training)
    return seconds * config.pipeline.microbatches


def _timed(stage: nn.Module, x: torch.Tensor) -> float:
    start = time.perf_counter()
    stage(x)
    return time.perf_counter() - start


def _trained(stage: nn.Module) -> float:
    """The part of a stage's parameters that is to learn."""
    sizes = [(p.numel(), p.requires_grad) for p in stage.parameters()]
    return sum(n for n, is_trained in sizes if is_trained) / max(sum(n for n, _ in sizes), 1)


def link_s(config: Config, room: float) -> float:
    """Seconds for which the busiest host of an emulated link sends, or receives, in a step of later
    visits: both go on at once."""
    rate = link_rate(config.link)
    if rate is None or config.plan.forward == "off":
        return 0.0
    forward = _sample_bytes(config, tw.scheme(config.plan.forward), room)
    backward = _sample_bytes(config, tw.scheme(config.plan.backward), room)
    hosts: dict[tuple[int, str], float] = {}
    for link in links_of(config):
        # in memory each stage is a host of its own
        in_memory = config.link.transport == "memory"
        upper, lower = (link.edge, link.edge + 1) if in_memory else (link.upper, link.lower)
        back = backward if _has_gradients(config, link.edge) else 0.0
        for sender, receiver, sent in ((upper, lower, forward), (lower, upper, back)):
            for way in ((sender, "out"), (receiver, "in")):
                hosts[way] = hosts.get(way, 0.0) + sent
    return 8 * config.train.batch * max(hosts.values(), default=0.0) / rate


def _sample_bytes(config: Config, scheme: Scheme, room: float) -> float:
    """Bytes of a sample's values at a visit after its first."""
    values = config.model.context * config.model.dim
    if not isinstance(scheme, Delta):
        return scheme.row_nbytes(values, torch.float32)
    change, value = (c.row_nbytes(values, torch.float32) for c in (scheme.change, scheme.first))
    return room * change + (1 - room) * value


def _has_gradients(config: Config, edge: int) -> bool:
    """Whether gradients cross an edge."""
    return learns(config.model, edge, config.num_stages, config.train.frozen)


def latency_s(config: Config) -> float:
    """Seconds of latency that a step waits for at least."""
    links = links_of(config)
    if links and not _has_gradients(config, links[0].edge):  # none comes back
        return len(links) * link_latency(config.link)
    return least_crossings(config, len(links)) * link_latency(config.link)
