"""What bounds a run: the milliseconds a step of compute, link, latency and codec.

Compute and codec share a stage's thread while the link works beside them, so the largest of the
four is what a faster run has to lower.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from thinwire.train.config import Config, link_latency, link_rate
from thinwire.train.latency import crossings, waits_for_gradients
from thinwire.train.tasks import task_of

_UNPAID = " What is predicted is not saved where the link does not bound: by=off does without."
_NARROWER = (6, 4, 3, 2)  # bits to try next, one after the other


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds a step, averaged over the run; compute, link and codec of the busiest rank."""

    step_ms: float
    compute_ms: float
    link_ms: float
    latency_ms: float
    codec_ms: float
    wait_ms: float

    @property
    def largest(self) -> str:
        costs = {
            "compute": self.compute_ms,
            "link": self.link_ms,
            "latency": self.latency_ms,
            "codec": self.codec_ms,
        }
        return max(costs, key=lambda name: costs[name])


def step_costs(
    per_rank: list[dict[str, float]], steps: int, hops: int, config: Config
) -> StepCosts:
    """The costs from each rank's seconds: ``step_s``, ``compute_s``, ``codec_s``, ``wait_s``,
    ``link_s``.

    The link's time is measured where the link is emulated; on a bare link it is what even the
    rank that waited least had to wait. Latency follows from the settings.
    """

    def milliseconds(name: str) -> list[float]:
        return [1e3 * rank[name] / steps for rank in per_rank]

    emulated = link_rate(config.link) is not None
    latency_ms = 1e3 * crossings(config, hops) * link_latency(config.link)
    waited_ms = max(0.0, min(milliseconds("wait_s")) - latency_ms)
    return StepCosts(
        step_ms=max(milliseconds("step_s")),
        compute_ms=max(milliseconds("compute_s")),
        link_ms=max(milliseconds("link_s")) if emulated else (waited_ms if hops else 0.0),
        latency_ms=latency_ms,
        codec_ms=max(milliseconds("codec_s")),
        wait_ms=max(milliseconds("wait_s")),
    )


def bound_sentence(costs: StepCosts, links: list[dict[str, Any]], config: Config) -> str:
    """One sentence: what bounds the run, milliseconds a step of each part, the flag to try next."""
    by = costs.largest
    name = by.capitalize() if by in ("compute", "latency") else f"The {by}"
    flag = next_flag(costs, links, config)
    why = ", to see where the link begins to bound" if flag.startswith("--link.rate") else ""
    return (
        f"{name} bounds this run: of {costs.step_ms:.0f} ms a step, compute takes "
        f"{costs.compute_ms:.0f} ms, the link {costs.link_ms:.0f} ms, latency "
        f"{costs.latency_ms:.0f} ms and the codec {costs.codec_ms:.0f} ms; "
        f"next try {flag}{why}."
        + (_UNPAID if by != "link" and any("by=" in link["codec"] for link in links) else "")
    )


def next_flag(costs: StepCosts, links: list[dict[str, Any]], config: Config) -> str:
    """The setting whose change would tell or gain most, as it is typed."""
    by = costs.largest
    if by == "link":
        return _for_link(links, config)
    if by == "latency":
        if waits_for_gradients(config):
            one_a_rank = config.nproc == config.num_stages
            return f"--pipeline.schedule {'GPipe' if one_a_rank else 'LoopedBFS'}"
        return f"--train.batch {2 * config.train.batch}"
    if by == "codec":
        return _for_codec(config)
    return _for_compute(costs, links, config)


def _for_link(links: list[dict[str, Any]], config: Config) -> str:
    slowest = max(
        links, key=lambda link: link["payload_bytes"] + link["header_bytes"], default=None
    )
    direction = "forward" if slowest is None else str(slowest["direction"])
    spec = getattr(config.plan, direction)
    found = re.search(r"int(\d)", spec)
    if found is None:
        return "--forward 'delta(int4)'" if direction == "forward" else "--backward int8"
    fewer = [bits for bits in _NARROWER if bits < int(found.group(1))]
    if not fewer:  # nothing narrower: give the link more compute to hide behind
        return task_of(config).more_compute(config)
    narrower = spec[: found.start(1)] + str(fewer[0]) + spec[found.end(1) :]
    return f"--{direction} '{narrower}'" if "(" in narrower else f"--{direction} {narrower}"


def _for_codec(config: Config) -> str:
    for direction in ("forward", "backward"):
        spec = getattr(config.plan, direction)
        if "(" in spec:
            return f"--{direction} int8"
        if spec.startswith("int"):
            return f"--{direction} bf16"
    return "--forward off --backward off"


def _for_compute(costs: StepCosts, links: list[dict[str, Any]], config: Config) -> str:
    nproc, stages = config.nproc or 1, config.num_stages
    cores = os.cpu_count() or 1
    if config.link.transport == "memory" and 1 < stages <= cores and config.device == "cpu":
        return f"--link.transport gloo --nproc {stages}"
    task = task_of(config)
    can_be_cut = config.pipeline.cuts is None and task.blocks(config) >= 2 * stages
    more = config.device == "cpu" and cores >= 2 * nproc and can_be_cut
    if more and config.link.transport == "gloo":
        return f"--nproc {2 * nproc}"
    if not links and nproc > 1:  # torch's own operations on all edges
        return "--forward 'delta(int4)' --backward int8"
    rate = link_rate(config.link)
    if rate is None or not links:  # more micro-batches: less of the step filling and draining
        parts = 2 * config.pipeline.microbatches
        least = task.least_rows * parts
        larger = f" --train.batch {2 * config.train.batch}" if least > config.train.batch else ""
        return f"--pipeline.microbatches {parts}{larger}"
    # the rate at which the link would take as long as compute
    enough = max(1.0, rate * costs.link_ms / costs.compute_ms / 1e3)
    return (
        f"--link.rate {enough:.0f}kbit" if enough < 1e3 else f"--link.rate {enough / 1e3:.0f}mbit"
    )
