"""What crosses an edge, and what both of its ends know of a step before anything is posted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Boundary:
    """One tensor that crosses an edge: its shape for one micro-batch at the declared maximum.

    ``batched``: its first dimension is the micro-batch's rows. ``sequence``: its second dimension
    varies with the length of the sequences.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    batched: bool = True
    sequence: bool = False

    @property
    def coded(self) -> bool:
        """The activation itself, or any float tensor that takes part in the backward pass.

        Masks (possibly holding -inf), tables and integer tensors would wreck a scale: they travel
        as they are.
        """
        floating = self.dtype.is_floating_point
        return floating and self.batched and (self.index == 0 or self.requires_grad)

    def shape_for(self, rows: int, seq_len: int | None) -> tuple[int, ...]:
        """The largest shape in a micro-batch of ``rows`` sequences of ``seq_len`` positions."""
        shape = list(self.shape)
        if self.batched:
            shape[0] = rows
        if self.sequence and seq_len is not None:
            shape[1] = seq_len
        return tuple(shape)


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """What both ends know of one micro-batch: its rows, their samples and valid positions.

    ``known``: all its rows have the inputs that they had at their samples' last visits.
    ``context``: what else this rank was given of its rows, by name.
    """

    rows: int
    keys: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    known: bool = False
    context: Mapping[str, Tensor] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What both ends know of a step before anything is posted; ``next_keys``: of the next one.

    ``frozen``: so many stages, from the first on, compute the same at each visit of a sample.
    ``loss_scale``: what the loss is multiplied by before it goes back, None where it is not.
    ``dense``: values travel as they are, and leave the state that codecs without loss would.
    ``measure``: senders find out what coding loses.
    """

    step: int
    train: bool
    microbatches: tuple[MicroBatch, ...]
    seq_len: int | None = None
    codec: bool = True  # False: evaluation on exact values
    seed: int = 0
    next_keys: tuple[int, ...] | None = None
    frozen: int = 0
    loss_scale: float | None = None
    dense: bool = False
    measure: bool = False

    @property
    def positions(self) -> int:
        """Valid positions of all rows; rows, where their lengths are not known."""
        return sum(mb.rows if mb.lengths is None else sum(mb.lengths) for mb in self.microbatches)

    @property
    def keys(self) -> tuple[int, ...]:
        """The samples of all micro-batches, in order; none where they have no ids."""
        return tuple(key for mb in self.microbatches for key in mb.keys or ())
