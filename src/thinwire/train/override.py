"""Which settings a resumed run may change: those that do not change what is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from thinwire.train import config as configuration
from thinwire.train import metrics, spelling
from thinwire.train.config import Config, ConfigError, Setting
from thinwire.train.words import typed

_SECTIONS = ("pipeline", "link", "parallel", "plan", "checkpoint")
_SINGLE = (
    "nproc",
    "threads",
    "device",
    "json",
    "plugin",  # another machine has the file elsewhere
    "data.path",  # another machine has the text elsewhere; its digest is compared
    "train.epochs",
    "train.steps",
    "train.log_every",
    "train.measure_every",
)


def resumed(folder: Path, given: dict[str, Any], world_size: int | None) -> Config:
    """The settings of the run in ``folder`` with ``given`` ones, under their dotted names, instead.

    ``world_size`` is what torchrun set, None outside it. Raises ConfigError where a given one
    would change what is trained.
    """
    values = _values(folder, "--resume ")
    if "out" in given:
        raise ConfigError(f"--out doesn't go with --resume: the run stays in {folder}")
    before = configuration.build(values)
    for entry in changed(before, configuration.build(values | given)):
        raise ConfigError(
            f"--{entry.name} can't change in a resumed run, where it is "
            f"{typed(entry.of(before))}; "
            "begin a new run for that"
        )
    if "plugin" not in given:
        _check_plugins(f"--resume {folder}", values.get("plugin", ()))
    for name in _outdated(values, given, world_size):
        values.pop(name, None)
    return configuration.build(values | given)


def evaluated(folder: Path, given: dict[str, Any]) -> Config:
    """The settings with which the run in ``folder`` is evaluated: all its stages in one process,
    unless more are asked for. Plugins that are given go beside those of the run that are still
    there, or instead of one of the same file name. Raises ConfigError where it is no run's folder.
    """
    values = _values(folder, "")
    plugins, own = given.get("plugin", ()), values.get("plugin", ())
    if plugins:
        names = {Path(file).name for file in plugins}
        own = [f for f in own if Path(f).is_file() and Path(f).name not in names]
    _check_plugins(str(folder), own)
    given = {**given, "plugin": (*own, *plugins)}
    apart = (given.get("nproc") or 1) > 1
    values |= {
        "link.transport": "gloo" if apart else "memory",
        "link.rate": "none",
        "pipeline.schedule": "Interleaved1F1B",  # any does: nothing comes back
        "nproc": 1,
    }
    for name in ("pipeline.stages_per_rank", "threads"):
        values.pop(name, None)
    return configuration.build(values | given)


def _check_plugins(where: str, files: Iterable[str]) -> None:
    """Refuse a run whose plugins have moved."""
    for file in files:
        if not Path(file).is_file():
            raise ConfigError(
                f"{where}: its plugin {file} is not there; name where it is with --plugin"
            )


def _values(folder: Path, option: str) -> dict[str, Any]:
    """The settings of the run in ``folder``, which ``option`` names."""
    if not (folder / metrics.CONFIG).is_file():
        raise ConfigError(f"{option}{folder} is no run folder: it has no {metrics.CONFIG}")
    values = spelling.read_toml(folder / metrics.CONFIG)
    if values.get("compare"):
        what = "resume" if option else "evaluate"
        raise ConfigError(
            f"{option}{folder} holds compared runs; {what} one of them, as {folder / 'compressed'}"
        )
    return values


def changed(before: Config, now: Config) -> Iterator[Setting]:
    """The settings that differ though they say what is trained."""
    for entry in configuration.settings():
        free = entry.name in _SINGLE or entry.name.partition(".")[0] in _SECTIONS
        free = free or entry.name == "out" or (entry.name in _REFERENCES and _may(before, entry))
        if not free and entry.of(before) != entry.of(now):
            yield entry


_REMEMBERING = ("delta", "ef")  # how schemes begin that remember samples: they are not parsed here
_REFERENCES = ("ref.budget", "ref.disk")


def _may(before: Config, entry: Setting) -> bool:
    """Whether a bound of references may change: that of the disk says how many samples are
    remembered, that of RAM only where there is no disk."""
    plan, disk = before.plan, before.ref.disk
    if not any(spec.startswith(_REMEMBERING) for spec in (plan.forward, plan.backward)):
        return True
    ram_alone = disk is not None and configuration.parse_size(disk, "--ref.disk") == 0
    return entry.name == "ref.budget" and not ram_alone


def _outdated(
    values: Mapping[str, Any], given: Mapping[str, Any], world_size: int | None
) -> list[str]:
    """The settings that followed from others that are given anew, and were not given themselves."""
    nproc, stages, per_rank = "nproc", "pipeline.stages", "pipeline.stages_per_rank"
    cuts = "pipeline.cuts"
    outdated: set[str] = set()
    if given.get("link.transport", values.get("link.transport")) != values.get("link.transport"):
        outdated |= {nproc, per_rank}
    if (world_size or given.get(nproc, values.get(nproc))) != values.get(nproc):
        outdated |= {nproc, stages, per_rank, cuts}
    if stages in given:
        outdated |= {per_rank, cuts}
    if given.get(cuts) is not None:
        outdated |= {nproc, stages, per_rank}
    if per_rank in given or "pipeline.schedule" in given:
        outdated |= {stages, per_rank}
    if "train.epochs" in given:  # else the steps would go on replacing them
        outdated |= {"train.steps"}
    return sorted(outdated - set(given))
