"""How much a run remembers of its samples, and where: RAM within a budget, then disk.

Told before the first step: days of training should not end on a full disk.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.codecs.keeping import KEEPINGS
from thinwire.schemes import Delta
from thinwire.store.tier import STEPS_IN_RAM
from thinwire.train.config import Config, ConfigError, link_rate, parse_size
from thinwire.train.size import available_memory

#: Slots that a reference may take on disk: now, in the two checkpoints that are kept, and in one
#: that is being made.
_COPIES = 4
_DAY = 86400


@dataclass(frozen=True)
class Need:
    """What one rank would remember of all samples.

    ``bytes_a_sample``: of all its ends of links. ``step_bytes``: of the samples of a step.
    """

    samples: int
    ends: int
    bytes_a_sample: int
    step_bytes: int

    @property
    def total(self) -> int:
        return self.samples * self.bytes_a_sample


def need_of(config: Config, rank: int, samples: int) -> Need:
    """What ``rank`` would remember of ``samples`` samples."""
    owner = {
        stage: other
        for other in range(config.nproc or 1)
        for stage in tw.stages_of_rank(
            config.pipeline.schedule, other, config.nproc or 1, config.num_stages
        )
    }
    in_memory = config.link.transport == "memory"
    values = config.model.context * config.model.dim
    ends = total = 0
    for spec in (config.plan.forward, config.plan.backward):
        scheme = None if spec == "off" else tw.scheme(spec)
        if not isinstance(scheme, Delta):
            continue
        here = sum(
            (owner[edge] == rank) + (owner[edge + 1] == rank)
            for edge in range(config.num_stages - 1)
            if in_memory or owner[edge] != owner[edge + 1]
        )
        ends += here
        total += here * KEEPINGS[scheme.ref].nbytes(values)
    return Need(samples, ends, total, config.train.batch * total)


def storage_of(config: Config, need: Need, folder: Path, local_ranks: int) -> tw.Storage:
    """Where this rank keeps its references, for ``tw.Pipeline``; ``folder`` is this rank's own.

    Raises ConfigError where they do not fit, with the setting that would make them.
    """
    ram = None if config.ref.budget is None else parse_size(config.ref.budget, "ref.budget")
    disk = None if config.ref.disk is None else parse_size(config.ref.disk, "ref.disk")
    copies = _COPIES if config.checkpoint.every else 1
    if disk == 0 and ram is not None:
        return tw.Storage(ram)
    _check_ram(config, need, ram, local_ranks)
    spills = ram is not None and ram < need.total + STEPS_IN_RAM * need.step_bytes
    if not need.ends or not (spills or config.checkpoint.every):
        return tw.Storage()
    if spills and ram is not None and ram < STEPS_IN_RAM * need.step_bytes:
        raise ConfigError(
            f"ref.budget {config.ref.budget} is less than the references of {STEPS_IN_RAM} steps, "
            f"which are in RAM at once: {bytes_text(STEPS_IN_RAM * need.step_bytes)} a rank"
        )
    _check_disk(config, need, disk, copies, folder, local_ranks)
    return tw.Storage(ram, folder, disk, copies)


def _check_ram(config: Config, need: Need, ram: int | None, local_ranks: int) -> None:
    available = available_memory()
    if ram is not None or available is None or config.device != "cpu":
        return
    if need.total * local_ranks > available // 2:
        raise ConfigError(
            f"the references of {need.samples:,} samples take {bytes_text(need.total)} on each of "
            f"{local_ranks} ranks here, more than half of the {bytes_text(available)} of RAM that "
            "are available; set --ref.budget, as 2gb: what is beyond goes to disk"
        )


def _check_disk(
    config: Config, need: Need, disk: int | None, copies: int, folder: Path, local_ranks: int
) -> None:
    free = _free(folder)
    most = need.total * copies if disk is None else min(need.total * copies, disk)
    if most * local_ranks <= free:
        return
    why = f", up to {copies} times for the checkpoints" if copies > 1 else ""
    raise ConfigError(
        f"the references of {need.samples:,} samples take {bytes_text(need.total)}{why} on each of "
        f"{local_ranks} ranks here, but {folder} has {bytes_text(free)} free; set --ref.disk to "
        "less, as 10gb: samples for which there is no room are sent as values"
    )


def sentence(
    config: Config,
    need: Need,
    storage: tw.Storage,
    stages: Sequence[nn.Module],
    device: torch.device,
) -> str | None:
    """What a rank remembers, where, and what it is likely to write a day; None if it does not."""
    if not need.ends:
        return None
    ends = "an end" if need.ends == 1 else f"{need.ends} ends"
    text = (
        f"references: {need.samples:,} samples at {ends} of links, {bytes_text(need.total)} a rank"
    )
    available = available_memory()
    room = "" if available is None else f" ({bytes_text(available)} available)"
    kept = 1.0 if storage.capacity is None else storage.capacity / max(need.total, 1)
    part = "" if kept >= 1 else f"; there is room for {100 * kept:.0f} % of the samples"
    if storage.folder is None:
        return f"{text}, in RAM{room}{part}; nothing is written to disk"
    step_s = estimated_step_s(config, stages, device)
    a_step = need.step_bytes * _spilled(need, storage)
    if config.checkpoint.every:
        dirty = min(need.total, config.checkpoint.every * need.step_bytes)
        a_step = max(a_step, dirty / config.checkpoint.every)
    free = bytes_text(_free(storage.folder))
    in_ram = "all of them" if storage.ram is None else f"up to {bytes_text(storage.ram)} of them"
    return (
        f"{text}, {in_ram} in RAM{room}, on disk in {storage.folder} ({free} free), "
        f"about {bytes_text(a_step * _DAY / step_s)} written a day at {1e3 * step_s:.0f} ms a "
        f"step{part}"
    )


def _spilled(need: Need, storage: tw.Storage) -> float:
    """The part of the references that does not stay in RAM."""
    if storage.ram is None:
        return 0.0
    resident = max(0, storage.ram - STEPS_IN_RAM * need.step_bytes)
    return 1.0 - min(1.0, resident / max(need.total, 1))


def estimated_step_s(config: Config, stages: Sequence[nn.Module], device: torch.device) -> float:
    """Seconds that a step is likely to take: compute of this rank's stages, timed on zeros without
    gradients, or the link's time for what the plan sends, whichever is more.
    """
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
            start = time.perf_counter()
            stage(x)
            seconds += time.perf_counter() - start
    for stage, training in zip(stages, was_training, strict=True):
        stage.train(training)
    compute = 3 * seconds * config.pipeline.microbatches  # a backward takes twice a forward
    rate = link_rate(config.link)
    if rate is None or config.plan.forward == "off":
        return compute
    scheme = tw.scheme(config.plan.forward)
    row = scheme.row_nbytes(model.context * model.dim, torch.float32)
    return max(compute, 8 * row * config.train.batch / rate)


def slow_disk(reports: Sequence[dict[str, Any]], step_s: float) -> str | None:
    """A line with the numbers where steps waited for the disk for over 5 % of their time."""
    worst = max(reports, key=lambda r: r["stalled_s"], default=None)
    if worst is None or worst["stalled_s"] <= 0.05 * step_s:
        return None
    moved = worst["read_bytes"] + worst["written_bytes"]
    return (
        f"The disk does not keep up: a rank waited {worst['stalled_s']:.1f} s of {step_s:.1f} s "
        f"for references ({bytes_text(moved)} read and written); raise --ref.budget, or name a "
        "faster disk with --checkpoint.dir."
    )


def _free(folder: Path) -> int:
    """Free bytes where ``folder`` is or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def bytes_text(count: float) -> str:
    """Bytes as people read them: ``17.2 kB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
