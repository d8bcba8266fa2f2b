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
from thinwire.native.tensors import DTYPES, row_lengths, usable, with_rows

__all__ = ["decode", "delta_decode", "delta_encode", "encode", "usable"]

_SYMMETRIC, _STOCHASTIC, _STD, _HADAMARD = 1, 2, 4, 8
_FP16_MAX = torch.finfo(torch.float16).max


class _Format(ctypes.Structure):
    """``tw_format`` in csrc/level.h."""

    _fields_ = (("bits", ctypes.c_int32), ("flags", ctypes.c_int32), ("group", ctypes.c_int64))


def _format(fmt: IntegerFormat) -> Any:
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


def _pointers(rows: Sequence[Tensor] | Tensor) -> Any:
    """The address of each row's data, as an array that ctypes takes."""
    if isinstance(rows, Tensor):
        step = rows.stride(0) * rows.element_size()
        addresses = rows.data_ptr() + step * np.arange(rows.shape[0], dtype=np.int64)
        return (ctypes.c_void_p * rows.shape[0]).from_buffer(addresses.data)
    return (ctypes.c_void_p * len(rows))(*[row.data_ptr() for row in rows])


def _kept(how: Kept) -> tuple[int, Any]:
    return (DTYPES[how], None) if isinstance(how, torch.dtype) else (0, _format(how))


def encode(
    x: Tensor, sizes: Sequence[int] | None, fmt: IntegerFormat, seeds: Tensor, out: Tensor
) -> int:
    """Encode the first ``sizes[i]`` values of each row of ``x`` [rows, n] into ``out``.

    Returns -1, or the place (row * n + index) of a value that cannot be coded, with ``out``
    undefined.
    """
    x = with_rows(x)
    rows, n = x.shape
    return _functions().encode(
        _format(fmt),
        DTYPES[x.dtype],
        x.data_ptr(),
        rows,
        n,
        x.stride(0),
        row_lengths(sizes),
        seeds.data_ptr() if fmt.stochastic else None,
        out.data_ptr(),
        torch.get_num_threads(),
    )


def decode(payload: Tensor, sizes: Sequence[int] | None, fmt: IntegerFormat, y: Tensor) -> bool:
    """Decode into ``y`` [rows, n] with contiguous rows; zeros beyond each row's size.

    Returns False, with ``y`` undefined, if a scale or offset in the payload is invalid.
    """
    rows, n = y.shape
    return (
        _functions().decode(
            _format(fmt),
            payload.data_ptr(),
            DTYPES[y.dtype],
            y.data_ptr(),
            rows,
            n,
            y.stride(0),
            row_lengths(sizes),
            torch.get_num_threads(),
        )
        < 0
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
    rows, n = x.shape
    return _functions().delta_encode(
        _format(fmt),
        DTYPES[x.dtype],
        x.data_ptr(),
        rows,
        n,
        x.stride(0),
        row_lengths(sizes),
        *_kept(how),
        _pointers(before),
        _pointers(after),
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
            _format(fmt),
            payload.data_ptr(),
            rows,
            n,
            row_lengths(sizes),
            *_kept(how),
            _pointers(before),
            _pointers(after),
            0 if y is None else DTYPES[y.dtype],
            None if y is None else y.data_ptr(),
            0 if y is None else y.stride(0),
            torch.get_num_threads(),
        )
        < 0
    )
