"""``thinwire inspect``: what a run folder tells of a run that goes on, was ended, or is complete.

It reads what is on this machine and starts no process. Every file of every checkpoint is compared
with its digest.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire.counters import LinkCounters, link_name
from thinwire.store import is_held
from thinwire.train import config as configuration
from thinwire.train import disk, home, metrics, report, spelling, storage
from thinwire.train.checkpoint import key_of
from thinwire.train.config import Config, ConfigError
from thinwire.train.stop import resume_command
from thinwire.train.words import counted


def inspect(folder: Path, as_json: bool) -> int:
    """Show what is known of the run in ``folder``; returns the exit code. Raises ConfigError."""
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; name the folder of a run")
    document = describe(folder)
    screen = report.console(to_stderr=False)
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        _show(document, screen)
    return 0


def describe(folder: Path) -> dict[str, Any]:
    """What the run folder and the parts on this machine tell, as JSON values; see docs/train.md."""
    known = home.read(folder)
    config = configuration.build(spelling.read_toml(folder / metrics.CONFIG))
    if config.compare:
        raise ConfigError(
            f"{folder} holds compared runs; inspect one of them, as {folder / 'compressed'}"
        )
    parts = list(dict.fromkeys([folder, *map(Path, known.get("parts", []))]))
    states, intact = _parts(parts, known["run"])
    newest = _newest_complete(intact)
    links = _links(newest)
    trained = [one["step"] for one in metrics.read_metrics(folder) if "loss" in one]
    saved = [part.manifest["step"] for part in intact]
    return {
        "folder": str(folder),
        "run": known["run"],
        "running": any(map(is_held, [folder, *_rank_folders(parts)])),
        "complete": (folder / metrics.SUMMARY).exists(),
        "step": max([0, *trained, *saved]),
        "steps": known.get("steps"),
        "plan": {"forward": config.plan.forward, "backward": config.plan.backward},
        **_shape(config),
        "resumable_step": newest[0].manifest["step"] if newest else None,
        "checkpoints": states,
        "references": _references(newest, links),
        "reference_files": _reference_files(parts),
        "links": links,
        "versions": newest[0].manifest["versions"] if newest else None,
    }


def _rank_folders(parts: Iterable[Path]) -> list[Path]:
    return [own for folder in parts for own in disk.rank_folders(folder).values()]


def _shape(config: Config) -> dict[str, Any]:
    pipeline = config.pipeline
    return {
        "schedule": pipeline.schedule,
        "stages": pipeline.stages,
        "processes": config.nproc,
        "microbatches": pipeline.microbatches,
        "transport": config.link.transport,
    }


def _parts(folders: Iterable[Path], run: str) -> tuple[list[dict[str, Any]], list[disk.Part]]:
    """The state of every part on this machine, and those that are intact."""
    states: list[dict[str, Any]] = []
    intact: list[disk.Part] = []
    for parts in folders:
        for rank, ranks_own in disk.rank_folders(parts).items():
            for step, path in disk.step_folders(ranks_own).items():
                state = _state(path, run, intact)
                if path.exists():  # a run that goes on has just deleted it
                    states.append({"rank": rank, "step": step, **state})
            states += [
                {"rank": rank, "step": None, "state": "partial", "why": left.name}
                for left in disk.unfinished(ranks_own)
            ]
    return states, intact


def _state(path: Path, run: str, intact: list[disk.Part]) -> dict[str, Any]:
    """Whether a part is complete, or what is wrong; an intact one is added to ``intact``."""
    try:
        part = disk.read(path)
        disk.verify(part)
    except disk.DamagedError as error:
        return {"state": "damaged", "why": str(error)}
    if part.manifest["run"] != run:
        return {"state": "damaged", "why": "it is another run's"}
    intact.append(part)
    return {
        "state": "complete",
        "bytes": part.nbytes,
        "processes": part.manifest["world_size"],
        "references": sum(one["keys"] for one in part.manifest["pipeline"]["references"]),
    }


def _newest_complete(intact: Sequence[disk.Part]) -> list[disk.Part]:
    """The parts, by rank, of the newest checkpoint of which all are on this machine."""
    found: dict[Any, dict[int, disk.Part]] = {}
    for part in intact:
        found.setdefault(key_of(part), {})[part.manifest["rank"]] = part
    complete = [key for key, parts in found.items() if len(parts) == key.world_size]
    return [part for _, part in sorted(found[max(complete)].items())] if complete else []


def _links(parts: Sequence[disk.Part]) -> list[dict[str, Any]]:
    """The counters of all links, as in a summary."""
    reports = []
    for part in parts:
        for saved in part.manifest["pipeline"]["counters"]:
            if saved["edge"] >= 0 and saved["training"]["messages"]:
                counters = LinkCounters(saved["edge"], saved["direction"], saved["codec"])
                counters.add(saved)
                reports.append(counters.report())
    return sorted(reports, key=lambda one: (one["edge"], one["direction"] != "forward"))


def _references(
    parts: Sequence[disk.Part], links: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The references of all ends of links, with the share of values that met one: ``hits``."""
    shares = {(link["edge"], link["direction"]): link["hit_rate"] for link in links}
    return [
        {
            "rank": part.manifest["rank"],
            **{name: one[name] for name in _SHOWN},
            "hits": shares.get((one["edge"], one["direction"])),
        }
        for part in parts
        for one in part.manifest["pipeline"]["references"]
    ]


_SHOWN = ("edge", "direction", "role", "scheme", "keys", "bytes", "precision")


def _reference_files(parts: Iterable[Path]) -> list[dict[str, Any]]:
    """The files on this machine in which all checkpoints of a rank have their references."""
    found = []
    for folder in parts:
        for rank, ranks_own in disk.rank_folders(folder).items():
            sizes = []
            for file in storage.row_files(ranks_own / disk.REFERENCES):
                with contextlib.suppress(FileNotFoundError):  # a run that ends has just deleted it
                    sizes.append(file.stat().st_size)
            if sizes:
                found.append({"rank": rank, "files": len(sizes), "bytes": sum(sizes)})
    return found


def _show(document: Mapping[str, Any], screen: Console) -> None:
    def line(text: str) -> None:
        screen.print(text, soft_wrap=True, markup=False)

    steps = document["steps"]
    line(f"run {document['run']} in {document['folder']}")
    state = "complete" if document["complete"] else "not complete"
    state += ", a process is at work on it" if document["running"] else ""
    line(
        f"progress: step {document['step']:,} of {'?' if steps is None else f'{steps:,}'}, {state}"
    )
    plan = document["plan"]
    line(
        f"plan: forward {plan['forward']}, backward {plan['backward']}; "
        f"{counted(document['stages'], 'stage')} on {counted(document['processes'], 'process')}, "
        f"{document['schedule']}, {counted(document['microbatches'], 'micro-batch')}, "
        f"{document['transport']}"
    )
    if document["versions"]:
        line("versions: " + ", ".join(f"{n} {v}" for n, v in document["versions"].items()))
    if document["checkpoints"]:
        screen.print(_checkpoint_table(document["checkpoints"]))
    if document["references"]:
        screen.print(_reference_table(document["references"]))
    if files := document["reference_files"]:
        sizes = ", ".join(f"rank {one['rank']} {storage.bytes_text(one['bytes'])}" for one in files)
        line(f"references on disk, beside the checkpoints: {sizes}")
    if document["links"]:
        screen.print(report.link_table(document["links"]))
    over = document["complete"] or document["running"]
    if document["resumable_step"] is not None and not over:
        command = resume_command(Path(document["folder"]))
        line(f"goes on after step {document['resumable_step']:,} with: {command}")


def _checkpoint_table(states: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each part that is on this machine."""
    table = report.new_table("Checkpoints on this machine", "step")
    for heading in ("rank", "MB", "references"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for one in states:
        table.add_row(
            "–" if one["step"] is None else f"{one['step']:,}",
            str(one["rank"]),
            f"{one['bytes'] / 1e6:.2f}" if "bytes" in one else "–",
            f"{one['references']:,}" if "references" in one else "–",
            one["state"] if "why" not in one else f"{one['state']}: {one['why']}",
        )
    return table


def _reference_table(references: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each end of a link that remembers samples."""
    table = report.new_table("References", "link")
    for heading in ("rank", "samples", "MB", "precision", "hits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in references:
        table.add_row(
            f"{link_name(one['edge'], one['direction'])}, {one['role']}",
            str(one["rank"]),
            f"{one['keys']:,}",
            f"{one['bytes'] / 1e6:.2f}",
            one["precision"],
            "–" if one["hits"] is None else f"{100 * one['hits']:.0f} %",
        )
    return table
