"""The files of a run folder: ``config.toml``, ``metrics.jsonl`` and ``summary.json``."""

from __future__ import annotations

import datetime
import json
import os
import re
from pathlib import Path
from typing import Any

from thinwire.train.config import Config, ConfigError
from thinwire.train.spelling import to_toml

CONFIG, METRICS, SUMMARY = "config.toml", "metrics.jsonl", "summary.json"


def create_folder(config: Config) -> Path:
    """Make the run folder and write the settings there, which claims it for this run.

    Without ``--out`` it is a new one under ``runs/``, named by time and plan. Raises ConfigError
    where another run has claimed it.
    """
    if config.out is not None:
        folder = Path(config.out)
        if not _claimed(folder, config):
            raise ConfigError(f"--out {folder} is in use by another run; name a new folder")
        return folder
    plan = re.sub(r"[^a-z0-9]+", "-", f"{config.plan.forward} {config.plan.backward}").strip("-")
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{now}-{plan[:40]}"
    folder = Path("runs") / name
    attempt = 1
    while folder.exists() or not _claimed(folder, config):
        attempt += 1
        folder = Path("runs") / f"{name}-{attempt}"
    return folder


def _claimed(folder: Path, config: Config) -> bool:
    """Whether the folder is now this run's: only one run can be the first to write a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / CONFIG).open("x", encoding="utf-8") as file:
            file.write(to_toml(config))
        return True
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"can't make the run folder {folder}: {error.strerror}") from None


def write_atomically(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write ``document`` as indented JSON, atomically; NaN and infinities are refused."""
    write_atomically(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def write_config(folder: Path, config: Config) -> None:
    """Write the resolved settings; ``thinwire train folder/config.toml`` repeats the run."""
    write_atomically(folder / CONFIG, to_toml(config))


class MetricsWriter:
    """Appends one JSON object a line to ``metrics.jsonl``; each line is complete on disk.

    ``done``: the steps that a resumed run has done; lines of later ones are taken out.
    """

    def __init__(self, folder: Path, done: int = 0) -> None:
        path = folder / METRICS
        kept = [record for record in read_metrics(folder) if record["step"] <= done]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Have all lines on the disk before going on."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of ``metrics.jsonl``, without lines that were cut off or damaged."""
    try:
        text = (folder / METRICS).read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, IsADirectoryError):
        return []
    records = (_record(line) for line in text.split("\n"))
    return [record for record in records if record is not None]


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # it was being written when the process was ended
        return None
    return record if _is_sound(record) else None


def _is_sound(record: Any) -> bool:
    """Whether a line has what is read of it."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return False
    saved = record.get("checkpoint", {"bytes": 0, "seconds": 0.0})
    return isinstance(saved, dict) and all(
        isinstance(saved.get(name), int | float) for name in ("bytes", "seconds")
    )
