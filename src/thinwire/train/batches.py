"""Batches of samples, whatever these are: their order, and the keys that schemes remember them by.

Everything here is a function of counts and of seeds, so all ranks arrive at the same batches
without talking.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # the target of what doesn't count


@dataclass(frozen=True)
class Batch:
    """Some samples: ``inputs`` ``[rows, …]`` of the first stage, ``target`` int64 ``[rows, …]``.

    ``sample_ids`` and ``lengths`` are those of ``tw.Pipeline.step``.
    """

    inputs: Tensor
    target: Tensor
    sample_ids: Tensor
    lengths: Tensor | None  # None: all positions of all rows

    @property
    def context(self) -> dict[str, Tensor]:
        """What both ends of a link may predict by."""
        tokens = {} if self.inputs.is_floating_point() else {"token": self.inputs}
        return {**tokens, "target": self.target}


class Samples(ABC):
    """Samples by number, from 0."""

    #: How many variants of each sample recur, one after the other; 0: none ever does.
    variants: int = 1

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, numbers: Tensor, epoch: int = 0) -> Batch:
        """The samples of the given numbers (1-D int64), as they are in ``epoch``."""

    @abstractmethod
    def filled(self, batch: Batch, rows: int) -> Batch:
        """``batch`` with ``rows`` rows, all of one shape; those added have no valid target."""

    def ids(self, numbers: Tensor, epoch: int) -> Tensor:
        """The ``sample_ids`` of a batch of these numbers in ``epoch``."""
        return numbers


@dataclass(frozen=True)
class Split:
    """The samples of a run; those to test on are for its final numbers alone."""

    training: Samples
    validation: Samples
    test: Samples | None = None

    @property
    def parts(self) -> dict[str, Samples]:
        """Those that are not trained on, by the name that their losses have in a summary."""
        return {"val": self.validation} | ({} if self.test is None else {"test": self.test})


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The sample numbers of one epoch in a shuffled order, 1-D int64; the same on every rank."""
    digest = hashlib.sha256(f"order:{seed}:{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randperm(count, generator=generator)


def training_numbers(
    count: int, batch: int, least: int, seed: int, done: int = 0, fixed: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """``(epoch, sample numbers)`` of one batch after the other, for ever; the first ``done`` left
    out.

    A short last batch is kept; only one of fewer than ``least`` samples is left out of its epoch.
    ``fixed``: the batches are those of the first epoch, in an order of each epoch's own.
    """
    epoch, skipped = divmod(done, steps_per_epoch(count, batch, least))
    while True:
        batches = [
            numbers
            for numbers in epoch_order(count, seed, 0 if fixed else epoch).split(batch)
            if len(numbers) >= least
        ]
        if fixed and epoch:
            batches = [batches[place] for place in epoch_order(len(batches), seed, epoch)]
        for numbers in batches[skipped:]:
            yield epoch, numbers
        epoch, skipped = epoch + 1, 0


def steps_per_epoch(count: int, batch: int, least: int) -> int:
    """How many batches ``training_numbers`` yields in an epoch."""
    return count // batch + (count % batch >= least)


def evaluation_batches(samples: Samples, batch: int, microbatches: int) -> Iterator[Batch]:
    """All samples in order, each once.

    A last batch too small for the micro-batches is filled with copies that have no valid target.
    """
    for numbers in torch.arange(len(samples)).split(batch):
        filled = torch.cat([numbers, numbers[-1:].expand(max(0, microbatches - len(numbers)))])
        part = samples.batch(filled)
        part.target[len(numbers) :] = IGNORED
        yield part
