"""Images in a folder for each class, PNG and JPEG, read by Pillow where it is installed.

With ``train`` and perhaps ``test`` above the classes, those below ``test`` are tested on.
"""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.train.config import ConfigError
from thinwire.train.vision.parts import Found, Part, check_memory, unreadable
from thinwire.train.words import one_line

_PARTS = ("train", "test")
_SUFFIXES = (".png", ".jpg", ".jpeg")
_GRAY = ("1", "L", "LA")  # modes of Pillow; all others are read as RGB
_WIDE = ("I", "F")  # their values have more than 8 bits
_ORIENTATION, _ON_ITS_SIDE = 0x112, (5, 6, 7, 8)  # of EXIF
_MOST_PIXELS = 1 << 26  # of an image; a small file may claim any number


def find(folder: Path) -> bool:
    """Whether ``folder`` has sub-folders."""
    return bool(_folders(folder))


def load(folder: Path, size: int | None) -> Found:
    """The images in ``folder``; each gets ``size`` pixels a side, if it is given.

    Resizing keeps the proportions: the middle of the image is cut out, then scaled (bilinear).
    Raises ConfigError of one line.
    """
    pillow = _Pillow(size)
    skipped: Counter[str] = Counter()
    roots = _parts(folder)
    classes = [path.name for path in _folders(roots[0])]
    if len(classes) < 2:
        raise ConfigError(
            f"--data.path: {roots[0]} has {len(classes)} folders of images; one for each of two "
            "classes or more is needed"
        )
    files = [list(_files(root, classes, skipped)) for root in roots]
    seen = {label for _, label in files[0]}
    empty = [roots[0] / name for label, name in enumerate(classes) if label not in seen]
    for path in [*empty, *(root for root, found in zip(roots, files, strict=True) if not found)]:
        raise ConfigError(f"--data.path: {path} has no PNG or JPEG")
    every = [path for found in files for path, _ in found]
    grays = [pillow.is_gray(path) for path in every]
    gray = all(grays)
    height, width = pillow.common
    shape = (1 if gray else 3, height, width)
    check_memory(len(every) * shape[0] * height * width, folder)
    parts = []
    for found in files:
        pixels = torch.empty((len(found), *shape), dtype=torch.uint8)
        for row, (path, _) in enumerate(found):
            pixels[row] = pillow.read(path, gray)
        parts.append(Part(pixels, torch.tensor([label for _, label in found])))
    return Found(parts[0], parts[1] if len(parts) > 1 else None, len(classes), skipped)


def _folders(folder: Path) -> list[Path]:
    entries = folder.iterdir()
    return sorted(path for path in entries if path.is_dir() and not path.name.startswith("."))


def _parts(folder: Path) -> list[Path]:
    """Where the classes to train on are, and those to test on: a class may be called ``train``."""
    names = [path.name for path in _folders(folder)]
    if "train" not in names or not _folders(folder / "train"):
        return [folder]
    if others := [name for name in names if name not in _PARTS]:
        raise ConfigError(
            f"--data.path: {folder} has {others[0]} beside train; only train and test are read, so "
            "move it elsewhere"
        )
    return [folder / name for name in _PARTS if name in names]


def _files(root: Path, classes: list[str], skipped: Counter[str]) -> Iterator[tuple[Path, int]]:
    """The images of each class in order, with its number; others are counted by the reason."""
    for path in _folders(root):
        if path.name not in classes:
            raise ConfigError(f"--data.path: {path} is a class that is not trained on")
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            if any(part.startswith(".") for part in file.relative_to(root).parts):
                skipped["hidden"] += 1
            elif file.suffix.lower() in _SUFFIXES:
                yield file, classes.index(path.name)
            else:
                skipped["no PNG or JPEG"] += 1


class _Pillow:
    """Pillow, and the one size that all images have."""

    def __init__(self, size: int | None) -> None:
        try:
            self._image: Any = importlib.import_module("PIL.Image")
            self._operations: Any = importlib.import_module("PIL.ImageOps")
        except ImportError:
            raise ConfigError(
                "--data.path: a folder of PNG or JPEG needs Pillow, which is not installed; pip "
                "install pillow"
            ) from None
        self._size = size
        self.common = (0, 0) if size is None else (size, size)

    def _open(self, path: Path) -> Any:
        return self._image.open(path, formats=("PNG", "JPEG"))

    def is_gray(self, path: Path) -> bool:
        """Whether an image is gray, by its header, whose size is checked."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its size, which is bounded here
            try:
                with self._open(path) as image:
                    width, height = image.size
                    mode = image.mode
                    fits = width * height <= _MOST_PIXELS  # of some, what follows reads the pixels
                    if fits and image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
                        width, height = height, width
            except self._image.DecompressionBombError:
                width = height = _MOST_PIXELS
            except Exception as error:  # noqa: BLE001  Pillow raises many kinds for junk
                raise _damaged(path, error) from None
        if width * height > _MOST_PIXELS:
            raise ConfigError(f"--data.path: {path} claims more than {_MOST_PIXELS:,} pixels")
        if mode.startswith(_WIDE):
            raise ConfigError(f"--data.path: {path} has more than 8 bits a value; convert it")
        if self._size is None and self.common not in ((0, 0), (height, width)):
            before = "×".join(map(str, self.common))
            raise ConfigError(
                f"--data.path: {path} is {height}×{width}, others are {before}; set --data.size, "
                "as 32"
            )
        if self._size is None:
            self.common = height, width
        return mode in _GRAY

    def read(self, path: Path, gray: bool) -> Tensor:
        """The pixels of an image, uint8 ``[channels, height, width]``."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with self._open(path) as image:
                    image = self._operations.exif_transpose(image).convert("L" if gray else "RGB")
            except Exception as error:  # noqa: BLE001  Pillow raises many kinds for junk
                raise _damaged(path, error) from None
        if self._size is not None:
            bilinear = self._image.Resampling.BILINEAR
            image = self._operations.fit(image, (self._size, self._size), bilinear)
        values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        height, width = self.common
        return values.view(height, width, -1).permute(2, 0, 1)


def _damaged(path: Path, error: Exception) -> ConfigError:
    if isinstance(error, OSError) and error.errno is not None:
        return unreadable(path, error)
    return ConfigError(f"--data.path: {path} is damaged: {one_line(error)}")
