"""The eager twin of the AQ-SGD step: what the fused kernels must equal, bit for bit.

A sample's reference m is a row of n values, kept as float32, as bfloat16 (rounded to nearest even),
or encoded in an integer format. With x the row's new value, in float32 throughout:

    payload = encode(x - m);  y = m + decode(payload);  m <- y, as it is kept

The receiver computes on y. Both ends do the same single operations on the same payload, so their
references stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.native import reference
from thinwire.native.reference import IntegerFormat

#: How references are kept: torch.float32, torch.bfloat16, or an integer format's bytes.
Kept = torch.dtype | IntegerFormat

_BLOCK = 256


def delta_encode_rows(
    x: Tensor, m: Tensor, fmt: IntegerFormat, seeds: Tensor, out: Tensor
) -> Tensor | None:
    """The step for ``x`` and ``m`` [rows, n] float32; ``out`` [rows, row_nbytes] uint8.

    Returns y [rows, n]; None, with ``out`` undefined, if a change cannot be coded.
    """
    if not reference.encode_rows(x - m, fmt, seeds, out):
        return None
    return delta_decode_rows(out, m, fmt)


def delta_decode_rows(payload: Tensor, m: Tensor, fmt: IntegerFormat) -> Tensor | None:
    """The receiver's half: y [rows, n]; None if the payload's parameters are invalid."""
    change = reference.decode_rows(payload, m.shape[1], fmt)
    return None if change is None else m + change


def read_rows(kept: Sequence[Tensor], n: int, how: Kept) -> Tensor:
    """References (1-D, as they are kept) of ``n`` values as [rows, n] float32."""
    rows = torch.stack(list(kept))
    if isinstance(how, torch.dtype):
        return rows.to(torch.float32)
    values = reference.decode_rows(rows, n, how)
    if values is None:
        raise ValueError("a stored reference holds an invalid scale or offset")
    return values


def keep_rows(y: Tensor, how: Kept) -> Tensor | None:
    """``y`` [rows, n] float32 as it is kept, a row each; None if a value cannot be kept."""
    if isinstance(how, torch.dtype):
        rows = y.to(how)
        return rows if bool(torch.isfinite(rows).all()) else None
    rows = y.new_empty((y.shape[0], reference.row_nbytes(y.shape[1], how)), dtype=torch.uint8)
    seeds = torch.zeros(y.shape[0], dtype=torch.int64, device=y.device)
    return rows if reference.encode_rows(y, how, seeds, rows) else None


def energies(v: Tensor) -> Tensor:
    """The sum of squares of each row of ``v`` [rows, n] float32: by blocks of 256 values, then
    of those, each by halving."""
    squares = v * v
    short = -v.shape[1] % _BLOCK
    padded = torch.nn.functional.pad(squares, (0, short)).unflatten(1, (-1, _BLOCK))
    return reference.tree_sum(reference.tree_sum(padded))
