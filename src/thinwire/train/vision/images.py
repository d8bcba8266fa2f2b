"""Images as training samples: split, normalised, and augmented where that is wanted.

A sample's number is its place among the images that are trained on. Under augmentation its key is
that number and the variant's, so that schemes which remember samples meet the same image again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.train import batches
from thinwire.train.batches import IGNORED, Batch
from thinwire.train.config import ConfigError, DataConfig
from thinwire.train.task import Data
from thinwire.train.vision import files
from thinwire.train.vision.augment import crop_flip
from thinwire.train.vision.parts import Found, Part
from thinwire.train.words import counted


@dataclass(frozen=True)
class Augmentation:
    """Random crops and flips under a seed; ``variants``: how many of an image recur, 0: none."""

    seed: int
    variants: int


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of each channel of the images trained on; black is 0, white 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalised(self, pixels: Tensor) -> Tensor:
        """uint8 ``[rows, C, H, W]`` as float32, without a fused operation: alike on all CPUs."""
        mean, std = (torch.tensor(each)[:, None, None] * 255 for each in (self.mean, self.std))
        return pixels.float().sub_(mean).div_(std)


class Samples(batches.Samples):
    """Some of the images of a part; with ``limit`` only so many of them, evenly spread, since the
    order may be that of the classes."""

    def __init__(
        self,
        part: Part,
        places: Tensor,
        scale: Scale,
        augmentation: Augmentation | None = None,
        limit: int | None = None,
    ) -> None:
        if limit is not None and limit < len(places):
            places = places[torch.arange(limit) * len(places) // limit]
        self.part, self.places, self.scale = part, places, scale
        self.augmentation = augmentation
        self.variants = 1 if augmentation is None else augmentation.variants

    def __len__(self) -> int:
        return len(self.places)

    def batch(self, numbers: Tensor, epoch: int = 0) -> Batch:
        """``inputs`` float32 ``[rows, C, H, W]``, ``target`` int64 ``[rows]``."""
        places = self.places[numbers]
        pixels, ids = self.part.pixels[places], self.ids(numbers, epoch)
        if self.augmentation is not None:
            pixels = crop_flip(pixels, self.augmentation.seed, *ids.unbind(1))
        return Batch(self.scale.normalised(pixels), self.part.labels[places], ids, lengths=None)

    def ids(self, numbers: Tensor, epoch: int) -> Tensor:
        """Of augmented images ``[rows, 2]``, the variant beside the number."""
        if self.augmentation is None:
            return numbers
        variant = epoch % self.variants if self.variants else epoch
        return torch.stack([numbers, torch.full_like(numbers, variant)], dim=1)

    def filled(self, batch: Batch, rows: int) -> Batch:
        """The rows added are copies: BatchNorm takes them into its statistics."""
        there = len(batch.inputs)
        copied = torch.arange(rows - there) % there
        ids = batch.sample_ids[copied].clone()
        unused = torch.arange(len(self), len(self) + len(ids))
        ids[(slice(None), 0) if ids.dim() == 2 else slice(None)] = unused
        return Batch(
            torch.cat([batch.inputs, batch.inputs[copied]]),
            torch.cat([batch.target, batch.target.new_full((len(ids),), IGNORED)]),
            torch.cat([batch.sample_ids, ids]),
            lengths=None,
        )


@dataclass(frozen=True)
class Images(Data):
    """The images of a run: ``training`` and ``validation`` are places in ``train``, sorted."""

    train: Part
    training: Tensor
    validation: Tensor
    test: Part | None
    classes: int
    scale: Scale
    sha256: str
    source: str
    skipped: Mapping[str, int]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.train.pixels.shape[1:]
        return channels, height, width

    @property
    def described(self) -> str:
        channels, height, width = self.shape
        inside = f"{height}×{width} in {counted(channels, 'channel')}"
        return f"{self.source}, {inside} and {self.classes} classes"

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "train_images": len(self.training),
            "validation_images": len(self.validation),
            "test_images": 0 if self.test is None else len(self.test.labels),
            "shape": list(self.shape),
            "classes": self.classes,
            "mean": list(self.scale.mean),
            "std": list(self.scale.std),
        }


def load(config: DataConfig) -> Images:
    """Read and split images; raises ConfigError where they can't be read or are too few."""
    assert config.path is not None
    found = files.load(config.path, config.size)
    count = len(found.train.labels)
    if found.classes < 2:
        raise ConfigError(
            f"--data.path: {config.path} has one class only; there is nothing to learn"
        )
    held = min(max(1, round(config.validation * count)), count - 1)
    if not held:
        raise ConfigError(
            f"--data.path: {config.path} has one image to train on, and none would be left for "
            "validation"
        )
    digest = hashlib.sha256(f"validation:{config.seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    order = torch.randperm(count, generator=generator)
    training, validation = order[held:].sort().values, order[:held].sort().values
    scale = _scale(found.train.pixels, training)
    return Images(
        found.train,
        training,
        validation,
        found.test,
        found.classes,
        scale,
        _digest(found, training, scale),
        config.path,
        found.skipped,
    )


_CHUNK = 1 << 22  # values at a time: their squares take eight times their room


def _scale(pixels: Tensor, places: Tensor) -> Scale:
    """From sums of whole numbers: the same on every machine."""
    channels = pixels.shape[1]
    count = len(places) * pixels[0, 0].numel()
    total = torch.zeros(channels, dtype=torch.int64)
    squares = torch.zeros(channels, dtype=torch.int64)
    for some in places.split(max(1, _CHUNK // pixels[0].numel())):
        values = pixels[some].long()
        total += values.sum((0, 2, 3))
        squares += values.square_().sum((0, 2, 3))
    mean, std = [], []
    for once, twice in zip(total.tolist(), squares.tolist(), strict=True):
        variance = (count * twice - once**2) / count**2
        mean.append(once / count / 255)
        std.append(math.sqrt(variance) / 255 or 1.0)  # all are alike: nothing to scale
    return Scale(tuple(mean), tuple(std))


def _digest(found: Found, training: Tensor, scale: Scale) -> str:
    """Over all that a run is given, how it is split and scaled included."""
    parts = [found.train] if found.test is None else [found.train, found.test]
    head = [found.classes, scale.mean, scale.std, *(list(part.pixels.shape) for part in parts)]
    digest = hashlib.sha256(json.dumps(head).encode())
    for tensor in (training, *(t for part in parts for t in (part.pixels, part.labels))):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
