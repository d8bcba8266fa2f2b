"""The compiled kernels of what both ends expect, called through ctypes; ``expect`` is their twin.

Tensors are contiguous, on the CPU, and float32 where nothing else is said. The GIL is released.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.native import library
from thinwire.native.tensors import usable

__all__ = ["add", "centre", "expect", "largest", "learn", "stand", "usable", "weigh"]

_INT, _LONG, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_TABLES = (_INT, _POINTER, _POINTER, _POINTER)
_SIGNATURES = {
    "": (*_TABLES, _LONG, _LONG, _POINTER),
    "_centre": (*_TABLES, _POINTER, _LONG, _LONG, _POINTER, _POINTER),
    "_add": (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER),
    "_weigh": (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER),
    "_stand": (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER),
    "_largest": (_POINTER, _LONG, _LONG, _POINTER),
    "_learn": (
        *(_POINTER, _POINTER, _POINTER, _LONG, _POINTER),
        *(_POINTER, _LONG, _LONG, _INT, _POINTER, _POINTER),
    ),
}


def expect(ids: Sequence[Tensor], tables: Sequence[Tensor]) -> Tensor:
    n, width = len(ids[0]), tables[0].shape[1]
    y = torch.empty((n, width))
    told, kept = _tables(ids, tables, n, width)
    _function("")(*told, n, width, y.data_ptr())
    del kept
    return y


def centre(ids: Sequence[Tensor], tables: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    codes, scales = torch.empty_like(x), torch.empty(len(x))
    told, kept = _tables(ids if tables else [], tables, *x.shape)
    _function("_centre")(*told, x.data_ptr(), *x.shape, codes.data_ptr(), scales.data_ptr())
    del kept
    return codes, scales


def add(y: Tensor, part: Tensor, scales: Tensor, powers: Tensor) -> None:
    if part.shape != y.shape or scales.shape != y.shape[:1] or powers.shape != y.shape[1:]:
        raise ValueError(f"a part of {tuple(part.shape)} does not fit {tuple(y.shape)}")
    at = [t.data_ptr() for t in (part, scales, powers)]
    _function("_add")(*at, *y.shape, y.data_ptr())


def weigh(x: Tensor, base: Tensor | None, e: Tensor) -> Tensor:
    _check_alike(x, e, base)
    x, sums = x.contiguous(), torch.empty((len(x), 2), dtype=torch.float64)
    _function("_weigh")(x.data_ptr(), _address(base), e.data_ptr(), *x.shape, sums.data_ptr())
    return sums


def stand(base: Tensor | None, e: Tensor, gains: Tensor) -> Tensor:
    _check_alike(e, e, base)
    y = torch.empty_like(e)
    at = _address(base), e.data_ptr(), gains.data_ptr()
    _function("_stand")(*at, *e.shape, y.data_ptr())
    return y


def largest(x: Tensor) -> Tensor:
    x, out = x.contiguous(), torch.empty(len(x))
    _function("_largest")(x.data_ptr(), *x.shape, out.data_ptr())
    return out


def learn(
    sums: Tensor,
    counts: Tensor,
    values: Tensor,
    ids: Tensor,
    x: Tensor,
    unit: int,
    rest: bool,
) -> Tensor | None:
    if len(ids) != len(x) or x.shape[1] != sums.shape[1] or not x.is_contiguous():
        raise ValueError(f"{len(ids)} ids of vectors {tuple(x.shape)} do not fit the table")
    ids = ids.contiguous()
    most = torch.empty(len(x)) if rest else None
    at = [t.data_ptr() for t in (sums, counts, values)]
    left = x if rest else None
    into = *x.shape, unit, _address(left), _address(most)
    _function("_learn")(*at, len(sums), ids.data_ptr(), x.data_ptr(), *into)
    return most


def _check_alike(x: Tensor, e: Tensor, base: Tensor | None) -> None:
    if x.shape != e.shape or (base is not None and base.shape != e.shape):
        raise ValueError(f"values of {tuple(x.shape)} and {tuple(e.shape)} are expected alike")


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _tables(
    ids: Sequence[Tensor], tables: Sequence[Tensor], n: int, width: int
) -> tuple[tuple[Any, ...], Any]:
    """What kernels are told of ``tables`` and ``ids`` [n] each, and what has to outlive that."""
    if len(ids) != len(tables) or any(len(each) != n for each in ids):
        raise ValueError(f"{[len(each) for each in ids]} ids, {len(tables)} tables are read by {n}")
    if any(table.shape[1] != width for table in tables):
        raise ValueError(f"tables of {[table.shape[1] for table in tables]} values, not of {width}")
    ids, count = [each.contiguous() for each in ids], len(tables)
    pointers = ctypes.c_void_p * count
    at = pointers(*[each.data_ptr() for each in ids])
    values = pointers(*[table.data_ptr() for table in tables])
    sizes = (ctypes.c_int64 * count)(*[len(table) for table in tables])
    return (count, at, values, sizes), ids


def _function(name: str) -> Callable[..., None]:
    handle = library.library()
    assert handle is not None
    return _declared(handle, name)


@functools.cache
def _declared(handle: ctypes.CDLL, name: str) -> Callable[..., None]:
    return library.function(handle, f"tw_expect{name}", None, *_SIGNATURES[name])
