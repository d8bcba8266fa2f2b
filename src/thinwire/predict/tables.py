"""Tables by several ids, one after the other, each learning what those before it leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from thinwire.predict.ops import ops
from thinwire.predict.table import Table


class Tables:
    """``count`` of them; their sizes and width are those of what they learn."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._tables: list[Table] = []

    @property
    def width(self) -> int | None:
        """Values of each vector; None before anything was learned."""
        return self._tables[0].width if self._tables else None

    @property
    def values(self) -> list[Tensor]:
        """What each of them says, float32 [ids, width]."""
        return [table.values for table in self._tables]

    def __call__(self, ids: Sequence[Tensor]) -> Tensor | None:
        """What they say of positions with ``ids`` [n] each, float32 [n, width]; None before
        anything was learned."""
        values = self.values
        return ops(values[0]).expect(ids, values) if values else None

    def centred(self, ids: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` float32 [n, width] less what they say of it, as ``on_grid`` gives it."""
        values = self.values
        return ops(x).centre(ids if values else [], values, x)

    def learn(self, ids: Sequence[Tensor], x: Tensor, largest: Tensor) -> None:
        """Take in ``x`` [n, width] float32 that was seen with ``ids`` [n] each, and whose greatest
        magnitudes are ``largest`` [n]. Overwrites it."""
        if self.width != x.shape[1]:
            self._tables = [Table(1, x.shape[1], x.device) for _ in range(self._count)]
        most: Tensor | None = largest
        for number, (table, each) in enumerate(zip(self._tables, ids, strict=True), 1):
            needed = int(each.max()) + 1 if len(each) else 1
            if needed > table.size:
                table.grow(1 << (needed - 1).bit_length())
            assert most is not None
            most = table.learn(each, x, most, rest=number < self._count)

    def forget(self) -> None:
        """Begin anew."""
        self._tables = []

    def state_dict(self) -> dict[str, Tensor]:
        """What ``load_state_dict`` restores."""
        return {
            f"{number}.{name}": tensor
            for number, table in enumerate(self._tables)
            for name, tensor in table.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError, KeyError, TypeError or RuntimeError where it is another's."""
        self.forget()
        if not state:
            return
        tables = []
        for number in range(self._count):
            part = {name: state[f"{number}.{name}"] for name in ("sums", "counts", "unit")}
            if part["sums"].dim() != 2:
                raise ValueError("a table has two dimensions")
            table = Table(*part["sums"].shape)
            table.load_state_dict(part)
            tables.append(table)
        if len({table.width for table in tables}) > 1 or len(state) != 3 * self._count:
            raise ValueError("the saved tables are of other sources")
        self._tables = tables
