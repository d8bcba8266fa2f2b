"""Calls of the library, with what has to come of them, in a file that replay.cpp reads.

What is expected is the twin's; the places of values that cannot be coded, which it does not always
tell, are those that the kernels here report.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from tests.native import test_tile_kernels
from tests.native.kernel_cases import (
    DTYPES,
    LEVELS,
    encoded,
    payload_nbytes,
    seeds_of,
    twin_decode,
    twin_encode,
)
from tests.native.test_delta_kernels import Step
from thinwire.codecs.base import saturated
from thinwire.native import library, tile, tile_kernels, topk
from thinwire.native.delta_reference import Kept
from thinwire.native.reference import IntegerFormat
from thinwire.native.tensors import DTYPES as NUMBERS
from thinwire.native.tile import TileFormat
from thinwire.native.topk import Rows

#: In the order of `functions` in replay.cpp.
FUNCTIONS = [
    *("tw_encode", "tw_decode", "tw_delta_encode", "tw_delta_decode"),
    *("tw_tile_encode", "tw_tile_decode", "tw_topk_encode", "tw_topk_decode"),
]
FILL = 0xAB


@dataclasses.dataclass(frozen=True)
class Out:
    """Memory of ``nbytes`` that is written to: holds ``before``, then begins with ``expected``."""

    nbytes: int
    expected: bytes = b""
    before: bytes = b""


@dataclasses.dataclass(frozen=True)
class Same:
    """The pointer that argument number ``index`` is."""

    index: int


Argument = int | None | bytes | Out | Same | list


def data(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def numbers(values: Sequence[int] | None) -> bytes | None:
    return None if values is None else struct.pack(f"<{len(values)}q", *values)


def format_bytes(fmt: IntegerFormat) -> bytes:
    """``tw_format`` in csrc/level.h."""
    flags = 1 * fmt.symmetric | 2 * fmt.stochastic | 4 * fmt.std | 8 * fmt.hadamard
    return struct.pack("<iiq", fmt.bits, flags, fmt.group)


def spread(x: Tensor) -> bytes:
    """``x`` [rows, n] as it lies in memory, with what is between its rows."""
    rows, n = x.shape
    whole = (rows - 1) * x.stride(0) + n if rows and n else 0
    return data(x.as_strided((whole,), (1,)))


def out_rows(y: Tensor, stride: int) -> Out:
    """``y`` [rows, n] as rows ``stride`` values apart, with what was there between them."""
    rows, n = y.shape
    filled = torch.full((rows * stride * y.itemsize,), FILL, dtype=torch.uint8).view(y.dtype)
    filled.view(rows, stride)[:, :n] = y
    return Out(rows * stride * y.itemsize, data(filled))


class Calls:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.labels: list[str] = []

    def add(self, label: str, name: str, result: int, *arguments: Argument) -> None:
        self.labels.append(label)
        self._write(FUNCTIONS.index(name), result, len(arguments))
        for argument in arguments:
            self._argument(argument)

    # The codecs.

    def integer(
        self, x: Tensor, sizes: list[int] | None, fmt: IntegerFormat, threads: int = 1
    ) -> None:
        """Encoding, and decoding into every dtype."""
        label, seeds = f"{fmt}, {describe(x)}, sizes {sizes}", seeds_of(len(x))
        _, place = encoded(x, sizes, fmt, seeds, LEVELS[0])
        payload, told = twin_encode(x, sizes, fmt, seeds) if place < 0 else (x[:0], place)
        assert told == place
        room = Out(payload_nbytes(x, sizes, fmt), data(payload))
        given = [numbers(sizes), data(seeds)]
        self.add(
            *(label, "tw_encode", place, format_bytes(fmt), NUMBERS[x.dtype], spread(x)),
            *(*x.shape, x.stride(0), *given, room, threads),
        )
        for dtype in DTYPES if place < 0 else []:
            y = twin_decode(payload, torch.empty(x.shape, dtype=dtype), sizes, fmt)
            stride = x.shape[1] + len(self.labels) % 3
            self.add(
                *(label, "tw_decode", -1, format_bytes(fmt), data(payload), NUMBERS[dtype]),
                *(out_rows(y, stride), *y.shape, stride, numbers(sizes), threads),
            )

    def step(self, step: Step, in_place: bool) -> None:
        """The AQ-SGD step at both ends."""
        x = step.x.to(torch.float32) if step.x.dtype == torch.float16 else step.x
        rows, n = x.shape
        label = f"{step.fmt}, kept as {step.how}, {describe(x)}, sizes {step.sizes}"
        place = step.encode(in_place, LEVELS[0])[0]
        assert (place < 0) == step.codable
        payload = Out(step.payload.numel(), data(step.payload) if step.codable else b"")
        energies = Out(8 * rows, data(step.energies) if step.codable else b"")
        head = format_bytes(step.fmt)
        self.add(
            *(label, "tw_delta_encode", place, head, NUMBERS[x.dtype], spread(x), rows, n),
            *(x.stride(0), numbers(step.sizes), *kept(step.how), *references(step, in_place, 9)),
            *(data(seeds_of(rows)), payload, energies, 1),
        )
        for dtype in (torch.float32, torch.bfloat16, None) if step.codable else ():
            y = None if dtype is None else out_rows(saturated(step.y, dtype), n + 1)
            self.add(
                *(label, "tw_delta_decode", -1, head, data(step.payload), rows, n),
                *(numbers(step.sizes), *kept(step.how), *references(step, in_place, 7)),
                *(0 if dtype is None else NUMBERS[dtype], y, n + 1, 1),
            )

    def tile(self, x: Tensor, sizes: list[int] | None, fmt: TileFormat) -> None:
        rows, n = x.shape
        label, lengths = f"{fmt}, {describe(x)}, sizes {sizes}", sizes or [n] * rows
        room = sum(tile.row_nbytes(size, fmt) for size in lengths)
        with library.forced(LEVELS[0]):
            place = tile_kernels.encode(x, sizes, fmt, torch.empty(room, dtype=torch.uint8))
        payload = test_tile_kernels.twin_encode(x, lengths, fmt) if place < 0 else None
        assert (place < 0) == (payload is not None)
        out = Out(room, b"" if payload is None else data(payload))
        self.add(
            *(label, "tw_tile_encode", place, fmt.bits, NUMBERS[x.dtype], spread(x), rows, n),
            *(x.stride(0), numbers(sizes), out, 1),
        )
        if payload is not None:
            self.tile_bytes(payload, sizes, (rows, n), fmt)

    def tile_bytes(
        self, payload: Tensor, sizes: list[int] | None, shape: tuple[int, int], fmt: TileFormat
    ) -> None:
        """Decoding of any bytes, into every dtype."""
        rows, n = shape
        values: list[Tensor | None] = []
        for part, size in split(payload, sizes or [n] * rows, fmt):
            values.append(tile.decode_rows(part[None], size, fmt))
        good = all(row is not None for row in values)
        for dtype in DTYPES:
            y = torch.zeros((rows, n), dtype=dtype)
            for row, decoded in enumerate(values):
                if decoded is not None:
                    y[row, : decoded.shape[1]] = saturated(decoded[0], dtype)
            out = out_rows(y, n) if good else Out(rows * n * y.itemsize)
            self.add(
                *(f"{fmt}, sizes {sizes}", "tw_tile_decode", -good, fmt.bits, data(payload)),
                *(NUMBERS[dtype], out, rows, n, n, numbers(sizes), 1),
            )

    def topk(self, x: Tensor, rows: Rows) -> None:
        label, n = f"{rows}, {describe(x)}", x.shape[1]
        room = sum(w + topk.positions_max_nbytes(n, k, rows.modulus) for n, k, w in rows.each())
        payload = torch.zeros(room, dtype=torch.uint8)
        starts = topk.encode(x, rows, payload, None)
        if starts is not None:
            payload = payload[: int(starts[-1])]
        sizes = rows.sizes.tolist()
        head: list[Argument] = [len(x), data(rows.sizes), data(rows.kept), data(rows.widths)]
        head += [rows.modulus, NUMBERS[x.dtype]]
        told = first_bad(x, sizes) if starts is None else starts.tolist()
        written = -1 if starts is None else len(payload)
        out = Out(room, b"" if starts is None else data(payload))
        told_at = Out(8 * (len(x) + 1), numbers(told) or b"")
        where = spread(x), x.stride(0), out, room, None, 0, told_at
        self.add(label, "tw_topk_encode", written, *head, *where)
        if starts is not None:
            y = torch.empty_like(x)
            assert topk.decode(rows, payload, None, y)
            what = data(payload), len(payload), None, 0, out_rows(y, n + 2), n + 2, n
            self.add(label, "tw_topk_decode", 1, *head, *what)

    # The file.

    def _write(self, *values: int) -> None:
        self._file.write(struct.pack(f"<{len(values)}q", *values))

    def _bytes(self, what: bytes) -> None:
        self._file.write(what + bytes(-len(what) % 8))

    def _argument(self, argument: Argument) -> None:
        if argument is None or isinstance(argument, int):
            self._write(0, argument or 0)
        elif isinstance(argument, bytes):
            self._write(1, len(argument))
            self._bytes(argument)
        elif isinstance(argument, Out):
            self._write(2, argument.nbytes, FILL, len(argument.expected))
            self._bytes(argument.expected)
            self._write(len(argument.before))
            self._bytes(argument.before)
        elif isinstance(argument, Same):
            self._write(4, argument.index)
        else:
            self._write(3, len(argument))
            for one in argument:
                self._argument(one)


def describe(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} stride {x.stride(0)}"


def kept(how: Kept) -> tuple[int, bytes | None]:
    return (NUMBERS[how], None) if isinstance(how, torch.dtype) else (0, format_bytes(how))


def references(step: Step, in_place: bool, index: int) -> list[Argument]:
    """Where references come from, which is argument number ``index``, and where they go."""
    before = [data(row) for row in step.before]
    after = [data(row) for row in step.after] if step.codable else [b""] * len(before)
    if in_place:
        return [[Out(len(a), b, a) for a, b in zip(before, after, strict=True)], Same(index)]
    return [[*before], [Out(len(a), b) for a, b in zip(before, after, strict=True)]]


def split(payload: Tensor, sizes: Sequence[int], fmt: TileFormat) -> list[tuple[Tensor, int]]:
    """Each row's bytes, and its size."""
    widths = [tile.row_nbytes(size, fmt) for size in sizes]
    return list(zip(payload.split(widths), sizes, strict=True))


def first_bad(x: Tensor, sizes: Sequence[int]) -> list[int]:
    """Row and column of the first value that is not finite."""
    for row, size in enumerate(sizes):
        bad = torch.nonzero(~torch.isfinite(x[row, :size]))
        if len(bad):
            return [row, int(bad[0])]
    raise AssertionError("all values are finite")
