"""Which checkpoint a resumed run goes on from: the newest one whose parts are all intact.

Each rank looks at the parts that are on its machine, and tells the others what it sees; nobody
reads another machine's disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from thinwire.train import disk, ranks
from thinwire.train.checkpoint import Key, key_of
from thinwire.train.config import ConfigError
from thinwire.train.home import Home, read

Fits = Callable[[Mapping[str, Any]], bool]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A complete checkpoint, and what this rank has of it.

    ``same``: every rank has its own part of it, with the stages that it holds now; that is then
    the only one in ``parts``. Else ``parts`` has all intact ones that this rank sees, by writer.
    """

    key: Key
    same: bool
    parts: dict[int, disk.Part]


@dataclasses.dataclass(frozen=True)
class _Sight:
    """What one rank sees: checkpoints, each with the parts that are there, and damaged parts."""

    parts: dict[Key, dict[int, disk.Part]]
    damaged: list[str]

    def told(self, rank: int, fits: Fits) -> dict[str, Any]:
        """It as JSON values: for each checkpoint the writers, and whether this rank's part fits."""
        return {
            "seen": [
                [key, sorted(by_writer), rank in by_writer and fits(by_writer[rank].manifest)]
                for key, by_writer in self.parts.items()
            ],
            "damaged": self.damaged,
        }


def choose(home: Home, rank: int, world_size: int, fits: Fits) -> tuple[Choice | None, list[str]]:
    """The newest checkpoint that is complete, and lines on newer ones that are not (collective).

    ``fits``: whether a manifest is that of the stages that this rank holds now. None where there
    has not been one. Raises ConfigError where there has, and none is complete.
    """
    sight = look(home)
    every = ranks.gather_json(
        {**sight.told(rank, fits), "committed": read(home.folder).get("committed", 0)}
    )
    lines = [f"{line}, so it is skipped" for line in _distinct(every, "damaged")]
    seers: dict[Key, dict[int, set[int]]] = {}  # by checkpoint and writer, the ranks that see it
    fitting: dict[Key, int] = {}
    for seer, one in enumerate(every):
        for key, writers, does_fit in one["seen"]:
            fitting[Key(*key)] = fitting.get(Key(*key), 0) + does_fit
            for writer in writers:
                seers.setdefault(Key(*key), {}).setdefault(writer, set()).add(seer)
    for key in sorted(seers, reverse=True):
        if lacking := sorted(set(range(key.world_size)) - set(seers[key])):
            missing = ", ".join(f"rank-{writer}" for writer in lacking)
            lines.append(f"step {key.step} is skipped: there is no part of {missing}")
            continue
        same = key.world_size == world_size and fitting[key] == world_size
        parts, is_complete, damaged = _verified(sight.parts.get(key, {}), key, rank, same)
        lines += [f"{line}, so it is skipped" for line in damaged]
        if is_complete:
            return Choice(key, same, parts), lines
    committed = max(one["committed"] for one in every)
    if committed:
        raise ConfigError(
            f"{home.folder}: no checkpoint is complete on the machines of this run, "
            f"though step {committed} was; {'; '.join(lines) or 'no part is here'}"
        )
    return None, lines


def look(home: Home) -> _Sight:
    """What of this run is on this machine, by the manifests alone."""
    parts: dict[Key, dict[int, disk.Part]] = {}
    damaged = []
    for folder in _step_folders(home.all_parts()):
        try:
            part = disk.read(folder)
        except disk.DamagedError as error:
            damaged.append(f"{folder.parent.name}/{folder.name}: {error}")
            continue
        if part.manifest["run"] == home.run:
            parts.setdefault(key_of(part), {})[part.manifest["rank"]] = part
    return _Sight(parts, damaged)


def _step_folders(homes: list[Path]) -> Iterator[Path]:
    for home in homes:
        for ranks_own in disk.rank_folders(home).values():
            yield from disk.step_folders(ranks_own).values()


def _verified(
    seen: dict[int, disk.Part], key: Key, rank: int, same: bool
) -> tuple[dict[int, disk.Part], bool, list[str]]:
    """This rank's intact parts, whether all ranks have all of them, and lines on damaged ones."""
    intact, damaged = {}, []
    for writer, part in seen.items():
        if same and writer != rank:
            continue  # its own rank reads it
        try:
            disk.verify(part)
            intact[writer] = part
        except disk.DamagedError as error:
            damaged.append(f"{part.folder.parent.name}/{part.folder.name}: {error}")
    every = ranks.gather_json({"intact": sorted(intact), "damaged": damaged})
    found = {writer for one in every for writer in one["intact"]}
    return intact, len(found) == key.world_size, _distinct(every, "damaged")


def _distinct(every: list[dict[str, Any]], name: str) -> list[str]:
    """The lines of all ranks, each once: ranks of one machine see the same."""
    return list(dict.fromkeys(line for one in every for line in one[name]))
