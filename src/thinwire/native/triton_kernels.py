"""The kernels of the integer codecs and of the AQ-SGD step for CUDA tensors, by way of Triton.

The same functions as in ``kernels``, which they equal bit for bit, as both do ``reference`` and
``delta_reference``. Triton is optional, and imported when it is first needed. Work is queued on the
current stream; the one wait is for the answer, at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.native import triton_launch as launch
from thinwire.native.delta_reference import Kept
from thinwire.native.reference import IntegerFormat
from thinwire.native.tensors import with_rows
from thinwire.native.triton_launch import NO_REFERENCES, Layout, References

_FINE = 2**63 - 1


def _refuse_rotated(*formats: Kept) -> None:
    """Raise ValueError for formats with ``hadamard``, a flag that would be lost."""
    for how in formats:
        if isinstance(how, IntegerFormat) and how.hadamard:
            raise ValueError(f"the GPU kernels do not rotate, as {how} demands; use the eager twin")


def encode(
    x: Tensor, sizes: Sequence[int] | None, fmt: IntegerFormat, seeds: Tensor, out: Tensor
) -> int:
    """Encode the first ``sizes[i]`` values of each row of ``x`` [rows, n] into ``out``.

    Returns -1, or the place (row * n + index) of a value that cannot be coded, with ``out``
    undefined.
    """
    _refuse_rotated(fmt)
    if x.numel() == 0:
        return -1
    x = with_rows(x)
    layout = _layout(x.shape[0], x.shape[1], sizes, fmt, x.device)
    status = _statuses(1, x.device)
    with _on(x.device):
        launch.encode(x, layout, seeds, out, NO_REFERENCES, status[0])
    return _place(status.tolist()[0], layout, x)


def decode(payload: Tensor, sizes: Sequence[int] | None, fmt: IntegerFormat, y: Tensor) -> bool:
    """Decode into ``y`` [rows, n] with contiguous rows; zeros beyond each row's size.

    Returns False, with ``y`` untouched, if a scale or offset in the payload is invalid.
    """
    _refuse_rotated(fmt)
    if y.numel() == 0:
        return True
    layout = _layout(y.shape[0], y.shape[1], sizes, fmt, y.device)
    status = _statuses(1, y.device)
    with _on(y.device):
        launch.decode(payload, layout, NO_REFERENCES, y, status[0])
    return _valid(status.tolist()[0])


def delta_encode(
    x: Tensor,
    sizes: Sequence[int] | None,
    fmt: IntegerFormat,
    seeds: Tensor,
    out: Tensor,
    before: Sequence[Tensor] | Tensor,
    after: Sequence[Tensor] | Tensor,
    how: Kept,
    energies: Tensor | None = None,
) -> int:
    """The AQ-SGD step: changes of ``x`` [rows, n] into ``out``, references moved.

    ``before`` and ``after`` hold each row's reference as it is kept, the same tensors to move them
    in place. ``energies`` [rows, 2] float32, best on the CPU, gets each row's energy of change and
    value. Returns -1, or the place of a value that cannot be coded, with ``out`` and ``after``
    undefined.
    """
    _refuse_rotated(fmt, how)
    if x.numel() == 0:
        if energies is not None:
            energies.zero_()
        return -1
    x = with_rows(x)
    layout = _layout(x.shape[0], x.shape[1], sizes, fmt, x.device)
    told = torch.full((12 + layout.rows,), _FINE, dtype=torch.int64, device=x.device)
    status, found = _parts(told)
    with _on(x.device):
        values = _unpack(before, layout, how, status[0])
        m = before if values is None else values
        references = _references(m, after if values is None else values, how, x.device)
        if energies is not None:
            launch.energies(x, layout, references, found)
        launch.delta_encode(x, layout, seeds, out, references, status[1])
        packed = _pack(values, layout, how, status[2])
    status, found = _parts(told.cpu())
    if energies is not None:
        energies.copy_(found, non_blocking=True)
    unpacked, step, kept = status.tolist()
    _check_stored(unpacked)
    place = _place(step, layout, x, m)
    if place < 0 and values is not None and packed is not None:
        place = _place(kept, packed.layout, values)
        if place < 0:
            packed.scatter(after)
    return place


def delta_decode(
    payload: Tensor,
    shape: tuple[int, int],
    sizes: Sequence[int] | None,
    fmt: IntegerFormat,
    before: Sequence[Tensor] | Tensor,
    after: Sequence[Tensor] | Tensor,
    how: Kept,
    y: Tensor | None = None,
) -> bool:
    """The receiver's half: references moved by ``payload`` for ``shape`` = (rows, n).

    ``y`` [rows, n] of any dtype that is coded, rows contiguous, gets what the receiver computes on.
    Returns False, with ``after`` and ``y`` undefined, if the payload or a sum is invalid.
    """
    _refuse_rotated(fmt, how)
    rows, n = shape
    if rows == 0 or n == 0:
        return True
    layout = _layout(rows, n, sizes, fmt, payload.device)
    status = _statuses(3, payload.device)
    with _on(payload.device):
        values = _unpack(before, layout, how, status[0])
        m, to = (before, after) if values is None else (values, values)
        references = _references(m, to, how, payload.device)
        launch.decode(payload, layout, references, y, status[1])
        packed = _pack(values, layout, how, status[2])
    unpacked, step, kept = status.tolist()
    _check_stored(unpacked)
    valid = _valid(step) and kept[0] == _FINE
    if valid and packed is not None:
        packed.scatter(after)
    return valid


def _layout(
    rows: int, n: int, sizes: Sequence[int] | None, fmt: IntegerFormat, device: torch.device
) -> Layout:
    return Layout(rows, n, fmt, None if sizes is None else tuple(sizes), device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """``device`` as the current one, where programs are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _statuses(count: int, device: torch.device) -> Tensor:
    """What ``triton_programs`` calls the status, for each of ``count`` jobs [count, 4]: one is not
    used, for the sake of alignment."""
    return torch.full((count, 4), _FINE, dtype=torch.int64, device=device)


def _parts(told: Tensor) -> tuple[Tensor, Tensor]:
    """(statuses [3, 4], energies [rows, 2] float32) that the host reads in one go, int64."""
    return told[:12].view(3, 4), told[12:].view(torch.float32).view(-1, 2)


def _valid(status: Sequence[int]) -> bool:
    return status[1] == _FINE and status[2] == _FINE


def _place(
    status: Sequence[int], layout: Layout, x: Tensor, m: Sequence[Tensor] | Tensor | None = None
) -> int:
    """The place of the value that made the status what it is, or -1."""
    group, row = status[0], status[1]
    if group == row == _FINE:
        return -1
    if row < group // layout.n:  # no bad group in this row, but a sum that cannot be kept
        first, end, m = 0, layout.length(row), None
    else:
        row, first = divmod(group, layout.n)
        end = min(first + layout.group, layout.length(row))
    values = x[row, first:end].to(torch.float32)
    if m is not None:  # not moved where the group is bad
        values = values - m[row][first:end].to(torch.float32)
    # the first that is not finite, else the first of the greatest magnitude
    magnitude = (values.view(torch.int32) & 0x7FFFFFFF).clamp(max=0x7F800000)
    return row * layout.n + first + int(torch.nonzero(magnitude == magnitude.max())[0])


# References kept in an integer format are worked on as float32 values.


@dataclasses.dataclass(frozen=True)
class _Packed:
    """References as bytes, one row after the other."""

    payload: Tensor
    layout: Layout

    def scatter(self, after: Sequence[Tensor] | Tensor) -> None:
        """Copy each row's bytes to where it is kept."""
        sizes = self.layout.nbytes()
        rows = [row[:size] for row, size in zip(after, sizes, strict=True)]
        torch._foreach_copy_(rows, list(self.payload.split(sizes)))


def _references(
    before: Sequence[Tensor] | Tensor,
    after: Sequence[Tensor] | Tensor,
    how: Kept,
    device: torch.device,
) -> References:
    dtype = how if isinstance(how, torch.dtype) else torch.float32
    return References.of(before, after, dtype, device)


def _unpack(
    kept: Sequence[Tensor] | Tensor, layout: Layout, how: Kept, status: Tensor
) -> Tensor | None:
    """Queue the decoding of references in an integer format: their values [rows, n] float32."""
    if isinstance(how, torch.dtype):
        return None
    packed = dataclasses.replace(layout, fmt=how)
    payload = torch.cat([row[:size] for row, size in zip(kept, packed.nbytes(), strict=True)])
    values = torch.empty((layout.rows, layout.n), dtype=torch.float32, device=layout.device)
    launch.decode(payload, packed, NO_REFERENCES, values, status)
    return values


def _pack(values: Tensor | None, layout: Layout, how: Kept, status: Tensor) -> _Packed | None:
    """Queue the encoding of references in an integer format."""
    if values is None or isinstance(how, torch.dtype):
        return None
    packed = dataclasses.replace(layout, fmt=how)
    payload = values.new_empty(sum(packed.nbytes()), dtype=torch.uint8)
    seeds = torch.zeros(layout.rows, dtype=torch.int64, device=layout.device)
    launch.encode(values, packed, seeds, payload, NO_REFERENCES, status)
    return _Packed(payload, packed)


def _check_stored(status: Sequence[int]) -> None:
    if not _valid(status):
        raise ValueError("a stored reference holds an invalid scale or offset")
