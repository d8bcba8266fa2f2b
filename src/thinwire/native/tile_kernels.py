"""The codec tile's compiled kernels, called through ctypes: all rows of a tensor at once.

They equal the functions of ``tile`` bit for bit, on rows of several lengths if need be. The GIL is
released; rows of large tensors are shared out over ``torch.get_num_threads()`` threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.native import library
from thinwire.native.tensors import DTYPES, arguments, usable, with_rows
from thinwire.native.tile import TileFormat

__all__ = ["DTYPES", "decode", "encode", "usable"]

_INT, _LONG, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES = {
    "encode": (_INT, _INT, _POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "decode": (_INT, _POINTER, _INT, _POINTER, _LONG, _LONG, _LONG, _POINTER, _INT),
}


def encode(x: Tensor, sizes: Sequence[int] | None, fmt: TileFormat, out: Tensor) -> int:
    """Encode the first ``sizes[i]`` values of each row of ``x`` [rows, n] into ``out``, contiguous.

    Returns -1, or the place (row * n + index) of a value that is not finite, with ``out``
    undefined.
    """
    x = with_rows(x)
    threads = torch.get_num_threads()
    return _function("encode")(fmt.bits, *arguments(x, sizes), out.data_ptr(), threads)


def decode(payload: Tensor, sizes: Sequence[int] | None, fmt: TileFormat, y: Tensor) -> bool:
    """Decode into ``y`` [rows, n] with contiguous rows; zeros beyond each row's size.

    Returns False, with ``y`` untouched, if a scale in the payload is invalid.
    """
    threads = torch.get_num_threads()
    return _function("decode")(fmt.bits, payload.data_ptr(), *arguments(y, sizes), threads) < 0


def _function(name: str) -> Callable[..., int]:
    handle = library.library()
    assert handle is not None
    return _declared(handle, name)


@functools.cache
def _declared(handle: ctypes.CDLL, name: str) -> Callable[..., int]:
    return library.function(handle, f"tw_tile_{name}", _LONG, *_SIGNATURES[name])
