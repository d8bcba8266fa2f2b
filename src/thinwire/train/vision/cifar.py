"""CIFAR-10 and CIFAR-100 in their authors' binary version: a byte or two of labels, then 3x32x32.

The Python version is pickled, and no pickle is ever loaded here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from thinwire.train.config import ConfigError
from thinwire.train.vision.parts import Found, Part, check_memory, unreadable

_SHAPE = (3, 32, 32)
_VALUES = 3 * 32 * 32
_BATCH = re.compile(r"data_batch_(\d+)\.bin")


def find(folder: Path) -> bool:
    """Whether ``folder`` has files of the binary version."""
    return bool(_batches(folder)) or (folder / "train.bin").is_file()


def is_pickled(folder: Path) -> bool:
    """Whether ``folder`` has files of the Python version."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    return "data_batch_1" in names or "batches.meta" in names or {"train", "meta"} <= names


def _batches(folder: Path) -> dict[int, Path]:
    found = {int(m[1]): p for p in folder.iterdir() if (m := _BATCH.fullmatch(p.name))}
    return dict(sorted(found.items()))


def load(folder: Path) -> Found:
    """The images in ``folder``, those of CIFAR-100 by their fine labels. Raises ConfigError."""
    batches = _batches(folder)
    if not batches:
        return _found([folder / "train.bin"], folder / "test.bin", label_bytes=2, classes=100)
    for number in range(1, max(batches)):
        if number not in batches:
            raise ConfigError(f"--data.path: {folder} has no data_batch_{number}.bin")
    train = list(batches.values())
    return _found(train, folder / "test_batch.bin", label_bytes=1, classes=10)


def _found(train: Sequence[Path], test: Path, label_bytes: int, classes: int) -> Found:
    paths = [*train, test] if test.exists() else train
    check_memory(sum(_size(path) for path in paths), test.parent)
    parts = [_read(path, label_bytes, classes) for path in paths]
    trained = parts[: len(train)]
    return Found(
        Part(
            torch.cat([part.pixels for part in trained]),
            torch.cat([part.labels for part in trained]),
        ),
        parts[-1] if len(parts) > len(trained) else None,
        classes,
    )


def _size(path: Path) -> int:
    try:
        if not path.is_file():
            raise ConfigError(f"--data.path: {path} is no file")
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from None


def _read(path: Path, label_bytes: int, classes: int) -> Part:
    record = label_bytes + _VALUES
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    if not content or len(content) % record:
        raise ConfigError(
            f"--data.path: {path} has {len(content):,} bytes, not a multiple of the {record:,} of "
            "an image with its label"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, record)
    labels = records[:, label_bytes - 1].long()
    if int(labels.max()) >= classes:
        at = int(labels.argmax())
        raise ConfigError(
            f"--data.path: {path} has label {int(labels[at])} at image {at}; there are {classes} "
            "classes, from 0"
        )
    return Part(records[:, label_bytes:].reshape(-1, *_SHAPE), labels)
