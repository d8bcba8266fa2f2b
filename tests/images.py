"""Tiny images in the formats in which real ones come."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def labelled(count: int, classes: int = 3, size: int = 8, seed: int = 0) -> tuple[Bytes, Bytes]:
    """Images ``[count, size, size]`` in noise, each with a bright row that tells its label."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count, dtype=np.uint8) % classes
    pixels = generator.integers(0, 120, (count, size, size), dtype=np.uint8)
    pixels[np.arange(count), labels * 2] += 130
    return pixels, labels


def idx_bytes(values: Bytes) -> bytes:
    """An IDX file of unsigned bytes."""
    sizes = b"".join(n.to_bytes(4, "big") for n in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()


def write_idx(folder: Path, prefix: str, pixels: Bytes, labels: Bytes, ending: str = "") -> None:
    """The two files of a part; ``ending``: ``.gz`` compresses them."""
    folder.mkdir(exist_ok=True)
    for name, values in (("images-idx3", pixels), ("labels-idx1", labels)):
        content = idx_bytes(values)
        path = folder / f"{prefix}{name}-ubyte{ending}"
        path.write_bytes(gzip.compress(content) if ending else content)


def idx_in(folder: Path, train: int = 50, test: int = 8) -> str:
    """A folder of tiny images as MNIST's; returns its path."""
    write_idx(folder / "images", "train-", *labelled(train))
    write_idx(folder / "images", "t10k-", *labelled(test, seed=1))
    return str(folder / "images")


def cifar_bytes(labels: list[int], label_bytes: int = 1, seed: int = 0) -> bytes:
    """Records of CIFAR's binary version; of CIFAR-100 the coarse label is 7."""
    generator = np.random.default_rng(seed)
    head = [bytes([7] * (label_bytes - 1) + [label]) for label in labels]
    return b"".join(h + generator.bytes(3 * 32 * 32) for h in head)
