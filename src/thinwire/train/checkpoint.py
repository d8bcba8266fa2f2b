"""When and how a run is saved: every rank writes its part, all agree, old ones are deleted.

Two phases, without a disk that is shared: each rank makes its part durable, then all tell each
other what they hold. Only what all hold counts, and only then is anything older deleted; the last
two common checkpoints are kept. Ended at any point, a run finds one that is complete.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import thinwire as tw
from thinwire.pipeline.remembered import rows_of
from thinwire.store import FolderInUseError, FolderLock
from thinwire.train import disk, ranks, storage, weights
from thinwire.train.build import Run
from thinwire.train.home import Home
from thinwire.train.journal import Journal
from thinwire.train.spelling import to_toml

PROGRESS_FILE = "progress.safetensors"
KEPT = 2  # the last one may turn out damaged


class Key(NamedTuple):
    """Parts that make one checkpoint have the same: step, start of the processes, world size."""

    step: int
    attempt: str
    world_size: int


def key_of(part: disk.Part) -> Key:
    """Which checkpoint a part belongs to."""
    manifest = part.manifest
    return Key(manifest["step"], manifest["attempt"], manifest["world_size"])


class Checkpoints:
    """A run's checkpoints as this rank writes them; ``done`` steps are saved already."""

    def __init__(self, run: Run, home: Home, journal: Journal, done: int) -> None:
        self._run, self._home, self._journal = run, home, journal
        self._own = disk.rank_folder(home.parts, run.place.rank)
        self._saved = done

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step`` steps."""
        every = self._run.config.checkpoint.every
        return every is not None and step % every == 0

    def save(self, step: int, references: bool) -> None:
        """Save the state after ``step`` steps (collective); the links' references if asked for.

        Raises OSError on a rank that cannot write, LinkError on the others.
        """
        if step == self._saved:
            return
        began = time.perf_counter()
        self._journal.sync()
        problem, nbytes = None, 0
        try:
            part = disk.write(self._own, step, lambda folder: self._fill(folder, references))
            nbytes = part.nbytes
        except (OSError, SafetensorError) as error:
            problem = f"can't write the checkpoint of step {step} to {self._own}: {error}"
        parts = list(self._parts())
        held = [(part.manifest["rank"], key_of(part)) for part in parts]
        every = ranks.gather_json({"problem": problem, "bytes": nbytes, "held": held})
        if problem is not None:
            raise OSError(problem)
        for rank, one in enumerate(every):
            if one["problem"] is not None:
                raise tw.LinkError(f"rank {rank}: {one['problem']}")
        self._home.note(committed=step)
        found = [(w, Key(*key)) for one in every for w, key in one["held"]]
        # the run did not go on from another of this step or a later one: those are damaged
        mine = self._home.attempt
        complete = _complete((w, k) for w, k in found if k.step < step or k.attempt == mine)
        self._prune(parts, complete)
        self._saved = step
        seconds = time.perf_counter() - began
        self._journal.end_checkpoint(step, sum(one["bytes"] for one in every), seconds)

    def _folders(self) -> Iterator[Path]:
        """Where parts are that this rank looks after: its own, also where an earlier start has kept
        them, and on the first rank of a machine those of ranks that are no more."""
        place = self._run.place
        for parts in self._home.all_parts():
            for rank, folder in disk.rank_folders(parts).items():
                gone = rank >= place.world_size and self._home.local_rank == 0
                if rank == place.rank or gone:
                    yield folder

    def _parts(self) -> Iterator[disk.Part]:
        """The intact parts of this run that this rank looks after."""
        for folder in self._folders():
            yield from (p for p in disk.parts(folder) if p.manifest["run"] == self._home.run)

    def _prune(self, parts: Sequence[disk.Part], complete: Iterable[Key]) -> None:
        """Delete those of ``parts`` that are not of the last two complete checkpoints."""
        kept = sorted(complete)[-KEPT:]
        keep = {part.folder for part in parts if key_of(part) in kept}
        own = {part.folder for part in parts} | set(disk.step_folders(self._own).values())
        for folder in sorted(own - keep):
            self._run.pipeline.release(folder)
            with contextlib.suppress(FileNotFoundError):  # machines may share a disk after all
                disk.delete(folder)
        for folder in self._folders():
            if folder != self._own and not disk.step_folders(folder):
                _clear(folder)
        self._sweep([part for part in parts if part.folder in keep])

    def _sweep(self, kept: Iterable[disk.Part]) -> None:
        """Delete rows of ends of links that were here when the run had other stages or another
        plan: those that none of the parts that are ``kept`` names."""
        own = [part.manifest["pipeline"] for part in kept if part.folder.parent == self._own]
        named = {rows_of(where) for pipeline in own for where in pipeline["references"]}
        for file in storage.row_files(self._own / disk.REFERENCES):
            if file.stem.rpartition("-")[0] not in named:
                file.unlink()

    def _fill(self, folder: Path, references: bool) -> dict[str, Any]:
        """Write this rank's files into ``folder``; returns the values of the manifest."""
        run, place, config = self._run, self._run.place, self._run.config
        tensors = run.model.named_tensors(run.stages)
        entries = weights.collect(tensors, run.optimizer)
        progress = {**generator_states(place.device), "steps_ms": self._journal.steps_ms}
        save_file(progress, folder / PROGRESS_FILE)
        return {
            "run": self._home.run,
            "attempt": self._home.attempt,
            "rank": place.rank,
            "world_size": place.world_size,
            "num_stages": config.num_stages,
            "stages": [stage.stage_index for stage in run.stages],
            "steps": run.steps,
            "steps_per_epoch": run.steps_per_epoch,
            "text": run.data.sha256,
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "plan": {"forward": config.plan.forward, "backward": config.plan.backward},
            "config": to_toml(config),
            "weights": weights.write(entries, folder),
            "pipeline": run.pipeline.checkpoint(folder, references),
            "journal": self._journal.state(),
        }


def _complete(held: Iterable[tuple[int, Key]]) -> list[Key]:
    """The checkpoints of which every part is there; ``held``: parts by rank."""
    writers: dict[Key, set[int]] = {}
    for writer, key in held:
        writers.setdefault(key, set()).add(writer)
    return [key for key, found in writers.items() if len(found) == key.world_size]


def _clear(folder: Path) -> None:
    """Delete a rank's folder that is no longer used, unless another run has it by now."""
    with contextlib.suppress(OSError, FolderInUseError):
        lock = FolderLock(folder)
        shutil.rmtree(folder)
        lock.release()


def versions() -> dict[str, str]:
    """Of torch, Python and thinwire."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "thinwire": tw.__version__,
    }


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's global random generators, uint8, by device type."""
    states = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng.cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put the generators back to ``generator_states``; a device that it lacks stays as it is."""
    torch.set_rng_state(states["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in states:
        torch.cuda.set_rng_state(states["rng.cuda"], device)
