"""What all compiled kernels ask of tensors, and how they are told of their rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.native import library

#: Numbers of the element types, as in csrc/level.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def usable(x: Tensor) -> bool:
    """Whether the kernels are there and take ``x``'s device and dtype."""
    fits = x.device.type == "cpu" and x.dtype in DTYPES
    return fits and library.library() is not None


def row_lengths(sizes: Sequence[int] | None) -> Any:
    """``sizes`` as an array that ctypes takes, or None."""
    return None if sizes is None else (ctypes.c_int64 * len(sizes))(*sizes)


def arguments(x: Tensor, sizes: Sequence[int] | None) -> tuple[Any, ...]:
    """What kernels are told of ``x`` [rows, n], rows contiguous, which has to outlive this."""
    return DTYPES[x.dtype], x.data_ptr(), *x.shape, x.stride(0), row_lengths(sizes)


def with_rows(x: Tensor) -> Tensor:
    """``x`` [rows, n] with contiguous rows, copied only if it has none."""
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()
