"""Positions that travel apart, in bfloat16, since they are far beyond the others of a message.

Where they stand the message has what is expected of them, of which nothing is left to be coded;
what they are takes its place after decoding, before any reference is made of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.base import within
from thinwire.predict import form_of
from thinwire.predict.far import is_far
from thinwire.predict.ops import ops

#: At most one in so many positions of a message travels apart.
_SHARE = 64
_INDEX = torch.int32


def most(shape: Sequence[int]) -> int:
    """How many positions of a tensor of ``shape`` may travel apart: none of images, whose
    positions do not lie together."""
    rows, positions, _ = form_of(shape)
    return 0 if len(shape) == 4 else rows * positions // _SHARE


def most_nbytes(shape: Sequence[int]) -> int:
    """The most bytes of ``Apart.payload``."""
    return most(shape) * (_INDEX.itemsize + 2 * form_of(shape)[2])


@dataclasses.dataclass(frozen=True)
class Apart:
    """``places`` int64 [k], in order, of the tensor's [rows * positions], and what stands there,
    ``vectors`` bfloat16 [k, width]."""

    places: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, values: Tensor, shape: Sequence[int]) -> Apart | None:
        """Those of ``values`` [rows, n] of a tensor of ``shape``; None where there are none.
        Values that are not finite are left to the codec, which refuses them."""
        count, width = most(shape), form_of(shape)[2]
        if not count:
            return None
        vectors = values.to(torch.float32).reshape(-1, width)
        largest = ops(vectors).largest(vectors).nan_to_num(0.0, 0.0, 0.0)
        far = is_far(largest)
        if far is None:
            return None
        places = largest.masked_fill(~far, 0.0).topk(min(count, int(far.sum()))).indices
        places = places.sort().values
        found = vectors[places].to(torch.bfloat16)
        return cls(places, found) if bool(torch.isfinite(found).all()) else None

    @property
    def payload(self) -> Tensor:
        """uint8: the places, then the vectors."""
        places = self.places.to(_INDEX).view(torch.uint8)
        return torch.cat([places, self.vectors.flatten().view(torch.uint8)])

    @classmethod
    def parsed(cls, payload: Tensor, shape: Sequence[int]) -> Apart:
        """What ``payload`` is of. Raises ValueError where it does not fit a tensor of ``shape``."""
        rows, positions, width = form_of(shape)
        each = _INDEX.itemsize + 2 * width
        count = payload.numel() // each
        if payload.numel() != count * each or not 0 < count <= most(shape):
            raise ValueError(f"{payload.numel()} bytes of positions that travel apart")
        places, vectors = payload.clone().split([_INDEX.itemsize * count, 2 * width * count])
        found = places.view(_INDEX).to(torch.int64)
        ordered = bool((found[1:] > found[:-1]).all())
        if not ordered or int(found[0]) < 0 or int(found[-1]) >= rows * positions:
            raise ValueError("positions that travel apart, and are none of the tensor")
        values = vectors.view(torch.bfloat16).view(count, width)
        if not bool(torch.isfinite(values).all()):
            raise ValueError("positions that travel apart, and are not finite")
        return cls(found, values)

    def put(
        self,
        y: Tensor,
        rows: Sequence[int],
        shape: Sequence[int],
        lengths: Sequence[int] | None = None,
    ) -> bool:
        """Let what belongs to ``rows`` stand in ``y`` [rows, n], any float dtype, within each
        row's length. Whether anything does."""
        _, positions, width = form_of(shape)
        row, position = self.places // positions, self.places % positions
        numbers = torch.full((shape[0],), -1, dtype=torch.int64, device=row.device)
        numbers[list(rows)] = torch.arange(len(rows), device=row.device)
        mine = numbers[row] >= 0
        if not bool(mine.any()):
            return False
        there = y.view(len(rows), positions, width)
        there[numbers[row[mine]], position[mine]] = self.vectors[mine].to(y.dtype)
        if lengths is not None:
            y.masked_fill_(~within(lengths, y.shape[1], y.device), 0.0)
        return True

    def instead(
        self, x: Tensor, other: Tensor | None, rows: Sequence[int], shape: Sequence[int]
    ) -> Tensor:
        """``x`` [rows, n] float32 with what stands at these places in ``other``, None: zeros."""
        mask = torch.zeros_like(x)
        ones = torch.ones_like(self.vectors)
        if not dataclasses.replace(self, vectors=ones).put(mask, rows, shape):
            return x
        return torch.where(mask > 0, torch.zeros_like(x) if other is None else other, x)
