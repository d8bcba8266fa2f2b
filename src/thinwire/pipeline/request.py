"""What a rank was given for a step, and whether it makes sense."""

from __future__ import annotations

import dataclasses
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from torch import Tensor

from thinwire.boundary import Boundary
from thinwire.store import signed


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of ``Pipeline.step`` or ``eval``, as they were given."""

    train: bool
    inputs: Sequence[Any]
    target: Any = None
    sample_ids: Any = None
    lengths: Any = None
    next_ids: Any = None
    loss_scale: Any = None
    codec: bool = True
    dense: bool = False
    measure: bool = False
    context: Any = None


def input_error(
    boundaries: Sequence[Boundary],
    request: Request,
    max_rows: int,
    n_microbatches: int,
    fixed: bool,
) -> str | None:
    """What is wrong with what the first stage was given, in one line; None if nothing is.

    ``fixed``: an edge is left to torch's operations, which take the declared shape only.
    """
    inputs, next_ids = request.inputs, request.next_ids
    if len(inputs) != len(boundaries):
        return f"the first stage takes {len(boundaries)} inputs, {len(inputs)} were given"
    for boundary, x in zip(boundaries, inputs, strict=True):
        if not isinstance(x, Tensor) or x.is_meta:
            return f"input {boundary.index} is {_kind_of(x)}; a tensor with values is needed"
    sizes = list(inputs[0].shape)
    rows = sizes[0] if sizes else 0
    if rows < n_microbatches:
        return (
            f"a batch of {rows} rows cannot fill {n_microbatches} micro-batches; "
            "use fewer micro-batches, or leave the rest of the epoch out"
        )
    for boundary, x in zip(boundaries, inputs, strict=True):
        most = boundary.shape_for(max_rows * n_microbatches, None)
        if x.dim() != len(most) or any(d > m for d, m in zip(x.shape, most, strict=True)):
            return (
                f"input {boundary.index} has shape {tuple(x.shape)}; at most {most} was declared "
                "(input_args of the stages, times the micro-batches)"
            )
        if fixed and tuple(x.shape) != most:
            return (
                f"input {boundary.index} has shape {tuple(x.shape)}; with an edge that is off, "
                f"torch's operations take {most} only: use raw there, or fill the batch up"
            )
        if x.dtype.is_floating_point != boundary.dtype.is_floating_point:
            return f"input {boundary.index} is {x.dtype}; {boundary.dtype} was declared"
    wrong = _ids_error("sample_ids", request.sample_ids, rows)
    wrong = wrong or _ids_error("next_sample_ids", next_ids, None)
    if wrong is None and next_ids is not None and len(next_ids) > max_rows * n_microbatches:
        wrong = f"{len(next_ids)} next_sample_ids; a step has at most {max_rows * n_microbatches}"
    wrong = wrong or _lengths_error(request.lengths, sizes) or _scale_error(request.loss_scale)
    return wrong or context_error(request.context, rows)


def context_error(context: Any, rows: int | None) -> str | None:
    """What is wrong with a step's ``context`` for so many rows (None: any number)."""
    if context is None:
        return None
    if not isinstance(context, Mapping):
        return f"context must be a dictionary of tensors, not {_kind_of(context)}"
    for name, tensor in context.items():
        what = f"context[{name!r}]"
        if not isinstance(name, str):
            return f"context has the name {name!r}; names are text"
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            return f"{what} is {_kind_of(tensor)}; int64 tensors by name are needed"
        shaped = tensor.dim() in (1, 2) and rows in (None, tensor.shape[0])
        if str(tensor.dtype) != "torch.int64" or not shaped:
            return (
                f"{what} must be int64 of shape ({rows},) or ({rows}, positions), not "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    return None


def with_own_context(request: Request) -> Request:
    """The same with a copy of its context, which stays as it is whatever becomes of the inputs."""
    context = request.context
    if not isinstance(context, Mapping) or context_error(context, None) is not None:
        return request  # it is about to be refused
    own = {name: tensor.detach().clone() for name, tensor in context.items()}
    return dataclasses.replace(request, context=own)


def context_digests(context: Mapping[str, Tensor] | None) -> dict[str, str]:
    """A hash of each tensor of a context, by which ranks find that they were given the same."""
    return {
        name: f"{list(tensor.shape)} {xxhash.xxh3_64_hexdigest(_bytes_of(tensor))}"
        for name, tensor in sorted((context or {}).items())
    }


def _bytes_of(tensor: Tensor) -> bytes:
    found: bytes = tensor.contiguous().cpu().numpy().tobytes()
    return found


def _ids_error(what: str, ids: Any, rows: int | None) -> str | None:
    """What is wrong with ids of ``rows`` rows (None: of any number)."""
    if ids is None:
        return None
    many = "rows" if rows is None else rows
    wanted = f"{what} must be int64 of shape ({many},), or ({many}, 2) with a seed beside each id"
    if not isinstance(ids, Tensor) or ids.is_meta:
        return f"{wanted}, not {_kind_of(ids)}"
    shaped = ids.dim() == 1 or (ids.dim() == 2 and ids.shape[1] == 2)
    if str(ids.dtype) != "torch.int64" or not shaped or rows not in (None, ids.shape[0]):
        return f"{wanted}, not {ids.dtype} of shape {tuple(ids.shape)}"
    return None


def _scale_error(loss_scale: Any) -> str | None:
    """What is wrong with a loss scale."""
    if loss_scale is None:
        return None
    if isinstance(loss_scale, int | float) and 0 < loss_scale <= sys.float_info.max:
        return None
    return f"loss_scale={loss_scale!r}: a finite number above 0, or None"


def keys_of(ids: Tensor) -> list[int]:
    """The key of each id, [rows] int64, or of each pair of an id and a seed, [rows, 2].

    A pair's key is a 64-bit hash of both, as a signed number.
    """
    if ids.dim() == 1:
        found: list[int] = ids.tolist()
        return found
    packed = [struct.pack("<2q", *pair) for pair in ids.tolist()]
    return [signed(xxhash.xxh3_64_intdigest(pair)) for pair in packed]


def _per_row_error(what: str, values: Any, rows: int) -> str | None:
    if values is None:
        return None
    if not isinstance(values, Tensor):
        return f"{what} must be an int64 tensor of shape ({rows},), not {_kind_of(values)}"
    if str(values.dtype) != "torch.int64" or values.shape != (rows,):
        return (
            f"{what} must be int64 of shape ({rows},), "
            f"not {values.dtype} of shape {tuple(values.shape)}"
        )
    return None


def _lengths_error(lengths: Any, sizes: Sequence[int]) -> str | None:
    wrong = _per_row_error("lengths", lengths, sizes[0])
    if lengths is None or wrong:
        return wrong
    longest = sizes[1] if len(sizes) > 1 else 1
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0 or high > longest:
        return f"lengths must be within 0 … {longest}, found {low} … {high}"
    return None


def _kind_of(value: Any) -> str:
    return "a meta tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
