"""The AQ-SGD step around what both ends expect, as one call a message, for ends on the CPU.

Equal to the bit to the operations that ``schemes.closed_loop`` is made of, but for the gains that a
sender finds, which travel. Tensors are contiguous, and float32 where nothing else is said.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.native import library
from thinwire.native.delta_reference import Kept
from thinwire.native.kernels import format_of
from thinwire.native.reference import IntegerFormat
from thinwire.native.tensors import DTYPES

_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Known(ctypes.Structure):
    """``tw_known`` in csrc/expected_api.h."""

    _fields_ = (
        *(("rows", _LONG), ("n", _LONG), ("width", _LONG)),
        *(("count", _LONG), ("ids", _POINTER), ("tables", _POINTER), ("sizes", _POINTER)),
        *(("ready", _POINTER), ("scale", _FLOAT), ("factor", _FLOAT)),
        *(("base", _POINTER), ("from_", _POINTER), ("packed", _POINTER)),
    )


class _Becomes(ctypes.Structure):
    """``tw_becomes``."""

    _fields_ = (("y", _POINTER), ("to", _POINTER), ("lesson", _POINTER))


class Around:
    """What is known of a message of ``shape`` (rows, n), positions of ``width`` values each.

    ``tables`` are read by ``ids`` [rows * n / width] each; or ``ready`` [rows, n] is what they, and
    more, have said. Times ``scale`` that is expected. Beside it ``base`` [rows, n] may be known, or
    references, a row each, kept as ``how``. Holds what it is given.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        width: int,
        *,
        ids: Sequence[Tensor] = (),
        tables: Sequence[Tensor] = (),
        ready: Tensor | None = None,
        scale: float = 1.0,
        base: Tensor | None = None,
        references: Any = None,
        how: Kept = torch.float32,
    ) -> None:
        known = self._known = _Known(shape[0], shape[1], width)
        known.scale, known.factor = scale, 1.0 / scale
        self._held: list[Any] = [ids, tables, ready, base, references]
        if ready is not None:
            known.ready = ready.data_ptr()
        else:
            count = known.count = len(tables)
            sizes = (_LONG * count)(*map(len, tables))
            found = _pointers(ids), _pointers(tables), sizes
            self._held += found
            known.ids, known.tables, known.sizes = map(ctypes.addressof, found)
        if base is not None:
            known.base = base.data_ptr()
        elif references is not None:
            known.from_ = ctypes.addressof(references)
        if isinstance(how, IntegerFormat):
            known.packed = ctypes.addressof(format_of(how)._obj)

    def encode(
        self,
        fmt: IntegerFormat,
        dtype: torch.dtype,
        x: int,
        payload: Any,
        y: Tensor,
        after: Any,
        lesson: Tensor | None,
        ordinary: int,
    ) -> list[tuple[float, float]] | None:
        """``x`` (where it lies) into ``payload``, gains first; each row's energies of what was left
        and of the value.

        ``y`` [rows, n] gets what the receiver will have, ``after`` the references that come of it,
        and ``lesson`` what tables learn from. None, with all of them undefined, where a value
        cannot be coded, or a position is far beyond the ``ordinary``-th smallest magnitude (0: no
        matter).
        """
        known = self._known
        out = _becomes(y, after, lesson)
        energies = (_FLOAT * (2 * known.rows))()
        found = _functions()[0](
            format_of(fmt),
            ctypes.byref(known),
            DTYPES[dtype],
            x,
            ctypes.byref(out),
            ordinary,
            payload,
            energies,
            torch.get_num_threads(),
        )
        if found != -1:
            return None
        told = energies[:]
        return list(zip(told[::2], told[1::2], strict=True))

    def decode(
        self,
        fmt: IntegerFormat,
        payload: Any,
        dtype: torch.dtype,
        x: int,
        y: Tensor,
        after: Any,
        lesson: Tensor | None,
    ) -> bool:
        """The reverse, into ``x`` of ``dtype`` (where it lies); False, with everything undefined,
        where the payload is invalid."""
        out = _becomes(y, after, lesson)
        found: int = _functions()[1](
            format_of(fmt),
            ctypes.byref(self._known),
            payload,
            ctypes.byref(out),
            DTYPES[dtype],
            x,
            torch.get_num_threads(),
        )
        return found < 0


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (_POINTER * len(tensors))(*[t.data_ptr() for t in tensors])


def _becomes(y: Tensor, after: Any, lesson: Tensor | None) -> _Becomes:
    to = None if after is None else ctypes.addressof(after)
    return _Becomes(y.data_ptr(), to, None if lesson is None else lesson.data_ptr())


def _functions() -> tuple[Any, Any]:
    handle = library.library()
    assert handle is not None
    return _declared(handle)


@functools.cache
def _declared(handle: ctypes.CDLL) -> tuple[Any, Any]:
    declare = functools.partial(library.function, handle)
    both = _LONG, _POINTER, _POINTER
    encode = _INT, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _INT
    decode = _POINTER, _POINTER, _INT, _POINTER, _INT
    return (
        declare("tw_expected_encode", *both, *encode),
        declare("tw_expected_decode", *both, *decode),
    )
