"""``summary.json``: what a run was, what it reached, what it sent and what bounded it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from thinwire.train.bound import bound_sentence, next_flag, step_costs
from thinwire.train.build import Run
from thinwire.train.checkpoint import versions
from thinwire.train.journal import Journal, split_reports


def summarise(run: Run, journal: Journal, reached: dict[str, float]) -> dict[str, Any]:
    """The summary of a run that has ended; gathers counters, so all ranks call it."""
    config, data, unit = run.config, run.data, run.task.unit
    links, control = split_reports(run.pipeline)
    per_rank = journal.clock.of_all_ranks()
    hops = len({link["edge"] for link in links})
    timed = journal.clock.steps  # a run resumed on other processes is timed from there on
    costs = step_costs(per_rank, timed, hops, config)
    train_s = per_rank[0]["step_s"]
    return {
        "train_loss": journal.loss,
        **reached,
        f"{unit}_per_s": journal.clock.tokens / train_s,
        "step_ms_median": journal.clock.median_ms,
        "train_s": train_s,
        "steps": run.steps,
        "epochs": run.epochs,
        unit: journal.tokens,
        "links": links,
        "bits_per_value": {d: mean_bits(links, d) for d in ("forward", "backward")},
        "references": run.pipeline.reference_reports(),
        "control": control,
        "bound": {
            **dataclasses.asdict(costs),
            "by": costs.largest,
            "next": next_flag(costs, links, config),
            "sentence": bound_sentence(costs, links, config),
        },
        "cpu": cpu_costs(per_rank, timed),
        "checkpoints": dataclasses.asdict(journal.checkpoints),
        "data": {
            "source": data.source,
            "sha256": data.sha256,
            **data.facts,
        },
        "parameters": run.model.parameters,
        "seed": config.train.seed,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "config": dataclasses.asdict(config),
    }


def mean_bits(links: list[dict[str, Any]], direction: str) -> float | None:
    """Bits a value over the whole run, first visits and headers included, of all links one way."""
    some = [link for link in links if link["direction"] == direction and link["values"]]
    if not some:
        return None
    sent = sum(link["payload_bytes"] + link["header_bytes"] for link in some)
    return float(8 * sent / sum(link["values"] for link in some))


def cpu_costs(per_rank: list[dict[str, float]], steps: int) -> list[dict[str, float]]:
    """Each rank's CPU time a step, and what compression took of it."""
    return [
        {
            "step_ms": 1e3 * rank["cpu_s"] / steps,
            "codec_ms": 1e3 * rank["codec_s"] / steps,
            "codec_share": rank["codec_s"] / rank["cpu_s"],
        }
        for rank in per_rank
    ]
