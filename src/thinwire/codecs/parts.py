"""Named tensors as the bytes of rows: what a ``TensorCodec`` returns, laid out row by row.

A row is its share of each part, in the order of the parts: a tensor's own bytes, little-endian, or
the stream of bits of ``Bits``. Of a ``Ragged`` part the row has the number of its entries first, in
as few bytes as the largest number needs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.codecs import bits


@dataclasses.dataclass(frozen=True, eq=False)
class Bits:
    """Integers in [0, 2**width) that travel in ``width`` bits each, 1 to 63.

    ``tensor`` [rows, …] has any integer dtype, or bool of width 1. It decodes to bool of width 1,
    else to int64.
    """

    tensor: Tensor
    width: int


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """A part of which a row has as many entries as its data ask for.

    Of ``values`` [rows, most, …] the first ``counts[i]`` entries of row i travel. It decodes to
    ``values``, a tensor with zeros beyond them, and ``counts``, int64 [rows].
    """

    values: Tensor | Bits
    counts: Tensor


Part = Tensor | Bits | Ragged


@dataclasses.dataclass(frozen=True)
class Form:
    """What of a part depends on the number of values alone.

    ``shape`` is that of a row, of a ragged part that of an entry, of which there are at most
    ``most``. ``width``: bits of a value; None: those of ``dtype``.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    width: int | None
    most: int | None

    @classmethod
    def of(cls, name: str, part: object, rows: int, most: int | None) -> Form:
        """The form of a part of so many rows; raises ValueError where it has none."""
        inner = part.values if isinstance(part, Ragged) else part
        tensor = inner.tensor if isinstance(inner, Bits) else inner
        width = inner.width if isinstance(inner, Bits) else None
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise ValueError(f"part {name!r} is a {kind}, not a tensor, tw.Bits or tw.Ragged")
        if isinstance(part, Ragged) != (most is not None):
            raise ValueError(f"part {name!r}: tw.Ragged are the parts that max_counts names, alone")
        least = 1 if most is None else 2
        if tensor.dim() < least or tensor.shape[0] != rows:
            raise ValueError(
                f"part {name!r} has the shape {tuple(tensor.shape)}; its first dimension is that "
                f"of the rows, {rows}{' its second that of the entries' if most else ''}"
            )
        dtype = tensor.dtype
        if width is not None:
            if type(width) is not int or not 1 <= width <= bits.WIDEST:
                raise ValueError(f"part {name!r}: a width of {width} bits, not 1 to {bits.WIDEST}")
            if dtype.is_floating_point or dtype.is_complex:
                raise ValueError(f"part {name!r}: tw.Bits of {dtype}, not of integers")
            dtype = torch.bool if width == 1 else torch.int64
        return cls(name, dtype, tuple(tensor.shape[least:]), width, most)

    def __str__(self) -> str:
        kind = str(self.dtype) if self.width is None else f"{self.width}-bit integers"
        return f"{'ragged ' if self.most is not None else ''}{kind} of {self.shape} a row"

    def values(self, count: int = 1) -> int:
        """How many values ``count`` entries have, or a row that is not ragged."""
        return count * math.prod(self.shape)

    def nbytes(self, count: int = 1) -> int:
        """Bytes of so many entries, or of a row that is not ragged."""
        if self.width is None:
            return self.values(count) * self.dtype.itemsize
        return bits.nbytes(self.values(count), self.width)

    @property
    def prefix(self) -> int:
        """Bytes of the number of entries."""
        return 0 if self.most is None else -(-self.most.bit_length() // 8)

    @property
    def least(self) -> int:
        """The fewest bytes of a row."""
        return self.nbytes() if self.most is None else self.prefix

    @property
    def largest(self) -> int:
        """The most bytes of a row."""
        return self.nbytes() if self.most is None else self.prefix + self.nbytes(self.most)

    def to_bytes(self, part: Tensor | Bits, count: int = 1) -> Tensor:
        """A part of ``count`` entries a row as [rows, nbytes] uint8."""
        tensor = part.tensor if isinstance(part, Bits) else part
        tensor = tensor.detach().reshape(tensor.shape[0], self.values(count))
        if self.width is None:
            # a copy: a dimension of size 1 hides a stride from contiguous()
            data = tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
            return data.view(tensor.shape[0], self.nbytes(count))
        if tensor.dtype != torch.bool:
            tensor = tensor.to(torch.int64)
            if bool(((tensor < 0) | (tensor >> self.width > 0)).any()):
                raise ValueError(f"part {self.name!r} has values outside [0, 2**{self.width})")
        return bits.pack(tensor, self.width)

    def from_bytes(self, data: Tensor, count: int = 1) -> Tensor:
        """``to_bytes`` undone: [rows, *shape], of a ragged part [rows, count, *shape]."""
        if self.width is not None:
            values = bits.unpack(data, self.values(count), self.width)
        elif self.dtype == torch.bool:
            values = data != 0  # other bytes are no bool
        else:  # a copy: what was received need not be aligned for the dtype
            whole = data.clone(memory_format=torch.contiguous_format)
            values = whole.view(-1).view(self.dtype)
        entries = () if self.most is None else (count,)
        return values.view(data.shape[0], *entries, *self.shape)


def put(parts: Mapping[str, Part], forms: Sequence[Form], out: Tensor) -> None:
    """Rows of parts that are not ragged into ``out`` [rows, nbytes] uint8."""
    at = 0
    for form in forms:
        part = parts[form.name]
        assert not isinstance(part, Ragged)
        out[:, at : at + form.largest].copy_(form.to_bytes(part))
        at += form.largest


def take(data: Tensor, forms: Sequence[Form]) -> dict[str, Tensor]:
    """``put`` undone."""
    pieces = data.split([form.largest for form in forms], 1)
    return {form.name: form.from_bytes(p) for form, p in zip(forms, pieces, strict=True)}


def put_ragged(parts: Mapping[str, Part], forms: Sequence[Form]) -> list[Tensor]:
    """The bytes of each row, 1-D uint8, where some of the parts are ragged."""
    pieces, present = [], []
    for form in forms:
        part = parts[form.name]
        if isinstance(part, Ragged):
            counts = _counts(form, part)
            places = torch.arange(form.prefix, device=counts.device)
            pieces.append((counts[:, None] >> 8 * places).to(torch.uint8))
            present.append(torch.ones_like(pieces[-1], dtype=torch.bool))
            pieces.append(_entries(form, part, counts))
            sizes = counts * form.nbytes()
            if form.width is not None:
                sizes = (counts * form.values() * form.width + 7) // 8
            places = torch.arange(pieces[-1].shape[1], device=counts.device)
            present.append(places < sizes[:, None])
        else:
            pieces.append(form.to_bytes(part))
            present.append(torch.ones_like(pieces[-1], dtype=torch.bool))
    mask = torch.cat(present, 1)
    return list(torch.cat(pieces, 1)[mask].split(mask.sum(1).tolist()))


def _counts(form: Form, part: Ragged) -> Tensor:
    """How many entries each row has, int64, checked."""
    tensor = part.values.tensor if isinstance(part.values, Bits) else part.values
    counts, room = part.counts, tensor.shape[1]
    if counts.shape != tensor.shape[:1] or counts.dtype.is_floating_point:
        raise ValueError(f"part {form.name!r}: its counts are integers, one a row")
    counts = counts.to(torch.int64)
    assert form.most is not None
    most = min(room, form.most)
    if bool(((counts < 0) | (counts > most)).any()):
        raise ValueError(
            f"part {form.name!r} has counts outside 0 … {most}: there are {room} entries, and at "
            f"most {form.most} by max_counts"
        )
    return counts


def _entries(form: Form, part: Ragged, counts: Tensor) -> Tensor:
    """The entries of all rows, with zeros beyond each row's in what is packed to bits."""
    tensor = part.values.tensor if isinstance(part.values, Bits) else part.values
    rows, room = tensor.shape[:2]
    if not isinstance(part.values, Bits):
        return form.to_bytes(tensor, room)
    there = torch.arange(room, device=tensor.device) < counts[:, None]
    flat = tensor.to(torch.int64).reshape(rows, room, form.values())
    return form.to_bytes(Bits(flat * there[:, :, None], part.values.width), room)


def skip_ragged(data: memoryview, at: int, forms: Sequence[Form]) -> tuple[int, list[int]]:
    """Where the row that begins at ``at`` ends, and its number of entries of each ragged part.

    Raises ValueError where it has more entries than it may, or runs past the end.
    """
    counts = []
    for form in forms:
        if form.most is None:
            at += form.nbytes()
            continue
        count = int.from_bytes(data[at : at + form.prefix], "little")
        if count > form.most:
            raise ValueError(f"{count} entries of {form.name!r}, of at most {form.most}")
        at += form.prefix + form.nbytes(count)
        counts.append(count)
    if at > len(data):
        raise ValueError("a row runs past its end")
    return at, counts


def take_ragged(
    rows: Sequence[Tensor], counts: Sequence[Sequence[int]], forms: Sequence[Form]
) -> dict[str, Tensor | Ragged]:
    """``put_ragged`` undone: ``rows`` are their bytes, with ``counts`` as ``skip_ragged`` found."""
    parts: dict[str, Tensor | Ragged] = {}
    starts, ragged = [0] * len(rows), 0
    for form in forms:
        found = [1] * len(rows)
        if form.most is not None:
            found = [row[ragged] for row in counts]
            starts = [start + form.prefix for start in starts]
            ragged += 1
        count = max(found)
        data = rows[0].new_zeros((len(rows), form.nbytes(count)))
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            size = form.nbytes(found[index])
            data[index, :size] = row[start : start + size]
            starts[index] += size
        values = form.from_bytes(data, count)
        parts[form.name] = values
        if form.most is not None:
            parts[form.name] = Ragged(values, torch.tensor(found, device=data.device))
    return parts
