"""Going on with a run: from what its checkpoint holds to the state of this rank.

With the same processes and stages each rank reads its own part, and goes on as if nothing had
happened. On others, weights and optimizer state are read by name where they are on this machine,
and sent by a rank that has them where they are not; the links' references are dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file

from thinwire.pipeline.state import fresh
from thinwire.train import config as configuration
from thinwire.train import disk, metrics, override, ranks, spelling, storage, weights
from thinwire.train.build import Run
from thinwire.train.checkpoint import PROGRESS_FILE, set_generator_states, versions
from thinwire.train.choose import Choice, choose
from thinwire.train.config import Config, ConfigError
from thinwire.train.home import Home
from thinwire.train.journal import Journal


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run had come: the steps done, and what the journal had noted of them."""

    step: int = 0
    noted: Mapping[str, Any] | None = None
    steps_ms: tuple[float, ...] = ()

    def restore(self, journal: Journal) -> None:
        """Let the journal go on from there."""
        if self.noted is not None:
            journal.restore(self.noted, self.steps_ms)


_SHARED = ("text", "config", "steps", "steps_per_epoch", "threads", "versions", "journal")


def resume(run: Run, home: Home, screen: Console) -> Progress:
    """Bring this rank to where the run's newest complete checkpoint left it (collective).

    Raises ConfigError, on all ranks alike, where the run is complete, or another one by now.
    """
    place = run.place
    choice, lines = choose(
        home, place.rank, place.world_size, lambda manifest: _has_our_stages(run, home, manifest)
    )
    for line in lines:
        _say(screen, line)
    if choice is None:
        _say(screen, "there is no complete checkpoint yet: the run begins anew")
        return Progress()
    facts = _facts(choice, home, place.rank)
    before = settings_of(facts, home)
    _check(run, home, facts, before, choice.key.step)
    for line in _notes(run, facts):
        _say(screen, line)
    if choice.same:
        progress, lines = _read_own(run, home, choice, before)
    else:
        progress, lines = _move(run, home, choice, facts)
    for line in lines:
        _say(screen, line)
    _say(screen, f"goes on after step {progress.step} of {run.steps}")
    return progress


def settings_of(manifest: Mapping[str, Any], home: Home) -> Config:
    """The settings with which a part was written."""
    return configuration.build(spelling.from_toml(manifest["config"], home.folder))


def _has_our_stages(run: Run, home: Home, manifest: Mapping[str, Any]) -> bool:
    """Whether a part has the stages that this rank holds now, cut at the same places."""
    if manifest["stages"] != [stage.stage_index for stage in run.stages]:
        return False
    return run.task.cut_at(settings_of(manifest, home)) == run.task.cut_at(run.config)


def _say(screen: Console, line: str) -> None:
    screen.print(f"resume: {line}", soft_wrap=True, markup=False)


def _facts(choice: Choice, home: Home, rank: int) -> dict[str, Any]:
    """What the manifests of all ranks say alike, from the first rank that has one (collective)."""
    mine: dict[str, Any] = {"complete": (home.folder / metrics.SUMMARY).exists() and rank == 0}
    if choice.parts:
        manifest = choice.parts[min(choice.parts)].manifest
        mine |= {name: manifest[name] for name in _SHARED}
        mine["pipeline_step"] = manifest["pipeline"]["step"]
        mine["were"] = [manifest["num_stages"], manifest["world_size"]]
    every = ranks.gather_json(mine)
    facts: dict[str, Any] = next(one for one in every if "text" in one)
    return facts | {"complete": every[0]["complete"]}


def _check(run: Run, home: Home, facts: Mapping[str, Any], before: Config, step: int) -> None:
    """Refuse to go on with other data, with other settings, or with nothing left to do."""
    where = f"--resume {home.folder}"
    if facts["text"] != run.data.sha256:
        raise ConfigError(f"{where}: {run.task.other_data}")
    for entry in override.changed(before, run.config):
        raise ConfigError(f"{where}: {entry.name} is not what the run was trained with")
    if facts["steps_per_epoch"] != run.steps_per_epoch:
        raise ConfigError(
            f"{where}: with {run.config.pipeline.microbatches} micro-batches an epoch has "
            f"{run.steps_per_epoch} steps, it had {facts['steps_per_epoch']}; leave "
            "--pipeline.microbatches as it was"
        )
    if run.steps < facts["steps"]:
        raise ConfigError(
            f"{where}: {run.steps} steps are fewer than its {facts['steps']}; a resumed run can "
            "only train longer"
        )
    if facts["complete"] and step == run.steps:
        raise ConfigError(
            f"{where} is complete: all {step} steps are done; raise --train.epochs or "
            "--train.steps to train longer"
        )


def _notes(run: Run, facts: Mapping[str, Any]) -> list[str]:
    """Lines on what makes the run another one than if it had not been stopped."""
    lines = []
    if run.steps > facts["steps"]:
        lines.append(
            f"note: {run.steps} steps instead of {facts['steps']}: from here on the learning rate "
            "follows the longer schedule"
        )
    threads = torch.get_num_threads()
    if threads != facts["threads"]:
        lines.append(
            f"note: {threads} torch threads instead of {facts['threads']}: losses may differ in "
            "their last digits"
        )
    for name, now in versions().items():
        if now != facts["versions"][name]:
            lines.append(f"note: {name} {now} instead of {facts['versions'][name]}")
    return lines


def _read_own(run: Run, home: Home, choice: Choice, before: Config) -> tuple[Progress, list[str]]:
    """Everything from this rank's own part; ``before`` are the settings that wrote it."""
    part = choice.parts[run.place.rank]
    tensors = run.model.named_tensors(run.stages)
    with _naming(part):
        entries = weights.read(part.folder, part.manifest["weights"], tensors)
        weights.apply(entries, tensors, run.optimizer)
        progress = load_file(part.folder / PROGRESS_FILE)
        set_generator_states(progress, run.place.device)
        steps_ms = tuple(map(float, progress["steps_ms"].tolist()))
    _bring_references(part.folder.parent, disk.rank_folder(home.parts, run.place.rank))
    lines = run.pipeline.restore(part.folder, part.manifest["pipeline"])
    _hold_others(run, home, part.folder)
    noted = dict(part.manifest["journal"])
    if choice.key.step < run.steps and _timed(before) != _timed(run.config):
        noted["clock"], steps_ms = {}, ()  # an average over both would describe neither
    return Progress(choice.key.step, noted, steps_ms), lines


def _timed(config: Config) -> tuple[Any, ...]:
    """The settings on which the time of a step depends, and that may change."""
    return config.link, config.plan, config.pipeline, config.threads


def _hold_others(run: Run, home: Home, but: Path | None = None) -> None:
    """Leave what this rank's other checkpoints need untouched until they are deleted, wherever
    they are: the run may have to go on from one of them, where it was or on as many ranks."""
    for parts in home.all_parts():
        for part in disk.parts(disk.rank_folder(parts, run.place.rank)):
            if part.folder != but and part.manifest["run"] == home.run:
                run.pipeline.hold(part.folder, part.manifest["pipeline"])


def _bring_references(before: Path, own: Path) -> None:
    """Copy the rows that the parts in ``before`` name, if this rank keeps them elsewhere by now."""
    source, target = before / disk.REFERENCES, own / disk.REFERENCES
    if before.resolve() == own.resolve() or not source.is_dir():
        return
    target.mkdir(exist_ok=True)
    for rows in storage.row_files(source):
        shutil.copyfile(rows, target / rows.name)


@contextlib.contextmanager
def _naming(part: disk.Part) -> Iterator[None]:
    """Say of which part files are that are not what the run needs, though their digests are right:
    nothing that is read is trusted."""
    try:
        yield
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise disk.DamagedError(f"{part.folder} is not a part of this run: {why}") from error


def _move(
    run: Run, home: Home, choice: Choice, facts: Mapping[str, Any]
) -> tuple[Progress, list[str]]:
    """Weights and optimizer state by name; what belonged to the old processes begins anew."""
    step = choice.key.step
    fetch_weights(run, choice)
    # every rank's generator stood elsewhere: begin a stream that no start of a run has used
    digest = hashlib.sha256(f"resumed:{run.config.train.seed}:{step}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))
    stages, processes = facts["were"]
    what = "the links' counters begin anew"
    lost = run.pipeline.restore(Path(), fresh(facts["pipeline_step"]))
    if any(line.startswith("references") for line in lost):
        what += " and their references are dropped: samples are sent as first visits"
    if any(line.startswith("link") for line in lost):
        what += "; what links expect is learned anew"
    _hold_others(run, home)
    line = (
        f"written by {stages} stages on {processes} processes, now {run.config.num_stages} on "
        f"{run.place.world_size}: {what}"
    )
    noted = dict(facts["journal"])
    if step < run.steps:  # the clock too: its seconds were those of other processes
        noted["clock"] = {}
    return Progress(step, noted), [line]


def fetch_weights(run: Run, choice: Choice) -> None:
    """Give this rank's stages and optimizer what a checkpoint holds of them, wherever its parts
    are (collective)."""
    tensors = run.model.named_tensors(run.stages)
    weights.apply(_fetched(tensors, choice.parts, run.place.rank), tensors, run.optimizer)


def _fetched(
    tensors: Mapping[str, torch.Tensor], parts: Mapping[int, disk.Part], rank: int
) -> dict[str, weights.Entry]:
    """The entries of ``tensors``: from the parts that are here, else sent by the first rank that
    has them. All ranks go through the same list, in order of receiver and name.
    """
    has = {name: p for p in parts.values() for name in p.manifest["weights"]["names"]}
    lacking = sorted(set(tensors) - set(has))
    every = ranks.gather_json({"has": sorted(has), "lacking": lacking})
    owners = {name: seer for seer, one in reversed([*enumerate(every)]) for name in one["has"]}
    entries: dict[str, weights.Entry] = {}
    for part in parts.values():
        names = [n for n in tensors if has.get(n) is part]
        with _naming(part):
            entries |= weights.read(part.folder, part.manifest["weights"], names)
    for receiver, one in enumerate(every):
        for name in one["lacking"]:
            if name not in owners:
                raise ConfigError(f"--resume: no part of the checkpoint holds {name}")
            if rank == owners[name]:
                written = has[name].manifest["weights"]
                with _naming(has[name]):
                    (entry,) = weights.read(has[name].folder, written, [name]).values()
                ranks.send_bytes(weights.to_bytes(entry), receiver)
            elif rank == receiver:
                entries[name] = weights.from_bytes(ranks.receive_bytes(owners[name]))
    return entries
