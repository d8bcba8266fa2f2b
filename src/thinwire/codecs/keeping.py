"""How references are kept: in float32, in bfloat16, or in an integer format.

A reference is a 1-D tensor: the row's values in a float dtype, or the bytes of an integer codec's
row (uint8). Both ends of a link make it from the same float32 values by the same function, after
the value that the model gets: what is lost in keeping is part of the next change.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.codecs.integer import Integer
from thinwire.errors import NonFiniteError
from thinwire.native import IntegerFormat
from thinwire.native.delta_reference import Kept


@dataclasses.dataclass(frozen=True)
class Keeping:
    """One way to keep references; ``how`` is what the kernels call it."""

    how: Kept
    _codec: Integer | None = None

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Of the tensors that are kept."""
        return torch.uint8 if isinstance(self.how, IntegerFormat) else self.how

    @functools.lru_cache(maxsize=1024)  # noqa: B019  there are four
    def numel(self, n: int) -> int:
        """Elements of a reference of ``n`` values."""
        return n if self._codec is None else self._codec.row_nbytes(n, torch.float32)

    def nbytes(self, n: int) -> int:
        """Bytes of a reference of ``n`` values."""
        return self.numel(n) * self.dtype.itemsize

    def empty(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        """Room for a reference of ``n`` values."""
        return torch.empty(self.numel(n), dtype=self.dtype, device=device)

    def read(self, kept: Sequence[Tensor], sizes: Sequence[int] | None, n: int) -> Tensor:
        """References of ``sizes`` values (None: ``n`` each) as [rows, n] float32, then zeros."""
        rows = len(kept)
        if self._codec is not None:
            payload = torch.cat(list(kept))
            return self._codec.decode(payload, (rows, n), torch.float32, rows, sizes)
        if sizes is None:
            return torch.stack(list(kept)).to(torch.float32)
        m = torch.zeros((rows, n), device=kept[0].device)
        for target, row in zip(m, kept, strict=True):
            target[: row.numel()] = row
        return m

    def keep(self, y: Tensor, sizes: Sequence[int] | None) -> list[Tensor]:
        """The first ``sizes[i]`` (None: all) values of each row of ``y`` [rows, n] float32, kept.

        Raises NonFiniteError if one cannot be.
        """
        rows, n = y.shape
        lengths = [n] * rows if sizes is None else sizes
        if self._codec is not None:
            return self.split(self._codec.encode(y, rows, sizes), lengths)
        if self.dtype != torch.float32:
            y = y.to(self.dtype)
            valid = [row[:size] for row, size in zip(y, lengths, strict=True)]
            if not bool(torch.isfinite(torch.cat(valid)).all()):
                raise NonFiniteError(f"a reference would exceed {self.dtype}")
        return [row[:size].clone() for row, size in zip(y, lengths, strict=True)]

    def holds(self, coder: Codec) -> bool:
        """Whether a payload of ``coder`` is its rows' references, one after the other."""
        return isinstance(coder, Integer) and coder.fixed_size and coder.format == self.how

    def split(self, payload: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The references of ``sizes`` values that lie end to end in ``payload``."""
        return [row.clone() for row in payload.split([self.numel(size) for size in sizes])]


def _integer(bits: int) -> Keeping:
    coder = Integer(bits=bits)
    return Keeping(coder.format, coder)


#: By the name that ``delta(…,ref=…)`` gives them.
KEEPINGS = {
    "fp32": Keeping(torch.float32),
    "bf16": Keeping(torch.bfloat16),
    "int8": _integer(8),
    "int4": _integer(4),
}
