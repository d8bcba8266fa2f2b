"""The folder of a run on each machine, and ``run.json``: which run it is, and where its parts are.

Machines share no disk. Rank 0 makes and names the folder; the first rank of every other machine
makes one of the same name there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from thinwire.store import FolderInUseError, FolderLock
from thinwire.train import check, disk, metrics, ranks
from thinwire.train.config import Config, ConfigError

_RUN = "run.json"


@dataclasses.dataclass(frozen=True)
class Home:
    """Where a run keeps its files on this machine.

    ``parts`` has the folders ``rank-<r>`` of this machine's checkpoints. ``run`` names the run,
    ``attempt`` one start of its processes; parts of two attempts never make one checkpoint.
    """

    folder: Path
    parts: Path
    run: str
    attempt: str
    local_rank: int
    resumed: bool = False

    def note(self, **values: Any) -> None:
        """Put ``values`` into this machine's ``run.json``."""
        if self.local_rank == 0:
            metrics.write_json(self.folder / _RUN, read(self.folder) | values)

    def keep(self, config: Config, steps: int) -> None:
        """Write the settings, the run's steps, and where the parts are, into this folder.

        A run that is to be longer has no summary any more: the earlier one is kept aside.
        """
        if self.local_rank != 0:
            return
        metrics.write_config(self.folder, config)
        elsewhere = [str(path) for path in self.all_parts() if path != self.folder]
        metrics.write_json(
            self.folder / _RUN, read(self.folder) | {"steps": steps, "parts": elsewhere}
        )
        summary = self.folder / metrics.SUMMARY
        if summary.exists():
            summary.rename(self.folder / f"summary-before-{steps}-steps.json")

    @contextlib.contextmanager
    def alone(self, rank: int) -> Iterator[None]:
        """Meanwhile no other process may go on with this run (collective).

        Raises the same ConfigError on all ranks where one does.
        """
        with contextlib.ExitStack() as held:

            def take() -> None:
                folders = [disk.rank_folder(self.parts, rank)]
                folders += [self.folder] if self.local_rank == 0 else []
                try:
                    for folder in folders:
                        held.callback(FolderLock(folder).release)
                except FolderInUseError as error:
                    raise ConfigError(
                        f"{error} by a run that goes on; wait until it ends, or stop it"
                    ) from None
                except OSError as error:
                    raise ConfigError(f"can't lock {folder}: {error.strerror}") from None

            _raise_first(_problem(rank, take))
            yield

    def all_parts(self) -> list[Path]:
        """Every folder of this machine in which the run has ever kept parts."""
        earlier = [Path(path) for path in read(self.folder).get("parts", [])]
        return list(dict.fromkeys([self.folder, *earlier, self.parts]))


def read(folder: Path) -> dict[str, Any]:
    """The content of ``run.json``. Raises ConfigError if ``folder`` is no run's."""
    try:
        content: dict[str, Any] = json.loads((folder / _RUN).read_text(encoding="utf-8"))
        if not _is_sound(content):
            raise ValueError
        return content
    except FileNotFoundError:
        raise ConfigError(f"{folder} is no run folder: it has no {_RUN}") from None
    except OSError as error:
        raise ConfigError(f"can't read {folder / _RUN}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{folder / _RUN} is damaged") from None


def _is_sound(content: Any) -> bool:
    """Whether all that is read of ``run.json`` has the type that it was written with."""
    return (
        isinstance(content, dict)
        and isinstance(content.get("run"), str)
        and isinstance(content.get("parts", []), list)
        and all(isinstance(path, str) and "\0" not in path for path in content.get("parts", []))
        and type(content.get("committed", 0)) is int
        and type(content.get("steps", 0)) is int
    )


def create(config: Config) -> Path:
    """Make the folder of a new run, on the machine of rank 0. Raises ConfigError."""
    folder = metrics.create_folder(config)
    found(folder)
    return folder


def found(folder: Path) -> None:
    """Make ``folder``, whose settings are there, that of a new run."""
    metrics.write_json(folder / _RUN, {"run": secrets.token_hex(8), "parts": []})


def sub_folder(home: Home, name: str, config: Config, rank: int) -> Home:
    """The home of one of several runs that are compared, below theirs (collective)."""
    folder = home.folder / name
    if rank == 0:
        folder.mkdir()
        metrics.write_config(folder, config)
        found(folder)
    return begin(config, folder, rank, home.local_rank)


def begin(config: Config, folder: Path | None, rank: int, local_rank: int) -> Home:
    """The home of a new run (collective); rank 0 has made ``folder``, others may have None.

    Raises the same ConfigError on all ranks where a machine has other files in its place.
    """
    mine = None
    if rank == 0:
        assert folder is not None
        mine = {
            "folder": str(folder),
            "run": read(folder)["run"],
            "attempt": secrets.token_hex(8),
        }
    known = ranks.gather_json(mine)[0]
    home = _home(config, Path(known["folder"]), known["run"], known["attempt"], local_rank, False)
    _raise_first(_problem(rank, lambda: _join(config, home)))
    if not config.compare:  # each run that is compared has a home of its own
        _raise_first(_problem(rank, lambda: _prepare_parts(home, rank)))
    return home


def resume(config: Config, folder: Path, rank: int, local_rank: int) -> Home:
    """The home of a run that goes on (collective); ``folder`` is on every machine.

    Raises the same ConfigError on all ranks if it isn't, or is another run's.
    """
    home = visit(config, folder, rank, local_rank)
    _raise_first(_problem(rank, lambda: _prepare_parts(home, rank)))
    return home


def visit(config: Config, folder: Path, rank: int, local_rank: int) -> Home:
    """The home of a run that is looked at, and left as it is; otherwise as ``resume``."""
    told: dict[str, Any] = {"attempt": secrets.token_hex(8)}
    try:
        told["run"] = read(folder)["run"]
    except ConfigError as error:
        told["error"] = f"rank {rank}: {error}"
    every = ranks.gather_json(told)
    _raise_first_of([one.get("error") for one in every])
    for other, one in enumerate(every):
        if one["run"] != every[0]["run"]:
            raise ConfigError(f"--resume {folder} is another run on rank {other} than on rank 0")
    return _home(config, folder, every[0]["run"], every[0]["attempt"], local_rank, True)


def _home(
    config: Config, folder: Path, run: str, attempt: str, local_rank: int, resumed: bool
) -> Home:
    parts = Path(config.checkpoint.dir) if config.checkpoint.dir else folder
    return Home(folder, parts, run, attempt, local_rank, resumed)


def _join(config: Config, home: Home) -> None:
    """Make the run's folder on this machine, unless rank 0 has made it here."""
    if home.local_rank != 0:
        return
    try:
        if read(home.folder)["run"] == home.run:
            return
    except ConfigError:
        pass
    check.check_out(dataclasses.replace(config, out=str(home.folder)))
    metrics.create_folder(dataclasses.replace(config, out=str(home.folder)))
    metrics.write_json(home.folder / _RUN, {"run": home.run, "parts": []})


def _prepare_parts(home: Home, rank: int) -> None:
    """Make this rank's folder, unless another run has it."""
    own = disk.rank_folder(home.parts, rank)
    if not home.resumed and disk.step_folders(own):
        raise ConfigError(
            f"--checkpoint.dir {home.parts} holds checkpoints of another run in {own.name}; "
            "name a new folder"
        )
    try:
        disk.prepare(own)
    except OSError as error:
        raise ConfigError(f"can't keep checkpoints in {own}: {error.strerror}") from None


def _problem(rank: int, do: Callable[[], None]) -> str | None:
    """What is wrong on this rank, if ``do`` finds something."""
    try:
        do()
        return None
    except ConfigError as error:
        return f"rank {rank}: {error}"


def _raise_first(problem: str | None) -> None:
    """Raise the first problem that any rank has, on all of them (collective)."""
    _raise_first_of(ranks.gather_json(problem))


def _raise_first_of(problems: list[str | None]) -> None:
    problem = next((p for p in problems if p), None)
    if problem:
        raise ConfigError(problem)
