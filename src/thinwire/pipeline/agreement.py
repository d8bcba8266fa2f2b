"""What the ranks of a pipeline tell each other of a step before it, and of a failure after."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import xxhash
from torch import Tensor

from thinwire.boundary import Boundary, MicroBatch, StepPlan
from thinwire.errors import LinkError, NonFiniteError, PeerAborted
from thinwire.network import TransportError

_LONGEST_DEADLINE = 7 * 86400


def check_deadline(seconds: float) -> None:
    """Raise ValueError for a time that no wait can keep."""
    if not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST_DEADLINE:
        raise ValueError(
            f"a deadline of {seconds} s: it must be over 0 and at most {_LONGEST_DEADLINE} s"
        )


def check_numbers(window: int, seed: int, max_grad_norm: float | None) -> None:
    """Raise ValueError for settings of a pipeline that are no sensible numbers."""
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"window={window!r}: a whole number of receives to post ahead, from 1")
    if not isinstance(seed, int):
        raise ValueError(f"seed={seed!r} is no whole number")
    if max_grad_norm is not None and not (
        isinstance(max_grad_norm, int | float) and 0 < max_grad_norm < math.inf
    ):
        raise ValueError(f"max_grad_norm={max_grad_norm!r}: a number over 0, or None")


def input_error(
    boundaries: Sequence[Boundary],
    max_rows: int,
    n_microbatches: int,
    inputs: Sequence[Any],
    sample_ids: Any,
    lengths: Any,
    fixed: bool,
    next_ids: Any = None,
) -> str | None:
    """What is wrong with the inputs of the first stage, in one line; None if nothing is.

    ``fixed``: an edge is left to torch's operations, which take the declared shape only.
    """
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
    wrong = _ids_error("sample_ids", sample_ids, rows)
    wrong = wrong or _ids_error("next_sample_ids", next_ids, None)
    if wrong is None and next_ids is not None and len(next_ids) > max_rows * n_microbatches:
        wrong = f"{len(next_ids)} next_sample_ids; a step has at most {max_rows * n_microbatches}"
    return wrong or _lengths_error(lengths, sizes)


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


def scale_error(loss_scale: Any) -> str | None:
    """What is wrong with a loss scale."""
    if loss_scale is None:
        return None
    if isinstance(loss_scale, int | float) and 0 < loss_scale < math.inf:
        return None
    return f"loss_scale={loss_scale!r}: a finite number above 0, or None"


def keys_of(ids: Tensor) -> list[int]:
    """The key of each id, [rows] int64, or of each pair of an id and a seed, [rows, 2].

    A pair's key is a 64-bit hash of both, as a signed number.
    """
    if ids.dim() == 1:
        found: list[int] = ids.tolist()
        return found
    hashes = [xxhash.xxh3_64_intdigest(struct.pack("<2q", *pair)) for pair in ids.tolist()]
    return [h - (1 << 64) * (h >> 63) for h in hashes]


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


def header(
    train: bool,
    codec: bool,
    inputs: Sequence[Tensor],
    sample_ids: Tensor | None,
    lengths: Tensor | None,
    error: str | None,
    next_ids: Tensor | None = None,
    known: str | None = None,
    loss_scale: float | None = None,
) -> dict[str, Any]:
    """What the first stage's rank tells the others of a step, as JSON values.

    ``known``: a digit for each row, 1 where its input is that of its sample's last visit.
    """
    if error is not None:
        return {"error": error}
    shape = list(inputs[0].shape)
    return {
        "error": None,
        "train": train,
        "codec": codec,
        "rows": shape[0] if shape else 0,
        "seq_len": shape[1] if len(shape) > 1 else None,
        "ids": None if sample_ids is None else keys_of(sample_ids),
        "next": None if next_ids is None else keys_of(next_ids),
        "lengths": None if lengths is None else lengths.tolist(),
        "known": known,
        "loss_scale": loss_scale,
    }


def step_plan(
    header: dict[str, Any], step: int, n_microbatches: int, seed: int, frozen: int = 0
) -> StepPlan:
    """The plan that follows from a header."""
    ids, lengths, known = header["ids"], header["lengths"], header["known"]
    return StepPlan(
        step,
        header["train"],
        split_rows(header["rows"], ids, lengths, n_microbatches, known),
        header["seq_len"],
        header["codec"],
        seed,
        None if header["next"] is None else tuple(header["next"]),
        frozen,
        header["loss_scale"],
    )


def split_rows(
    rows: int,
    ids: list[int] | None,
    lengths: list[int] | None,
    n_microbatches: int,
    known: str | None = None,
) -> tuple[MicroBatch, ...]:
    """The micro-batches into which torch cuts a batch (as ``torch.tensor_split`` does)."""
    base, extra = divmod(rows, n_microbatches)
    found, at = [], 0
    for k in range(n_microbatches):
        size = base + (k < extra)
        cut = slice(at, at + size)
        found.append(
            MicroBatch(
                size,
                None if ids is None else tuple(ids[cut]),
                None if lengths is None else tuple(lengths[cut]),
                known is not None and "0" not in known[cut],
            )
        )
        at += size
    return tuple(found)


def origin_of(error: BaseException, rank: int) -> BaseException:
    """The error of ours inside one that torch's schedule wrapped around it, else the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LinkError | NonFiniteError):
            return cause
        if isinstance(cause, TransportError):
            return LinkError(f"rank {rank}: {cause}")
        cause = cause.__cause__
    return error


def reason_of(error: BaseException, rank: int) -> tuple[str, str]:
    """(kind, text) of an error for the other ranks: ours as it is, others by their first cause."""
    if isinstance(error, PeerAborted):
        return error.kind, str(error)
    if isinstance(error, LinkError | NonFiniteError):
        return type(error).__name__, str(error)
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    kind = type(first).__name__
    return kind, f"a stage of rank {rank} failed with {kind}: {' '.join(str(first).split())}"
