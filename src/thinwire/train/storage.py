"""How much a run remembers of its samples, and where: RAM within a budget, then disk.

Told before the first step: days of training should not end on a full disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.codecs.keeping import KEEPINGS
from thinwire.store.slots import slot_size
from thinwire.store.tier import STEPS_IN_RAM
from thinwire.train import pace
from thinwire.train.config import Config, ConfigError, parse_size
from thinwire.train.size import available_memory
from thinwire.train.words import counted

#: Slots that a reference may take on disk: now, in the two checkpoints that are kept (a run that is
#: stopped has them too), and in one that an end in the middle of saving has left.
_COPIES = 4
_DAY = 86400


def remembers(spec: str) -> bool:
    """Whether both ends of a link with this scheme remember samples."""
    return spec != "off" and tw.scheme(spec).recalls


@dataclass(frozen=True)
class Need:
    """What one rank would remember of all samples.

    ``bytes_a_sample``: of all its ends of links; ``slots_a_sample``: of their slots on disk, by
    which a bound counts. ``step_bytes``: of the samples of a step.
    """

    samples: int
    ends: int
    bytes_a_sample: int
    slots_a_sample: int
    step_bytes: int

    @property
    def total(self) -> int:
        return self.samples * self.bytes_a_sample

    @property
    def slots(self) -> int:
        return self.samples * self.slots_a_sample


def need_of(config: Config, rank: int, samples: int) -> Need:
    """What ``rank`` would remember of ``samples`` samples."""
    links = pace.links_of(config)
    values = config.model.context * config.model.dim
    ends = total = slots = 0
    for forward, spec in ((True, config.plan.forward), (False, config.plan.backward)):
        keyed = None if spec == "off" else tw.scheme(spec).keyed
        if keyed is None or keyed.by != "sample":
            continue  # one for each place in the batch is not worth a word
        count = sum(
            (rank == (link.upper if forward else link.lower))
            + keyed.shared * (rank == (link.lower if forward else link.upper))
            for link in links
        )
        ends += count
        row = KEEPINGS[keyed.kept].nbytes(values)
        total, slots = total + count * row, slots + count * slot_size(row)
    return Need(samples, ends, total, slots, config.train.batch * total)


def storage_of(
    config: Config, need: Need, folder: Path, local_ranks: int, is_on_disk: bool = False
) -> tw.Storage:
    """Where this rank keeps its references, for ``tw.Pipeline``; ``folder`` is this rank's own.

    ``is_on_disk``: what the run remembered before it was resumed lies in another folder.
    A bound of the disk counts wherever they lie, so that the budget of RAM changes no result.
    Raises ConfigError where they do not fit, with the setting that would make them.
    """
    if not need.ends:
        return tw.Storage()
    ram = None if config.ref.budget is None else parse_size(config.ref.budget, "--ref.budget")
    disk = None if config.ref.disk is None else parse_size(config.ref.disk, "--ref.disk")
    kept = need.total if not disk else min(need.total, disk // _COPIES)
    if disk and disk // _COPIES < need.slots_a_sample:
        raise ConfigError(
            f"--ref.disk {config.ref.disk} has room for no sample: one takes "
            f"{bytes_text(need.slots_a_sample)} at this rank, up to {_COPIES} times; raise it, or "
            "remember nothing, as with --forward tile"
        )
    if ram is None:
        _check_ram(config, need, kept, local_ranks)
    if disk == 0:
        return tw.Storage(ram)
    spills = ram is not None and ram < kept + STEPS_IN_RAM * need.step_bytes
    earlier = is_on_disk or row_files(folder)  # of before the run was resumed
    if not (spills or config.checkpoint.every or disk or earlier):
        return tw.Storage()
    if spills and ram is not None and ram < STEPS_IN_RAM * need.step_bytes:
        raise ConfigError(
            f"--ref.budget {config.ref.budget} is less than the references of {STEPS_IN_RAM} "
            f"steps, which are in RAM at once: {bytes_text(STEPS_IN_RAM * need.step_bytes)} a rank"
        )
    _check_disk(need, disk, folder, local_ranks)
    return tw.Storage(ram, folder, disk, _COPIES)


def _check_ram(config: Config, need: Need, kept: int, local_ranks: int) -> None:
    available = available_memory()
    if available is None or config.device != "cpu" or kept * local_ranks <= available // 2:
        return
    raise ConfigError(
        f"the references of {need.samples:,} samples take {bytes_text(kept)} on each of "
        f"{local_ranks} ranks here, more than half of the {bytes_text(available)} of RAM that "
        "are available; set --ref.budget, as 2gb: what is beyond goes to disk"
    )


def _check_disk(need: Need, disk: int | None, folder: Path, local_ranks: int) -> None:
    free = _free(folder)
    most = need.slots * _COPIES if disk is None else min(need.slots * _COPIES, disk)
    if most * local_ranks <= free:
        return
    raise ConfigError(
        f"the references of {need.samples:,} samples take up to {bytes_text(most)} of disk, "
        f"{_COPIES} times for the checkpoints, on each of {local_ranks} ranks here, but {folder} "
        f"has {bytes_text(free)} free; set --ref.disk to less, as 10gb: samples for which there is "
        "no room are sent as values"
    )


def sentence(
    config: Config,
    need: Need,
    storage: tw.Storage,
    stages: Sequence[nn.Module],
    device: torch.device,
) -> str | None:
    """What a rank remembers, where, and what it writes a day at most; None if it remembers nothing.

    ``stages``: this rank's, to time them.
    """
    if not need.ends:
        return None
    ends = "one end of a link" if need.ends == 1 else f"{need.ends} ends of links"
    text = f"references: {need.samples:,} samples at {ends}, {bytes_text(need.total)} a rank"
    available = available_memory()
    memory = "" if available is None else f" ({bytes_text(available)} available)"
    room = _room(need, storage)
    part = "" if room >= 1 else f"; there is room for {100 * room:.0f} % of the samples"
    is_spilled = _spilled(need, storage) > 0
    if not is_spilled and not config.checkpoint.every:
        return f"{text}{part}. They are in RAM{memory}; none goes to disk unless the run is stopped"
    kept = _where(config, storage, is_spilled, memory)
    step_s = pace.least_step_s(config, room, stages, device)
    a_day = written_a_step(config, need, storage) * _DAY / step_s
    return (
        f"{text}{part}. {kept}. At most {bytes_text(a_day)} a day are written, with steps of "
        f"{1e3 * step_s:.0f} ms or more"
    )


def _where(config: Config, storage: tw.Storage, is_spilled: bool, memory: str) -> str:
    """Where the references of a run lie of which some go to disk."""
    if storage.folder is None:
        return f"They are in RAM{memory}, each checkpoint has a copy"
    on_disk = f"in {storage.folder} ({bytes_text(_free(storage.folder))} free)"
    if not is_spilled or storage.ram is None:
        return f"They are in RAM{memory}, and what checkpoints need of them {on_disk}"
    others = "the others and what checkpoints need" if config.checkpoint.every else "the others"
    return f"Up to {bytes_text(storage.ram)} of them are in RAM{memory}, {others} {on_disk}"


def written_a_step(config: Config, need: Need, storage: tw.Storage) -> float:
    """The most bytes of references that go to disk in a step, on the average."""
    room, spilled = _room(need, storage), _spilled(need, storage)
    changed = room * need.step_bytes
    every = config.checkpoint.every
    if storage.folder is None:  # a checkpoint has them all
        return 0.0 if every is None else room * need.total / every
    # of those that stay in RAM a checkpoint writes what has changed since the one before
    saved = 0.0 if every is None else min(room * need.total, every * changed) / every
    return spilled * changed + (1 - spilled) * saved


def _room(need: Need, storage: tw.Storage) -> float:
    """The part of the samples for which there is room."""
    return 1.0 if storage.capacity is None else min(1.0, storage.capacity / max(need.slots, 1))


def _spilled(need: Need, storage: tw.Storage) -> float:
    """The part of the references that does not stay in RAM."""
    if storage.ram is None or storage.folder is None:
        return 0.0
    resident = max(0, storage.ram - STEPS_IN_RAM * need.step_bytes)
    return 1.0 - min(1.0, resident / max(_room(need, storage) * need.total, 1))


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


def disk_sentence(summary: Mapping[str, Any]) -> str:
    """What went to the disk in all, on all ranks."""
    saved = summary["checkpoints"]
    checkpoints = f"{bytes_text(saved['bytes'])} in {counted(saved['count'], 'checkpoint')}"
    rows = sum(one["written_bytes"] for one in summary["references"])
    return f"Written to disk: {checkpoints}{f', {bytes_text(rows)} of references' if rows else ''}."


def no_room(summary: Mapping[str, Any]) -> str | None:
    """On how many visits there was no room to remember the sample; None if there always was."""
    plan = summary["config"]["plan"]
    shares = [
        link["kinds"]["value"]["values"] / link["values"]
        for link in summary["links"]
        if remembers(plan[link["direction"]]) and "value" in link["kinds"]
    ]
    if not shares:
        return None
    disk = summary["config"]["ref"]["disk"]
    what = "--ref.budget" if disk is None or parse_size(disk, "--ref.disk") == 0 else "--ref.disk"
    return (
        f"There was no room to remember the sample at {100 * max(shares):.1f} % of visits, which "
        f"were sent as values; raise {what} for a new run."
    )


def row_files(folder: Path) -> list[Path]:
    """The files in ``folder`` that have references."""
    return sorted(folder.glob("*.rows"))


def discard(folder: Path) -> None:
    """Delete the references in ``folder``, which nothing needs any more."""
    shutil.rmtree(folder, ignore_errors=True)  # the run is complete all the same


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
