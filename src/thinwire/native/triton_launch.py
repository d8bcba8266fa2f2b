"""Queues the Triton programs of the integer codecs and of the AQ-SGD step on the current stream.

Nothing here waits for the GPU. What went wrong is left in a status, as ``triton_programs`` says.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.native import reference
from thinwire.native.reference import IntegerFormat

#: Values that one program can hold.
_LARGEST_TILE = 4096
_TILE = 1024
_BLOCK = 256
#: What is left of the halving sum of a larger group is up to torch: 1 / 64 of it.
_HEIGHT, _LANES = 64, 64


@dataclasses.dataclass(frozen=True)
class Layout:
    """Rows of up to ``n`` values in a format, and where their bytes are."""

    rows: int
    n: int
    fmt: IntegerFormat
    sizes: tuple[int, ...] | None
    device: torch.device

    @functools.cached_property
    def group(self) -> int:
        """Values a group; the next power of two where one group holds a row."""
        group = self.fmt.group or self.n
        return max(8, _power_of_two(self.n)) if group >= self.n else group

    @functools.cached_property
    def groups(self) -> int:
        """Groups in the longest row."""
        return -(-self.n // self.group)

    @functools.cached_property
    def blocks(self) -> int:
        return -(-self.n // _BLOCK)

    @functools.cached_property
    def ragged(self) -> bool:
        """Whether a row ends with a block that is not whole."""
        return any(size % _BLOCK for size in self.sizes or (self.n,))

    @functools.cached_property
    def fused(self) -> bool:
        """Whether one program can measure and code whole groups."""
        return self.group <= _LARGEST_TILE and self.group == _power_of_two(self.group)

    def length(self, row: int) -> int:
        """Values in a row."""
        return self.n if self.sizes is None else self.sizes[row]

    def nbytes(self) -> list[int]:
        """Bytes of each row."""
        sizes = [self.n] * self.rows if self.sizes is None else self.sizes
        return [reference.row_nbytes(size, self.fmt) for size in sizes]

    @functools.cached_property
    def table(self) -> Tensor | None:
        """Each row's length and first byte [rows, 2], where lengths vary."""
        if self.sizes is None:
            return None
        starts = itertools.accumulate(self.nbytes(), initial=0)
        entries = list(zip(self.sizes, starts, strict=False))  # the last start is the end
        return torch.tensor(entries, dtype=torch.int64).to(self.device, non_blocking=True)

    @functools.cached_property
    def rows_arguments(self) -> dict[str, Any]:
        """How a program finds its row."""
        return {
            "n": self.n,
            "nbytes": reference.row_nbytes(self.n, self.fmt),
            "table": self.table,
            "VARYING": self.sizes is not None,
        }

    @functools.cached_property
    def format_arguments(self) -> dict[str, Any]:
        """What a program needs to know of the format."""
        return {
            "BITS": self.fmt.bits,
            "MODE": self.fmt.symmetric + 2 * self.fmt.std,
            "STEP": reference.UNIFORM_STEP.get(self.fmt.bits, 1.0) if self.fmt.std else 1.0,
            "GROUP": self.group,
        }

    def counts(self) -> Tensor:
        """Values in each group [rows, groups], at least 1, as float32."""
        lengths = torch.full((self.rows,), self.n, dtype=torch.int64, device=self.device)
        if self.table is not None:
            lengths = self.table[:, 0]
        first = torch.arange(self.groups, dtype=torch.int64, device=self.device) * self.group
        return (lengths[:, None] - first).clamp(1, self.group).to(torch.float32)


@dataclasses.dataclass(frozen=True)
class References:
    """Rows' references in memory, as a program reads and writes them."""

    before: Tensor | None = None
    after: Tensor | None = None
    kept: int = 0
    aligned: bool = False

    @classmethod
    def of(
        cls,
        before: Sequence[Tensor] | Tensor,
        after: Sequence[Tensor] | Tensor,
        how: torch.dtype,
        device: torch.device,
    ) -> References:
        """``before`` and ``after`` as ``how``, a row each.

        Raises ValueError if they are not on ``device``.
        """
        first, second = _addresses(before, device), _addresses(after, device)
        aligned = not bool(((first | second) & 15).any())
        first, second = (table.to(device, non_blocking=True) for table in (first, second))
        return cls(first, second, _KEPT[how], aligned)

    def arguments(self) -> dict[str, Any]:
        """How a program finds what it reads."""
        return {"before": self.before, "KEPT": self.kept, "ALIGNED": self.aligned}


_KEPT = {torch.float32: 1, torch.bfloat16: 2}
NO_REFERENCES = References()


def _addresses(rows: Sequence[Tensor] | Tensor, device: torch.device) -> Tensor:
    """The address of each row's data on ``device``: int64 [rows], still on the CPU."""
    for held in [rows] if isinstance(rows, Tensor) else rows:
        if held.device != device:  # what a program finds there would be no error of Python's
            raise ValueError(f"a reference on {held.device} of values on {device}")
    if isinstance(rows, Tensor):
        step = rows.stride(0) * rows.element_size()
        return torch.arange(rows.shape[0], dtype=torch.int64) * step + rows.data_ptr()
    return torch.tensor([row.data_ptr() for row in rows], dtype=torch.int64)


def _power_of_two(n: int) -> int:
    """The least one that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def _raw(x: Tensor) -> Tensor:
    """bfloat16 as int16, as the programs want it."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def launch(name: str, count: int, width: int = _TILE, **arguments: Any) -> None:
    """Queue ``count`` instances of a program, each of which works on ``width`` values."""
    warps = min(8, max(1, width // _BLOCK))
    program(name)[(count,)](**arguments, num_warps=warps, enable_fp_fusion=False)


@functools.cache
def program(name: str) -> Any:
    """The Triton program of this name; imports Triton."""
    from thinwire.native import triton_delta, triton_programs

    return getattr(triton_delta, name, None) or getattr(triton_programs, name)


def encode(
    x: Tensor,
    layout: Layout,
    seeds: Tensor,
    out: Tensor,
    references: References,
    status: Tensor,
) -> tuple[Tensor, Tensor]:
    """Queue the encoding of x, or of x - m; references move in whole blocks if groups are small
    powers of two, and else not at all. Returns the scales and offsets [rows, groups]."""
    scales = torch.empty((layout.rows, layout.groups), dtype=torch.float32, device=x.device)
    offsets = torch.empty_like(scales)
    source = {"x": _raw(x), "stride": x.stride(0), **references.arguments()}
    common = {**source, **layout.rows_arguments, **layout.format_arguments, "out": out}
    common |= {"scales": scales, "offsets": offsets, "groups": layout.groups}
    codes = {"seeds": seeds, "STOCHASTIC": layout.fmt.stochastic}
    group, rows = layout.group, layout.rows
    if layout.fused:
        tile = max(group, min(_TILE, max(_BLOCK, _power_of_two(layout.n))))
        tiles = -(-layout.n // tile)
        arguments = {**common, **codes, "after": references.after, "status": status}
        launch("encode_tiles", rows * tiles, tile, tiles=tiles, TILE=tile, **arguments)
    elif group <= _LARGEST_TILE:
        width = _power_of_two(group)
        batch = max(1, _TILE // width)
        batches = -(-layout.groups // batch)
        arguments = {**common, "batches": batches, "WIDTH": width, "K": batch, "status": status}
        launch("measure_groups", rows * batches, batch * width, **arguments)
    else:
        _measure_large(layout, source, scales, offsets, out, status)
    if layout.ragged or not layout.fused:
        blocks = 1 if layout.fused else layout.blocks
        arguments = {**common, **codes, "blocks": blocks, "LAST": layout.fused}
        launch("encode_blocks", rows * blocks, _BLOCK, **arguments)
    return scales, offsets


def _measure_large(
    layout: Layout,
    source: dict[str, Any],
    scales: Tensor,
    offsets: Tensor,
    out: Tensor,
    status: Tensor,
) -> None:
    """Queue the parameters of groups that are larger than what one program can hold."""
    shape = (layout.rows, layout.groups)
    total = layout.rows * layout.groups
    parts = -(-layout.group // _LARGEST_TILE)
    common = {**source, **layout.rows_arguments, "groups": layout.groups, "GROUP": layout.group}
    lows = scales.new_empty((*shape, parts))
    highs, peaks = torch.empty_like(lows), torch.empty_like(lows, dtype=torch.int32)
    found = {"lows": lows, "highs": highs, "peaks": peaks}
    tile = {"parts": parts, "TILE": _LARGEST_TILE}
    launch("part_extremes", total * parts, _LARGEST_TILE, **common, **tile, **found)
    lo, hi = lows.amin(2) + 0.0, highs.amax(2) + 0.0
    means, units = torch.zeros_like(scales), torch.ones_like(scales)
    squares = torch.zeros_like(scales)
    if layout.fmt.std:
        parts = _power_of_two(layout.group) // (_HEIGHT * _LANES)
        halves = {"parts": parts, "HEIGHT": _HEIGHT, "LANES": _LANES, "units": units}
        sums = scales.new_zeros((2, *shape, parts * _LANES))
        size = layout.counts()

        def moments(wanted: Tensor) -> None:
            for which in range(layout.fmt.symmetric, 2):
                arguments = {**common, **halves, "means": means, "wanted": wanted}
                arguments |= {"sums": sums[which], "SQUARES": which == 1}
                launch("part_sums", total * parts, _HEIGHT * _LANES, **arguments)
                if which == 0:
                    means.copy_(reference.tree_sum(sums[0]) / size)
            squares.copy_(reference.tree_sum(sums[1]))

        moments(torch.ones_like(units, dtype=torch.int32))
        good = (squares >= reference._LEAST_SQUARES) & (squares <= reference._MOST_SQUARES)
        exponent = torch.maximum(hi, -lo).view(torch.int32) & 0x7F800000
        units.copy_(torch.where(~good & (exponent > 0), exponent.view(torch.float32), units))
        moments((~good).to(torch.int32))
    batches = -(-layout.groups // _BLOCK)
    launch(
        "finish_groups",
        layout.rows * batches,
        lows=lo,
        highs=hi,
        peaks=peaks.amax(2),
        means=means,
        squares=squares,
        units=units,
        groups=layout.groups,
        batches=batches,
        out=out,
        scales=scales,
        offsets=offsets,
        status=status,
        K=_BLOCK,
        **layout.rows_arguments,
        **layout.format_arguments,
    )


def decode(
    payload: Tensor,
    layout: Layout,
    references: References,
    y: Tensor | None,
    status: Tensor,
) -> None:
    """Queue the decoding of a payload, if it is valid, into ``y`` and the references."""
    scales = torch.empty((layout.rows, layout.groups), dtype=torch.float32, device=payload.device)
    offsets = torch.empty_like(scales)
    batches = -(-layout.groups // _BLOCK)
    launch(
        "read_parameters",
        layout.rows * batches,
        payload=payload,
        groups=layout.groups,
        batches=batches,
        scales=scales,
        offsets=offsets,
        status=status,
        K=_BLOCK,
        **layout.rows_arguments,
        **layout.format_arguments,
    )
    _decode_tiles(payload, layout, (scales, offsets), references, y, status)


def delta_encode(
    x: Tensor,
    layout: Layout,
    seeds: Tensor,
    out: Tensor,
    references: References,
    status: Tensor,
) -> None:
    """Queue the encoding of x - m, and the references' move."""
    parameters = encode(x, layout, seeds, out, references, status)
    if layout.ragged or not layout.fused:
        _decode_tiles(out, layout, parameters, references, None, status, last=layout.fused)


def _decode_tiles(
    payload: Tensor,
    layout: Layout,
    parameters: tuple[Tensor, Tensor],
    references: References,
    y: Tensor | None,
    status: Tensor,
    last: bool = False,
) -> None:
    """Queue the decoding with known parameters; ``last``: of rows' last blocks if not whole."""
    tile = _BLOCK if last else min(_TILE, max(_BLOCK, _power_of_two(layout.n)))
    tiles = 1 if last else -(-layout.n // tile)
    launch(
        "decode_tiles",
        layout.rows * tiles,
        tile,
        payload=payload,
        groups=layout.groups,
        tiles=tiles,
        scales=parameters[0],
        offsets=parameters[1],
        after=references.after,
        y=None if y is None else _raw(y),
        y_stride=0 if y is None else y.stride(0),
        status=status,
        TILE=tile,
        WRITES=y is not None,
        LAST=last,
        **references.arguments(),
        **layout.rows_arguments,
        **layout.format_arguments,
    )


def energies(x: Tensor, layout: Layout, references: References, found: Tensor) -> None:
    """Queue each row's energies of change and value into ``found`` [rows, 2]; before they move."""
    sums = x.new_empty((2, layout.rows, layout.blocks), dtype=torch.float32)
    batch = _TILE // _BLOCK
    batches = -(-layout.blocks // batch)
    launch(
        "block_energies",
        layout.rows * batches,
        x=_raw(x),
        stride=x.stride(0),
        rows=layout.rows,
        blocks=layout.blocks,
        batches=batches,
        sums=sums,
        K=batch,
        **references.arguments(),
        **layout.rows_arguments,
    )
    found.copy_(reference.tree_sum(sums).T)
