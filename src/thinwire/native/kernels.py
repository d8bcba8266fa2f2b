"""The compiled kernels of the integer codecs and of the AQ-SGD step, called through ctypes.

Each takes all rows of a tensor at once, of several lengths if need be, and equals the functions of
``reference`` and ``delta_reference`` bit for bit. The GIL is released; large tensors are shared out
over ``torch.get_num_threads()`` threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.native import library
from thinwire.native.delta_reference import Kept
from thinwire.native.reference import IntegerFormat
from thinwire.native.tensors import DTYPES, arguments, row_lengths, usable, with_rows

__all__ = [
    "Bound",
    "address",
    "addresses",
    "bound",
    "decode",
    "delta_decode",
    "delta_encode",
    "encode",
    "usable",
]

_SYMMETRIC, _STOCHASTIC, _STD, _HADAMARD = 1, 2, 4, 8
_FP16_MAX = torch.finfo(torch.float16).max


class _Format(ctypes.Structure):
    """``tw_format`` in csrc/level.h."""

    _fields_ = (("bits", ctypes.c_int32), ("flags", ctypes.c_int32), ("group", ctypes.c_int64))


def format_of(fmt: IntegerFormat) -> Any:
    """``tw_format`` of a format, which keeps it: hashing six fields takes longer than a kernel."""
    made = fmt.__dict__.get("_native")
    if made is None:
        made = fmt.__dict__["_native"] = _make_format(fmt)
    return made


def _make_format(fmt: IntegerFormat) -> Any:
    flags = _SYMMETRIC * fmt.symmetric | _STOCHASTIC * fmt.stochastic
    flags |= _STD * fmt.std | _HADAMARD * fmt.hadamard
    return ctypes.byref(_Format(fmt.bits, flags, fmt.group))


class _Functions:
    """The library's functions with their types."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        pointer, integer, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        declared = functools.partial(library.function, handle)
        tensor = (integer, pointer, number, number, number, pointer)
        self.encode: Callable[..., int] = declared(
            "tw_encode", number, pointer, *tensor, pointer, pointer, integer
        )
        self.decode: Callable[..., int] = declared(
            "tw_decode", number, pointer, pointer, *tensor, integer
        )
        references = (integer, pointer, pointer, pointer)
        self.delta_encode: Callable[..., int] = declared(
            "tw_delta_encode",
            number,
            *(pointer, *tensor, *references, pointer, pointer, pointer, integer),
        )
        self.delta_decode: Callable[..., int] = declared(
            "tw_delta_decode",
            number,
            *(pointer, pointer, number, number, pointer, *references),
            *(integer, pointer, number, integer),
        )


@functools.cache
def _declared(handle: ctypes.CDLL) -> _Functions:
    return _Functions(handle)


def _functions() -> _Functions:
    handle = library.library()
    assert handle is not None
    return _declared(handle)


def addresses(rows: Sequence[Tensor] | Tensor) -> Any:
    """Where each row's data lies, as an array that ctypes takes; does not keep them alive."""
    if isinstance(rows, Tensor):
        step = rows.stride(0) * rows.element_size()
        found = rows.data_ptr() + step * np.arange(rows.shape[0], dtype=np.int64)
        return (ctypes.c_void_p * rows.shape[0]).from_buffer(found.data)
    return (ctypes.c_void_p * len(rows))(*[row.data_ptr() for row in rows])


def _kept(how: Kept) -> tuple[int, Any]:
    return (DTYPES[how], None) if isinstance(how, torch.dtype) else (0, format_of(how))


def encode(
    x: Tensor, sizes: Sequence[int] | None, fmt: IntegerFormat, seeds: Tensor, out: Tensor
) -> int:
    """Encode the first ``sizes[i]`` values of each row of ``x`` [rows, n] into ``out``.

    Returns -1, or the place (row * n + index) of a value that cannot be coded, with ``out``
    undefined.
    """
    x = with_rows(x)
    return _functions().encode(
        format_of(fmt),
        *arguments(x, sizes),
        seeds.data_ptr() if fmt.stochastic else None,
        out.data_ptr(),
        torch.get_num_threads(),
    )


def decode(payload: Tensor, sizes: Sequence[int] | None, fmt: IntegerFormat, y: Tensor) -> bool:
    """Decode into ``y`` [rows, n] with contiguous rows; zeros beyond each row's size.

    Returns False, with ``y`` undefined, if a scale or offset in the payload is invalid.
    """
    threads = torch.get_num_threads()
    return (
        _functions().decode(format_of(fmt), payload.data_ptr(), *arguments(y, sizes), threads) < 0
    )


def delta_encode(
    x: Tensor,
    sizes: Sequence[int] | None,
    fmt: IntegerFormat,
    seeds: Tensor,
    out: Tensor,
    before: Sequence[Tensor] | Tensor,
    after: Sequence[Tensor] | Tensor,
    how: Kept,
    energies: Tensor | None = None,
) -> int:
    """The AQ-SGD step: changes of ``x`` [rows, n] into ``out``, references moved.

    ``before`` and ``after`` hold each row's reference as it is kept, the same tensors to move them
    in place. ``energies`` [rows, 2] float32 gets each row's energy of change and value. Returns -1,
    or the place of a value that cannot be coded, with ``out`` and ``after`` undefined.
    """
    x = with_rows(x if x.dtype != torch.float16 else x.to(torch.float32))
    return _functions().delta_encode(
        format_of(fmt),
        *arguments(x, sizes),
        *_kept(how),
        addresses(before),
        addresses(after),
        seeds.data_ptr() if fmt.stochastic else None,
        out.data_ptr(),
        None if energies is None else energies.data_ptr(),
        torch.get_num_threads(),
    )


def delta_decode(
    payload: Tensor,
    shape: tuple[int, int],
    sizes: Sequence[int] | None,
    fmt: IntegerFormat,
    before: Sequence[Tensor] | Tensor,
    after: Sequence[Tensor] | Tensor,
    how: Kept,
    y: Tensor | None = None,
) -> bool:
    """The receiver's half: references moved by ``payload`` for ``shape`` = (rows, n).

    ``y`` [rows, n] of any dtype that is coded, rows contiguous, gets what the receiver computes on.
    Returns False, with ``after`` and ``y`` undefined, if the payload or a sum is invalid.
    """
    if y is not None and y.dtype == torch.float16:
        wide = torch.empty_like(y, dtype=torch.float32)
        valid = delta_decode(payload, shape, sizes, fmt, before, after, how, wide)
        y.copy_(wide.clamp(-_FP16_MAX, _FP16_MAX))
        return valid
    rows, n = shape
    return (
        _functions().delta_decode(
            format_of(fmt),
            payload.data_ptr(),
            rows,
            n,
            row_lengths(sizes),
            *_kept(how),
            addresses(before),
            addresses(after),
            0 if y is None else DTYPES[y.dtype],
            None if y is None else y.data_ptr(),
            0 if y is None else y.stride(0),
            torch.get_num_threads(),
        )
        < 0
    )


class Bound:
    """The kernels of a format for contiguous tensors [rows, n] of one dtype on the CPU, all whole.

    What does not change from call to call is converted once, and bytes are given by where they
    lie (tensors by ``data_ptr``, payloads by ``address``, references by ``addresses``), so that a
    message whose shape is known ahead costs one call. References are kept as ``how``; there is no
    noise. Not for two threads at once.
    """

    def __init__(
        self, fmt: IntegerFormat, dtype: torch.dtype, rows: int, n: int, how: Kept
    ) -> None:
        functions = _functions()
        self._encode, self._decode = functions.encode, functions.decode
        self._delta_encode, self._delta_decode = functions.delta_encode, functions.delta_decode
        self._fmt, self._dtype, self._rows, self._n = format_of(fmt), DTYPES[dtype], rows, n
        self._how = _kept(how)
        self._energies = (ctypes.c_float * (2 * rows))()

    def encode(self, x: int, payload: Any) -> bool:
        """Encode ``x``; False, with the payload undefined, if a value cannot be coded."""
        fmt, dtype, rows, n, threads = self._constants()
        return self._encode(fmt, dtype, x, rows, n, n, None, None, payload, threads) < 0

    def decode(self, payload: Any, y: int) -> bool:
        """Decode into ``y``; False, with ``y`` undefined, if the payload is invalid."""
        fmt, dtype, rows, n, threads = self._constants()
        return self._decode(fmt, payload, dtype, y, rows, n, n, None, threads) < 0

    def delta_encode(
        self, x: int, before: Any, after: Any, payload: Any
    ) -> list[tuple[float, float]] | None:
        """The AQ-SGD step; each row's energies of change and value.

        None, with the payload and ``after`` undefined, if a value cannot be coded.
        """
        fmt, dtype, rows, n, threads = self._constants()
        x_and_references = dtype, x, rows, n, n, None, *self._how, before, after
        energies = self._energies
        if self._delta_encode(fmt, *x_and_references, None, payload, energies, threads) >= 0:
            return None
        found = energies[:]
        return list(zip(found[::2], found[1::2], strict=True))

    def delta_decode(self, payload: Any, before: Any, after: Any, y: int) -> bool:
        """The receiver's half; False, with ``after`` and ``y`` undefined, if it is invalid."""
        fmt, dtype, rows, n, threads = self._constants()
        references = rows, n, None, *self._how, before, after
        return self._delta_decode(fmt, payload, *references, dtype, y, n, threads) < 0

    def _constants(self) -> tuple[Any, int, int, int, int]:
        return self._fmt, self._dtype, self._rows, self._n, torch.get_num_threads()


def bound(
    fmt: IntegerFormat, dtype: torch.dtype, rows: int, n: int, how: Kept = torch.float32
) -> Bound | None:
    """The kernels bound to tensors [rows, n] of ``dtype``, and to references that are kept as
    ``how``; None where they do not take them."""
    fits = dtype in (torch.float32, torch.bfloat16) and rows * n > 0 and not fmt.stochastic
    return Bound(fmt, dtype, rows, n, how) if fits and library.library() is not None else None


def address(view: memoryview, start: int = 0) -> Any:
    """Where a writable buffer's bytes lie from ``start`` on; keeps the buffer alive."""
    return ctypes.byref(ctypes.c_char.from_buffer(view, start))
