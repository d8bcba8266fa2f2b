"""What the ranks of a pipeline check before they trust each other with a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from thinwire.edge import Boundary, MicroBatch
from thinwire.errors import LinkError, NonFiniteError


def group_ranks(group: Any) -> list[int]:
    """The global ranks of a process group (None: the default group), in order."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def describe(boundaries: Sequence[Boundary]) -> list[dict[str, Any]]:
    """Boundary tensors as JSON values."""
    return [
        {"shape": list(b.shape), "dtype": str(b.dtype), "requires_grad": b.requires_grad}
        for b in boundaries
    ]


def digest(parameter: nn.Parameter) -> int:
    """A hash of a parameter's bytes."""
    data = parameter.detach().cpu().contiguous().view(-1)
    return xxhash.xxh3_64_intdigest(data.numpy().data.cast("B"))


def check_agreement(found: list[dict[str, Any]], num_stages: int) -> dict[int, Any]:
    """Compare what all ranks said at set-up; returns (inputs, outputs) by stage.

    Raises the same ValueError on every rank if they differ, or if stages do not fit together.
    """
    for rank, other in enumerate(found):
        for key in ("microbatches", "plan"):
            if json.dumps(other[key]) != json.dumps(found[0][key]):
                raise ValueError(
                    f"rank {rank} has {key} {other[key]}, rank 0 {found[0][key]}: "
                    "all ranks need the same"
                )
    stages = {int(k): v for other in found for k, v in other["stages"].items()}
    for index in range(num_stages):
        if index not in stages:
            raise ValueError(f"no rank holds stage {index} of {num_stages}")
    for edge in range(num_stages - 1):
        _check_boundary(edge, stages[edge][1], stages[edge + 1][0])
    return stages


def _check_boundary(edge: int, outputs: list[Any], inputs: list[Any]) -> None:
    """The outputs of one stage are the inputs of the next; float dtypes may differ."""
    where = f"stage {edge} to stage {edge + 1}"
    if len(outputs) != len(inputs):
        raise ValueError(
            f"{where}: output_args has {len(outputs)} tensors, input_args {len(inputs)}"
        )
    for index, (out, into) in enumerate(zip(outputs, inputs, strict=True)):
        for key in ("shape", "requires_grad"):
            if out[key] != into[key]:
                raise ValueError(
                    f"{where}, tensor {index}: output_args has {key} {out[key]}, "
                    f"input_args {into[key]}"
                )


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
    rows = inputs[0].shape[0] if inputs[0].dim() else 0
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
        longest = inputs[0].shape[1] if inputs[0].dim() > 1 else 1
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > longest:
            return f"lengths must be within 0 … {longest}, found {low} … {high}"
    return None


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
