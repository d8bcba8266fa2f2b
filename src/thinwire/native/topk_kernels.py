"""Top-k on the compiled kernels, or on the twin where there are none or the tensor is elsewhere.

Every function has the name, arguments and bytes of its definition in ``topk``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.native import library, topk
from thinwire.native.topk import DTYPES, Rows

_INT, _LONG, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_ROWS = (_LONG, _POINTER, _POINTER, _POINTER, _LONG, _INT)
_SIGNATURES = {
    "encode": (
        _LONG,
        (_POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _POINTER),
    ),
    "put_values": (_INT, (_POINTER, _POINTER, _POINTER)),
    "take_values": (_INT, (_POINTER, _LONG, _POINTER)),
    "decode": (_INT, (_POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _LONG)),
}
_NOT_FINITE = -1


def encode(x: Tensor, rows: Rows, out: Tensor, values: Tensor | None) -> Tensor | None:
    call = _function("encode", x)
    if call is None:
        return topk.encode(x, rows, out, values)
    starts = torch.empty(len(rows.sizes) + 1, dtype=torch.int64)
    written = call(
        *_rows(rows, x.dtype),
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        out.numel(),
        *_matrix(values),
        starts.data_ptr(),
    )
    if written == _NOT_FINITE:
        return None
    if written < 0:
        raise MemoryError(f"top-k kernel: error {written} on rows of up to {x.shape[1]} values")
    return starts


def put_values(rows: Rows, coded: Tensor, starts: Tensor, out: Tensor) -> None:
    call = _function("put_values", out)
    if call is None:
        topk.put_values(rows, coded, starts, out)
        return
    call(*_rows(rows, torch.float32), coded.data_ptr(), starts.data_ptr(), out.data_ptr())


def take_values(rows: Rows, payload: Tensor) -> Tensor | None:
    call = _function("take_values", payload)
    if call is None:
        return topk.take_values(rows, payload)
    coded = payload.new_empty(int(rows.widths.sum()))
    good = call(*_rows(rows, torch.float32), payload.data_ptr(), payload.numel(), coded.data_ptr())
    return coded if good else None


def decode(rows: Rows, payload: Tensor, values: Tensor | None, y: Tensor) -> bool:
    call = _function("decode", payload)
    if call is None:
        return topk.decode(rows, payload, values, y)
    return bool(
        call(
            *_rows(rows, y.dtype),
            payload.data_ptr(),
            payload.numel(),
            *_matrix(values),
            y.data_ptr(),
            y.stride(0),
            y.shape[1],
        )
    )


def _rows(rows: Rows, dtype: torch.dtype) -> tuple[int, ...]:
    return (
        len(rows.sizes),
        rows.sizes.data_ptr(),
        rows.kept.data_ptr(),
        rows.widths.data_ptr(),
        rows.modulus,
        DTYPES[dtype],
    )


def _matrix(values: Tensor | None) -> tuple[int | None, int]:
    """The address and row stride of a matrix, or of none."""
    return (None, 0) if values is None else (values.data_ptr(), values.stride(0))


def _function(name: str, x: Tensor) -> Callable[..., int] | None:
    handle = library.library() if x.device.type == "cpu" else None
    if handle is None:
        return None
    return _declared(handle, name)


@functools.cache
def _declared(handle: ctypes.CDLL, name: str) -> Callable[..., Any]:
    result, arguments = _SIGNATURES[name]
    return library.function(handle, f"tw_topk_{name}", result, *_ROWS, *arguments)
