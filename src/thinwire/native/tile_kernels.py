"""The codec tile's compiled kernels, called through ctypes: all rows of a tensor at once.

They equal the functions of ``tile`` bit for bit, on rows of several lengths if need be. The GIL is
released; rows of large tensors are shared out over ``torch.get_num_threads()`` threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.native import library
from thinwire.native.tile import TileFormat

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT, _LONG, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES = {
    "encode": (_INT, _INT, _POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "decode": (_INT, _POINTER, _INT, _POINTER, _LONG, _LONG, _LONG, _POINTER, _INT),
}


def usable(x: Tensor) -> bool:
    """Whether the kernels are there and take ``x``'s device and dtype."""
    fits = x.device.type == "cpu" and x.dtype in DTYPES
    return fits and library.library() is not None


def encode(x: Tensor, sizes: Sequence[int] | None, fmt: TileFormat, out: Tensor) -> int:
    """Encode the first ``sizes[i]`` values of each row of ``x`` [rows, n] into ``out``, contiguous.

    Returns -1, or the place (row * n + index) of a value that is not finite, with ``out``
    undefined.
    """
    rows, n = x.shape
    x = x if n <= 1 or x.stride(1) == 1 else x.contiguous()
    return _function("encode")(
        fmt.bits,
        DTYPES[x.dtype],
        x.data_ptr(),
        rows,
        n,
        x.stride(0),
        _lengths(sizes),
        out.data_ptr(),
        torch.get_num_threads(),
    )


def decode(payload: Tensor, sizes: Sequence[int] | None, fmt: TileFormat, y: Tensor) -> bool:
    """Decode into ``y`` [rows, n] with contiguous rows; zeros beyond each row's size.

    Returns False, with ``y`` untouched, if a scale in the payload is invalid.
    """
    rows, n = y.shape
    return (
        _function("decode")(
            fmt.bits,
            payload.data_ptr(),
            DTYPES[y.dtype],
            y.data_ptr(),
            rows,
            n,
            y.stride(0),
            _lengths(sizes),
            torch.get_num_threads(),
        )
        < 0
    )


def _lengths(sizes: Sequence[int] | None) -> Any:
    return None if sizes is None else (ctypes.c_int64 * len(sizes))(*sizes)


def _function(name: str) -> Callable[..., int]:
    handle = library.library()
    assert handle is not None
    return _declared(handle, name)


@functools.cache
def _declared(handle: ctypes.CDLL, name: str) -> Callable[..., int]:
    return library.function(handle, f"tw_tile_{name}", _LONG, *_SIGNATURES[name])
