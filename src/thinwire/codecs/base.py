"""The codec contract: a tensor to payload bytes and back, without state.

Subclasses code equal-length float or raw rows, or all rows at once; this class does rows, lengths,
dtypes, shapes, checks and output buffers once for all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from thinwire.errors import NonFiniteError
from thinwire.native import Bound, delta_reference
from thinwire.native.delta_reference import Kept
from thinwire.spec import Named

if TYPE_CHECKING:
    from thinwire.codecs.keeping import Keeping

Lengths = Sequence[int] | Tensor


@dataclasses.dataclass(frozen=True)
class Codec(Named):
    """Stateless: tensor to 1-D uint8 payload, and back.

    A *row* is ``x[i]`` for two or more dimensions and the whole tensor for fewer, unless ``rows``
    gives their number. Each row is coded on its own, so a row's bytes never depend on its
    neighbours (except where a codec compresses all rows together, as ``int4:zstd`` does); the
    payload is the rows' bytes, one after the other. Of a row only the first ``lengths[i]`` values
    (flattened) are coded; the rest decode to zero.

    A subclass defines ``row_nbytes`` and either ``_encode_rows`` and ``_decode_rows``, or, to code
    rows of several lengths in one go, ``_encode_all`` and ``_decode_all``.
    """

    #: What a payload of a possible size that cannot be decoded holds, for the error.
    _invalid: ClassVar[str] = "an invalid scale or offset"

    @property
    def stochastic(self) -> bool:
        """Whether encoding draws on the seed."""
        return False

    @property
    def sparse(self) -> bool:
        """Whether it sets some of the values to zero, and leaves the others."""
        return False

    @property
    def alone(self) -> bool:
        """Whether its payloads can be decoded by themselves."""
        return True

    @property
    def together(self) -> bool:
        """Whether rows are coded together: a row's bytes, or its values, follow from the others'
        too."""
        return False

    @property
    def fixed_size(self) -> bool:
        """Whether the size of a row's bytes depends on its length and dtype alone."""
        return True

    @abstractmethod
    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        """Bytes of one encoded row of ``n`` values of ``dtype``; the most, if not fixed_size."""

    def most_row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        """The most bytes of a row of up to ``n`` values: for codecs that take more for fewer."""
        return self.row_nbytes(n, dtype)

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        """``x`` [rows, n] contiguous into ``out`` [rows, row_nbytes] uint8; False: not codable."""
        raise NotImplementedError(f"{type(self).__name__} has no _encode_rows")

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        """``payload`` [rows, row_nbytes] uint8 to [rows, n]; None if its parameters are invalid."""
        raise NotImplementedError(f"{type(self).__name__} has no _decode_rows")

    def _encode_all(
        self, x2: Tensor, sizes: list[int] | None, seeds: Tensor, out: Tensor
    ) -> int | None:
        """The first ``sizes[i]`` (None: all) values of each row of ``x2`` into ``out``.

        ``x2`` [rows, n] has any strides; ``out`` is 1-D contiguous uint8 of the most bytes that
        this can take. Returns the bytes written, or None if a value cannot be coded;
        -1 - (row * n + index) where it is known which.
        """
        count, n = x2.shape
        for index, size, where in self._runs(count, n, sizes, x2.dtype):
            part = x2[index] if size == n else x2[index, :size]
            width = self.row_nbytes(size, x2.dtype)
            if isinstance(where, slice):
                rows_out = out[where].view(count, width)
            else:
                rows_out = out.new_empty((part.shape[0], width))
            # row-major even where a dimension of size 1 hides a stride from contiguous()
            part = part.reshape(-1).contiguous().view(part.shape[0], size)
            if not self._encode_rows(part, seeds[index], rows_out):
                return None
            if isinstance(where, Tensor):
                out[where] = rows_out.flatten()
        return out.numel()

    def _decode_all(self, payload: Tensor, y2: Tensor, sizes: list[int] | None) -> bool:
        """The reverse, into ``y2`` [rows, n] with contiguous rows; zeros beyond each row's size.

        ``payload`` is 1-D uint8 of exactly (if not fixed_size: at most) the bytes that the rows
        take. Returns False, with ``y2`` undefined, if it cannot be decoded.
        """
        count, n = y2.shape
        for index, size, where in self._runs(count, n, sizes, y2.dtype):
            if size == 0:
                y2[index] = 0
                continue
            present = count if isinstance(index, slice) else index.shape[0]
            found = payload[where].view(present, self.row_nbytes(size, y2.dtype))
            values = self._decode_rows(found, size, y2.dtype)
            if values is None:
                return False
            values = saturated(values, y2.dtype)
            y2[index, :size] = values if isinstance(index, slice) else values.to(y2.dtype)
            if size < n:
                y2[index, size:] = 0
        return True

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ValueError if tensors of ``dtype`` cannot be coded."""
        if not dtype.is_floating_point:
            raise ValueError(f"codec {self} takes floating-point tensors, not {dtype}; use raw")

    def max_nbytes(self, shape: Sequence[int], dtype: torch.dtype, rows: int | None = None) -> int:
        """The most bytes that ``encode`` yields for whole rows of this shape and dtype."""
        count, n = layout(shape, rows)
        return count * self.row_nbytes(n, dtype)

    def encode(
        self,
        x: Tensor,
        rows: int | None = None,
        lengths: Lengths | None = None,
        seed: int | Tensor = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Encode ``x`` (any float dtype, any shape or strides; never changed).

        ``seed`` feeds stochastic rounding: one int, or an int64 tensor with one a row. Returns the
        payload, 1-D uint8 on ``x.device``; with ``out`` (1-D uint8, at least ``max_nbytes``) a view
        of its start. Raises NonFiniteError naming the index of a value that cannot be coded, and
        ValueError on a dtype, ``rows`` or ``lengths`` that does not fit.
        """
        _check_tensor(self, x)
        self.check_dtype(x.dtype)
        count, n = layout(x.shape, rows)
        x2 = x.detach().resolve_neg().reshape(count, n)
        sizes = row_sizes(lengths, count, n)
        out = self._room(x2, sizes, out)
        if out.numel() == 0:  # no values, in any number of rows
            return out
        room = out if out.is_contiguous() else torch.empty_like(out)
        seeds = row_seeds(seed, count, x.device)
        written = self._encode_all(x2, sizes, seeds, room)
        if written is None or written < 0:
            raise unfit_value(x, self, lengths, count, written)
        if room is not out:
            out[:written] = room[:written]
        return out[:written]

    def decode(
        self,
        payload: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        rows: int | None = None,
        lengths: Lengths | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Decode ``payload`` into a tensor of ``shape`` and ``dtype`` (into ``out``, if given).

        ``shape``, ``rows`` and ``lengths`` are those of the encoded tensor; ``raw`` also needs its
        dtype. Raises ValueError if the payload's size or its parameters do not fit.
        """
        _check_tensor(self, payload)
        self.check_dtype(dtype)
        count, n = layout(shape, rows)
        sizes = row_sizes(lengths, count, n)
        total = self._payload_nbytes(count, n, sizes, dtype)
        least = total
        if not self.fixed_size:
            least = self._sum_over_rows(self._least_row_nbytes, count, n, sizes, dtype)
        self._check_payload(payload, shape, least, total)
        if out is None:
            out = torch.empty(tuple(shape), dtype=dtype, device=payload.device)
        elif out.shape != tuple(shape) or out.dtype != dtype or out.device != payload.device:
            raise ValueError(
                f"out must be {dtype} of shape {tuple(shape)} on {payload.device}, "
                f"not {out.dtype} of {tuple(out.shape)} on {out.device}"
            )
        if total == 0:
            return out.zero_()
        y = (
            out
            if out.is_contiguous() and not out.is_neg()
            else torch.empty_like(out, memory_format=torch.contiguous_format)
        )
        y2 = y.view(count, n)
        if not self._decode_all(payload, y2, sizes):
            raise ValueError(f"codec {self}: the payload holds {self._invalid}")
        if y is not out:
            out.copy_(y)
        return out

    def transmitted(
        self,
        payload: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        rows: int,
        lengths: Lengths | None,
    ) -> Tensor:
        """Which values a payload that can be decoded has transmitted, bool [rows, n]: all."""
        return torch.ones((rows, math.prod(shape) // max(rows, 1)), dtype=torch.bool)

    def encode_change(
        self,
        x: Tensor,
        lengths: Lengths | None,
        seed: int | Tensor,
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        keeping: Keeping,
        out: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[float, float]]]:
        """The AQ-SGD step: the change of ``x`` [rows, n] from references, which move.

        ``before`` and ``after`` hold a reference a row, of its length, as ``keeping`` keeps it;
        ``after`` gets what is kept of before + decode(payload). Returns the payload, and for each
        row the energies (sums of squares, float32) of its change and its value. Raises
        NonFiniteError, with ``after`` undefined, if a change cannot be coded or a sum kept.
        """
        rows, n = x.shape
        sizes = row_sizes(lengths, rows, n)
        values = x.detach().to(torch.float32, copy=lengths is not None)
        for index, size in enumerate(sizes or ()):
            values[index, size:] = 0
        m = keeping.read(before, sizes, n)
        change = values - m
        payload = self.encode(change, rows, lengths, seed, out)
        y = m + self.decode(payload, change.shape, torch.float32, rows, lengths)
        if not bool(torch.isfinite(y).all()):
            raise NonFiniteError("a reference would exceed float32")
        for target, row in zip(after, keeping.keep(y, sizes), strict=True):
            target.copy_(row)
        energies = [delta_reference.energies(v).tolist() for v in (change, values)]
        return payload, list(zip(*energies, strict=True))

    def decode_change(
        self,
        payload: Tensor,
        lengths: Lengths | None,
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        keeping: Keeping,
        y: Tensor,
    ) -> None:
        """The receiver's half: moves references by ``payload``, and sets ``y`` [rows, n] to what
        they are before they are kept.

        ``y`` has contiguous rows and any float dtype; beyond each row's length it becomes zero.
        Raises ValueError, with ``after`` and ``y`` undefined, if the payload does not fit.
        """
        rows, n = y.shape
        sizes = row_sizes(lengths, rows, n)
        m = keeping.read(before, sizes, n)
        total = m + self.decode(payload, (rows, n), torch.float32, rows, lengths)
        if not bool(torch.isfinite(total).all()):
            raise ValueError(f"codec {self}: the payload takes a reference beyond float32")
        for target, row in zip(after, keeping.keep(total, sizes), strict=True):
            target.copy_(row)
        y.copy_(saturated(total, y.dtype))

    def bound(
        self, dtype: torch.dtype, rows: int, n: int, how: Kept = torch.float32
    ) -> Bound | None:
        """The kernels for contiguous tensors [rows, n] on the CPU, rows whole, without noise.

        ``how`` are references kept. None where there are none, or where the size of a payload is
        not known ahead.
        """
        return None

    def _room(self, x2: Tensor, sizes: list[int] | None, out: Tensor | None) -> Tensor:
        """Bytes for the payload of ``x2`` [rows, n]: those of ``out``, if given."""
        count, n = x2.shape
        total = self._payload_nbytes(count, n, sizes, x2.dtype)
        if out is None:
            return torch.empty(total, dtype=torch.uint8, device=x2.device)
        fits = out.dtype == torch.uint8 and out.dim() == 1 and out.numel() >= total
        if not fits or out.device != x2.device:
            raise ValueError(
                f"out must be 1-D uint8 with at least {total} bytes on {x2.device}, not "
                f"{out.dtype} of shape {tuple(out.shape)} on {out.device}"
            )
        return out[:total]

    def _check_payload(self, payload: Tensor, shape: Sequence[int], least: int, total: int) -> None:
        """Raise ValueError unless ``payload`` has ``least`` to ``total`` bytes.

        No memory is taken for a tensor that so few bytes cannot hold.
        """
        size = payload.numel()
        if payload.dtype != torch.uint8 or payload.dim() != 1 or not least <= size <= total:
            bounds = f"{total}" if least == total else f"{least} to {total}"
            raise ValueError(
                f"codec {self}: a tensor of shape {tuple(shape)} takes {bounds} payload "
                f"bytes, found {size} of {payload.dtype}"
            )

    def _payload_nbytes(
        self, count: int, n: int, sizes: list[int] | None, dtype: torch.dtype
    ) -> int:
        return self._sum_over_rows(self.row_nbytes, count, n, sizes, dtype)

    def _least_row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        """The fewest bytes of a row of ``n`` values, where their number varies."""
        return 0

    @staticmethod
    def _sum_over_rows(
        nbytes: Callable[[int, torch.dtype], int],
        count: int,
        n: int,
        sizes: list[int] | None,
        dtype: torch.dtype,
    ) -> int:
        if sizes is None:
            return count * nbytes(n, dtype)
        return sum([nbytes(size, dtype) for size in sizes])

    def _runs(
        self, count: int, n: int, sizes: list[int] | None, dtype: torch.dtype
    ) -> Iterator[tuple[slice | Tensor, int, slice | Tensor]]:
        """(row indices, values a row, payload positions) for each set of rows of one length."""
        if count == 0:
            return
        if sizes is None or min(sizes) == max(sizes):
            size = n if sizes is None else sizes[0]
            yield slice(None), size, slice(0, count * self.row_nbytes(size, dtype))
            return
        widths = [self.row_nbytes(size, dtype) for size in sizes]
        starts = [0, *_cumulative(widths)]
        for size in sorted(set(sizes)):
            index = [i for i, s in enumerate(sizes) if s == size]
            width = widths[index[0]]
            first = torch.tensor([starts[i] for i in index], dtype=torch.int64)
            where = (first[:, None] + torch.arange(width)).flatten()
            yield torch.tensor(index, dtype=torch.int64), size, where


def unfit_value(
    x: Tensor, codec: object, lengths: Lengths | None, rows: int, written: int | None = None
) -> NonFiniteError:
    """The error for a value of ``x`` that is not finite, or that ``codec`` cannot hold.

    ``written`` is what ``_encode_all`` returned. Where it does not say which value, the first that
    is not finite is meant, or else the greatest. Values beyond each row's length do not count.
    """
    values = x.detach().reshape(-1)
    flat = _first_unfit(x, lengths, rows) if written is None else -1 - written
    found = float(values[flat])
    what = f"{found}" if not math.isfinite(found) else f"{found}, which {codec} cannot hold,"
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), x.shape))
    return NonFiniteError(f"{what} at index {index} of a tensor of shape {tuple(x.shape)}")


def _first_unfit(x: Tensor, lengths: Lengths | None, rows: int) -> int:
    valid = x.detach().reshape(rows, -1)
    valid = valid.to(torch.float64, copy=True)  # isfinite knows no 8-bit floats
    for row, size in enumerate(row_sizes(lengths, *valid.shape) or ()):
        valid[row, size:] = 0
    bad = torch.nonzero(~torch.isfinite(valid.flatten()))
    return int(bad[0]) if len(bad) else int(valid.flatten().abs().argmax())


def layout(shape: Sequence[int], rows: int | None) -> tuple[int, int]:
    """(rows, values a row) of a tensor."""
    numel = math.prod(shape)
    if any(d < 0 for d in shape):
        raise ValueError(f"a shape has no negative sizes, as {tuple(shape)} has")
    if rows is None:
        rows = shape[0] if len(shape) >= 2 else 1
        return rows, (math.prod(shape[1:]) if len(shape) >= 2 else numel)
    if rows < 0 or (rows == 0 and numel) or (rows and numel % rows):
        raise ValueError(f"{numel} values cannot be cut into {rows} equal rows")
    return rows, (numel // rows if rows else 0)


def row_sizes(lengths: Lengths | None, count: int, n: int) -> list[int] | None:
    """``lengths`` checked, as a list; None where every row is whole."""
    if lengths is None:
        return None
    raw = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    sizes = [operator.index(v) for v in raw]
    if len(sizes) != count:
        raise ValueError(f"{len(sizes)} lengths for {count} rows")
    for row, size in enumerate(sizes):
        if not 0 <= size <= n:
            raise ValueError(f"length {size} of row {row} is not within 0 … {n}")
    return sizes if any(size != n for size in sizes) else None


def within(sizes: Sequence[int], width: int, device: torch.device) -> Tensor:
    """Which values of rows of ``width`` are among the first ``sizes[i]``, bool [rows, width]."""
    ends = torch.tensor(sizes, dtype=torch.int64, device=device)
    return torch.arange(width, device=device) < ends[:, None]


def _check_tensor(coder: Codec, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"codec {coder} takes a torch tensor, not {type(x).__qualname__}")


def row_seeds(seed: int | Tensor, count: int, device: torch.device) -> Tensor:
    """A seed a row, int64; not to be changed."""
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.shape != (count,):
            raise ValueError(f"seed must be an int or an int64 tensor of {count} values, one a row")
        return seed.to(device, non_blocking=device.type != "cpu")  # to a GPU: without waiting
    return _same_seeds(int(seed), count, device)


@functools.lru_cache(maxsize=64)
def _same_seeds(seed: int, count: int, device: torch.device) -> Tensor:
    wrapped = (seed + 2**63) % 2**64 - 2**63
    # a copy that is waited for: another stream may be the next to ask
    return torch.full((count,), wrapped, dtype=torch.int64).to(device)


def _cumulative(widths: list[int]) -> list[int]:
    total, sums = 0, []
    for width in widths:
        total += width
        sums.append(total)
    return sums


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values``, clamped to the range of ``dtype``: a grid may end just above the greatest value
    that it holds, and 65504 must not come back as an infinity."""
    if values.dtype == dtype or dtype.itemsize >= 4:
        return values
    limit = torch.finfo(dtype).max
    return values.to(torch.float32).clamp(-limit, limit).to(dtype)
