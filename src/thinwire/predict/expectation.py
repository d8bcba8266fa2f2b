"""What an end of a link expects of the values of a step, and how it learns from those that came.

Tables by several ids, one after the other, each learning what those before it leave. They stay as
they are during a step, and learn once it counts: both ends then hold the same, whatever the order
in which its micro-batches were decoded. Positions of a magnitude far beyond the others', as
attention sinks have, teach nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from thinwire.codecs.base import within
from thinwire.predict.sources import Context, Source
from thinwire.predict.table import Table

_MOST_IDS = 1 << 17
_FAR, _ORDINARY = 8.0, 0.95  # times the magnitude that this share of the positions stays below


@dataclasses.dataclass(frozen=True)
class _Lesson:
    """What a micro-batch has shown: ids of each source [n], and values [n, width]."""

    ids: list[Tensor]
    values: Tensor


class Expectation:
    """One tensor's expectation at one end of a link."""

    def __init__(self, by: Sequence[Source]) -> None:
        self._by = tuple(by)
        self._tables: list[Table] = []
        self._lessons: dict[int, _Lesson] = {}

    def begin(self) -> None:
        """A step begins: what the last one has shown is gone, unless it counted."""
        self._lessons.clear()

    def of(self, context: Context, shape: Sequence[int], scale: float) -> Tensor | None:
        """What to expect of a tensor [rows, …] of ``shape``, float32 [rows, values of each]; None
        before anything was learned. ``scale``: by what values of this step are multiplied."""
        if not self._tables:
            return None
        rows, positions, width = _form(shape)
        if width != self._tables[0].width:
            return None
        total: Tensor | None = None
        for table, ids in zip(self._tables, self._ids(context, rows, positions), strict=True):
            seen = ids.where(ids < table.size, 0).flatten()
            part = table(seen.to(table.values.device))
            total = part if total is None else total + part
        assert total is not None
        return _as_rows(total * scale, shape)

    def note(
        self,
        microbatch: int,
        context: Context,
        y: Tensor,
        shape: Sequence[int],
        scale: float,
        lengths: Sequence[int] | None,
    ) -> None:
        """``y`` float32 [rows, n] came of a micro-batch; ``lengths``: values of each row that
        travelled, None: all."""
        rows, positions, width = _form(shape)
        ids = [one.flatten().to(y.device) for one in self._ids(context, rows, positions)]
        values = _as_vectors(y, shape) * (1.0 / scale)
        if lengths is not None:
            there = within([size // width for size in lengths], positions, y.device)
            kept = there.flatten().nonzero()[:, 0]
            ids, values = [one[kept] for one in ids], values[kept]
        self._lessons[microbatch] = _Lesson(ids, values)

    def settle(self) -> None:
        """The step counts: learn from it."""
        lessons = [self._lessons[k] for k in sorted(self._lessons)]
        self._lessons.clear()
        if not lessons:
            return
        values = torch.cat([lesson.values for lesson in lessons])
        parts = zip(*[lesson.ids for lesson in lessons], strict=True)
        ids = [torch.cat(part) for part in parts]
        largest = values.abs().amax(1)
        ordinary = largest.kthvalue(max(1, math.ceil(_ORDINARY * len(largest)))).values
        near = (largest <= _FAR * ordinary).nonzero()[:, 0]
        if len(near) < len(values):
            ids, values = [one[near] for one in ids], values[near]
        self._make_room(ids, values.shape[1])
        for table, each in zip(self._tables, ids, strict=True):
            left = values - table(each)
            table.learn(each, values)
            values = left

    def _make_room(self, ids: Sequence[Tensor], width: int) -> None:
        if self._tables and self._tables[0].width != width:
            self._tables = []
        if not self._tables:
            self._tables = [Table(1, width, ids[0].device) for _ in ids]
        for table, each in zip(self._tables, ids, strict=True):
            needed = int(each.max()) + 1 if len(each) else 1
            if needed > table.size:
                table.grow(1 << (needed - 1).bit_length())

    def _ids(self, context: Context, rows: int, positions: int) -> list[Tensor]:
        """The ids of each source [rows, positions], from 0 on: 0 stands for none."""
        found = [source.ids(context, rows, positions) for source in self._by]
        return [(ids.clamp(min=-1) + 1) % _MOST_IDS for ids in found]

    # The same at both ends, and after a break.

    def digest(self) -> int:
        """A hash of all that was learned."""
        seen = xxhash.xxh3_64()
        for name, tensor in sorted(self.state_dict().items()):
            seen.update(name.encode())
            seen.update(tensor.cpu().numpy().tobytes())
        return seen.intdigest()

    def forget(self) -> None:
        """Begin anew."""
        self._tables = []
        self._lessons.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """What ``load_state_dict`` restores, between two steps."""
        return {
            f"{number}.{name}": tensor
            for number, table in enumerate(self._tables)
            for name, tensor in table.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where it is another's."""
        self.forget()
        if not state:
            return
        try:
            for number in range(len(self._by)):
                part = {k: state[f"{number}.{k}"] for k in ("sums", "counts", "unit")}
                table = Table(*part["sums"].shape)
                table.load_state_dict(part)
                self._tables.append(table)
        except (KeyError, TypeError, RuntimeError) as error:
            self.forget()
            raise ValueError(f"the saved tables are of other sources: {error}") from None


def _form(shape: Sequence[int]) -> tuple[int, int, int]:
    """Rows, positions and width of a tensor: [rows, positions, width], [rows, channels, height,
    width], or [rows, width]."""
    if len(shape) == 4:
        return shape[0], shape[2] * shape[3], shape[1]
    if len(shape) == 2:
        return shape[0], 1, shape[1]
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def _as_vectors(y: Tensor, shape: Sequence[int]) -> Tensor:
    """[rows, values] as [rows * positions, width]."""
    rows, positions, width = _form(shape)
    if len(shape) == 4:
        return y.view(rows, width, positions).transpose(1, 2).reshape(-1, width)
    return y.reshape(rows * positions, width)


def _as_rows(vectors: Tensor, shape: Sequence[int]) -> Tensor:
    """The reverse."""
    rows, positions, width = _form(shape)
    if len(shape) == 4:
        return vectors.view(rows, positions, width).transpose(1, 2).reshape(rows, -1)
    return vectors.view(rows, -1)
