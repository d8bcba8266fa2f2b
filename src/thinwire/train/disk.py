"""One rank's part of a checkpoint on disk: a folder that appears whole, and is checked when read.

A part is ``<rank folder>/step-00000200/``. It is written under a temporary name; its files and
folders are flushed to the disk, then it is renamed. ``manifest.json`` says what it holds, with the
size and the digest of each file, and has a digest of its own, so that damage is always noticed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from thinwire.train.manifest import fault

FORMAT = 1  # of the manifest
MANIFEST = "manifest.json"
REFERENCES = "references"  # in a rank's folder: rows that its parts name
_STEP = re.compile(r"step-(\d{8,})")
_RANK = re.compile(r"rank-(\d+)")
_CHUNK = 1 << 20  # bytes read at a time


class DamagedError(ValueError):
    """A part that is not what was written; the text says what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part whose manifest is intact; its files are checked by ``verify``."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of its files, the manifest left out."""
        return sum(file["bytes"] for file in self.manifest["files"].values())


def rank_folder(home: Path, rank: int) -> Path:
    """Where a rank keeps its parts: only that rank writes there."""
    return home / f"rank-{rank}"


def rank_folders(home: Path) -> dict[int, Path]:
    """The folders of ranks that are on this machine, by rank."""
    if not home.is_dir():
        return {}
    found = {int(m[1]): path for path in home.iterdir() if (m := _RANK.fullmatch(path.name))}
    return dict(sorted(found.items()))


def step_folders(ranks_own: Path) -> dict[int, Path]:
    """The parts in a rank's folder by step, oldest first, whether they are intact or not."""
    if not ranks_own.is_dir():
        return {}
    found = {int(m[1]): path for path in ranks_own.iterdir() if (m := _STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


def _name_of(step: int) -> str:
    return f"step-{step:08d}"


def unfinished(ranks_own: Path) -> list[Path]:
    """What a process that was ended has left half written or half deleted."""
    return sorted(ranks_own.glob(".step-*")) if ranks_own.is_dir() else []


def prepare(ranks_own: Path) -> None:
    """Make a rank's folder, so that the parts in it will be found. Raises OSError."""
    ranks_own.mkdir(parents=True, exist_ok=True)
    for folder in (ranks_own, *ranks_own.absolute().parents[:2]):
        _flush(folder)


def write(ranks_own: Path, step: int, fill: Callable[[Path], dict[str, Any]]) -> Part:
    """Write the part of ``step``: ``fill`` puts files into a folder, and returns the manifest's
    values. A part of the same step is replaced.
    """
    for left in unfinished(ranks_own):
        _remove(left)
    name = _name_of(step)
    temporary, target = ranks_own / f".{name}", ranks_own / name
    temporary.mkdir()
    values = fill(temporary)
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    described = {
        path.relative_to(temporary).as_posix(): {
            "bytes": path.stat().st_size,
            "xxh3": _digest(path),
        }
        for path in files
    }
    manifest = {"format": FORMAT, "step": step, **values, "files": described}
    text = json.dumps({"xxh3": _digest_of(manifest), "manifest": manifest}, allow_nan=False)
    (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
    for path in [*files, temporary / MANIFEST, *{path.parent for path in files}, temporary]:
        _flush(path)
    if os.path.lexists(target):
        delete(target)
    temporary.rename(target)
    _flush(ranks_own)
    return Part(target, manifest)


def delete(folder: Path) -> None:
    """Delete a part; ended half way, it leaves nothing that looks like one."""
    hidden = folder.with_name(f".{folder.name}.deleted")
    if os.path.lexists(hidden):
        _remove(hidden)
    folder.rename(hidden)
    _remove(hidden)


def _remove(path: Path) -> None:
    """Delete a folder, or what somebody has put in its place; a link, not what it leads to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def read(folder: Path) -> Part:
    """The part in ``folder`` by its manifest. Raises DamagedError where that is not intact."""
    try:
        if not _may_be_read(folder / MANIFEST):
            raise DamagedError(f"{MANIFEST} is no file")
        document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        manifest, digest = document["manifest"], document["xxh3"]
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise DamagedError(f"{MANIFEST} can't be read: {error.strerror}") from None
    except DamagedError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{MANIFEST} is damaged") from None
    if not isinstance(manifest, dict) or digest != _digest_of(manifest):
        raise DamagedError(f"{MANIFEST} is damaged: its digest differs")
    if manifest.get("format") != FORMAT:
        raise DamagedError(f"its format is {manifest.get('format')}, this thinwire reads {FORMAT}")
    if (why := fault(manifest)) is not None:
        raise DamagedError(f"{MANIFEST} is damaged: {why}")
    if folder.name != _name_of(manifest["step"]):
        raise DamagedError(f"{MANIFEST} is that of step {manifest['step']}")
    return Part(folder, manifest)


def verify(part: Part) -> None:
    """Compare every file with the manifest, byte for byte by its digest. Raises DamagedError."""
    for name, expected in part.manifest["files"].items():
        path = part.folder / name
        try:
            if not _may_be_read(path):
                raise DamagedError(f"{name} is no file")
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise DamagedError(f"{name} has {size} bytes, not {expected['bytes']}")
            if _digest(path) != expected["xxh3"]:
                raise DamagedError(f"{name} is damaged: its digest differs")
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        except OSError as error:
            raise DamagedError(f"{name} can't be read: {error.strerror}") from None


def parts(ranks_own: Path) -> Iterator[Part]:
    """The parts in a rank's folder whose manifest is intact, oldest first."""
    for folder in step_folders(ranks_own).values():
        try:
            yield read(folder)
        except DamagedError:
            continue


def _may_be_read(path: Path) -> bool:
    """Whether there is an end to it: a pipe would be waited for."""
    return stat.S_ISREG(path.stat().st_mode)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _digest_of(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def _flush(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
