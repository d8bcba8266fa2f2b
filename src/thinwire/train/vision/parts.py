"""Images as their files have them, and what any of them may take of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from thinwire.train.config import ConfigError
from thinwire.train.size import physical_memory


@dataclass(frozen=True)
class Part:
    """``pixels`` uint8 ``[images, channels, height, width]`` and ``labels`` int64 ``[images]``."""

    pixels: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Found:
    """What a folder holds: images to train and perhaps to test on, of so many classes.

    ``skipped``: why files were left out, and how many.
    """

    train: Part
    test: Part | None
    classes: int
    skipped: Mapping[str, int] = field(default_factory=dict)


def check_memory(nbytes: int, path: Path) -> None:
    """Refuse images of which this machine cannot hold so many bytes, before they are read."""
    memory = physical_memory()
    if memory is not None and nbytes > memory:
        raise ConfigError(
            f"--data.path: the images in {path} take {nbytes / 1e9:,.1f} GB, but this machine has "
            f"{memory / 1e9:,.1f} GB; all of them are held in memory"
        )


def unreadable(path: Path, error: OSError) -> ConfigError:
    """The line for a file that the system doesn't let us read."""
    return ConfigError(f"--data.path: can't read {path}: {error.strerror or error}")
