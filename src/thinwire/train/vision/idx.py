"""IDX files, in which MNIST and Fashion-MNIST come: images and labels as unsigned bytes.

A file is two zero bytes, the type of its values, the number of its dimensions, each dimension as 32
bits with the largest byte first, and the values; it may be compressed by gzip. Nothing of it is
trusted: what is read is bounded by what the header says, and that by what the file can hold.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from thinwire.train.config import ConfigError
from thinwire.train.vision.parts import Found, Part, check_memory, unreadable

_NAME = re.compile(r"(?:(.+)-)?(images|labels)[-.]idx[13]-ubyte(?:\.gz)?")
_UNSIGNED_BYTE = 8
_MOST_INFLATED = 1032  # bytes that one of gzip's can stand for
_TEST = ("t10k", "test")


def find(folder: Path) -> dict[str, dict[str, Path]]:
    """The files of images and labels in ``folder``, by what precedes these words in their names."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):  # a compressed one comes after the plain one
        if match := _NAME.fullmatch(path.name):
            found.setdefault(match[1] or "", {}).setdefault(match[2], path)
    return found


def load(folder: Path, files: dict[str, dict[str, Path]]) -> Found:
    """The images of ``files``, as ``find`` gives them. Raises ConfigError of one line."""
    for pair in files.values():
        if lacking := {"images", "labels"} - pair.keys():
            (there,), (what,) = pair.values(), lacking
            raise ConfigError(f"--data.path: {folder} has {there.name}, but no {what} beside it")
    tested = [prefix for prefix in files if prefix.rpartition("-")[2] in _TEST]
    trained = [prefix for prefix in files if prefix not in tested]
    if len(trained) != 1 or len(tested) > 1:
        names = ", ".join(sorted(pair["images"].name for pair in files.values()))
        raise ConfigError(
            f"--data.path: {folder} has {names}; name a folder with one file of images to train "
            "on, and at most one to test on, as t10k-images-idx3-ubyte"
        )
    train = _part(files[trained[0]])
    test = _part(files[tested[0]]) if tested else None
    classes = int(train.labels.max()) + 1
    if test is not None:
        _check_test(folder, train, test, classes)
    return Found(train, test, classes)


def _check_test(folder: Path, train: Part, test: Part, classes: int) -> None:
    """Refuse test images of another shape, or of classes that are not trained on."""
    if test.pixels.shape[1:] != train.pixels.shape[1:]:
        sizes = ["×".join(map(str, part.pixels.shape[2:])) for part in (train, test)]
        raise ConfigError(f"--data.path: {folder} trains on {sizes[0]} and tests on {sizes[1]}")
    highest = int(test.labels.max())
    if highest >= classes:
        raise ConfigError(
            f"--data.path: {folder} has label {highest} in its test part, but labels from 0 to "
            f"{classes - 1} to train on"
        )


def _part(pair: dict[str, Path]) -> Part:
    pixels, labels = read(pair["images"], 3), read(pair["labels"], 1)
    if len(pixels) != len(labels):
        raise ConfigError(
            f"--data.path: {pair['images']} has {len(pixels):,} images, but {pair['labels']} "
            f"{len(labels):,} labels"
        )
    return Part(pixels[:, None], labels.long())


def read(path: Path, dimensions: int) -> Tensor:
    """The values of a file with so many dimensions, uint8. Raises ConfigError of one line."""
    try:
        if not path.is_file():
            raise ConfigError(f"--data.path: {path} is no file")
        most = path.stat().st_size * (_MOST_INFLATED if path.suffix == ".gz" else 1)
        with _opened(path) as file:
            shape = _shape(file.read(4 + 4 * dimensions), dimensions, path)
            count = math.prod(shape)
            if not count:
                raise ConfigError(f"--data.path: {path} is empty: its header says {shape}")
            if count > most:
                raise _short(path, shape)
            check_memory(count, path)
            values = file.read(count + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"--data.path: {path} is damaged: {error}") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if len(values) < count:
        raise _short(path, shape)
    if len(values) > count:
        raise ConfigError(f"--data.path: {path} goes on after the {shape} of its header")
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).view(shape)


def _opened(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _shape(head: bytes, dimensions: int, path: Path) -> tuple[int, ...]:
    wanted = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if head[:4] != wanted:
        raise ConfigError(
            f"--data.path: {path} begins with {head[:4].hex(' ') or 'nothing'}, not with "
            f"{wanted.hex(' ')}, as an IDX file of unsigned bytes in {dimensions} dimensions"
        )
    sizes = [head[at : at + 4] for at in range(4, 4 + 4 * dimensions, 4)]
    if any(len(size) < 4 for size in sizes):
        raise ConfigError(f"--data.path: {path} ends within its header")
    return tuple(int.from_bytes(size, "big") for size in sizes)


def _short(path: Path, shape: tuple[int, ...]) -> ConfigError:
    return ConfigError(f"--data.path: {path} is cut off: its header says {shape}")
