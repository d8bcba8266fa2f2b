"""What the ranks of a pipeline tell each other of a step before it, and of a failure after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from thinwire.edge import Boundary, MicroBatch, StepPlan
from thinwire.errors import LinkError, NonFiniteError


def input_error(
    boundaries: Sequence[Boundary],
    max_rows: int,
    n_microbatches: int,
    inputs: Sequence[Tensor],
    sample_ids: Tensor | None,
    lengths: Tensor | None,
) -> str | None:
    """What is wrong with the inputs of the first stage, in one line; None if nothing is."""
    if len(inputs) != len(boundaries):
        return f"the first stage takes {len(boundaries)} inputs, {len(inputs)} were given"
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
    for what, values in (("sample_ids", sample_ids), ("lengths", lengths)):
        if values is not None and (str(values.dtype) != "torch.int64" or values.shape != (rows,)):
            return (
                f"{what} must be int64 of shape ({rows},), "
                f"not {values.dtype} of shape {tuple(values.shape)}"
            )
    if lengths is not None:
        longest = sizes[1] if len(sizes) > 1 else 1
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > longest:
            return f"lengths must be within 0 … {longest}, found {low} … {high}"
    return None


def header(
    train: bool,
    codec: bool,
    inputs: Sequence[Tensor],
    sample_ids: Tensor | None,
    lengths: Tensor | None,
    error: str | None,
) -> dict[str, Any]:
    """What the first stage's rank tells the others of a step, as JSON values."""
    shape = list(inputs[0].shape) if inputs else []
    return {
        "error": error,
        "train": train,
        "codec": codec,
        "rows": shape[0] if shape else 0,
        "seq_len": shape[1] if len(shape) > 1 else None,
        "ids": None if sample_ids is None or error else sample_ids.tolist(),
        "lengths": None if lengths is None or error else lengths.tolist(),
    }


def step_plan(header: dict[str, Any], step: int, n_microbatches: int, seed: int) -> StepPlan:
    """The plan that follows from a header."""
    return StepPlan(
        step,
        header["train"],
        split_rows(header["rows"], header["ids"], header["lengths"], n_microbatches),
        header["seq_len"],
        header["codec"],
        seed,
    )


def split_rows(
    rows: int, ids: list[int] | None, lengths: list[int] | None, n_microbatches: int
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
            )
        )
        at += size
    return tuple(found)


def origin_of(error: BaseException) -> BaseException:
    """The error of ours inside one that torch's schedule wrapped around it, else the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (LinkError, NonFiniteError)):
            return cause
        cause = cause.__cause__
    return error
