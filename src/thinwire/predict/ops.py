"""Which functions compute what both ends expect: the compiled ones on CPUs, or their eager twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor

from thinwire.native import expect as eager
from thinwire.native import expect_kernels


class Ops(Protocol):
    """What ``native.expect`` and ``native.expect_kernels`` have in common; the docstrings of the
    first say what each does."""

    def expect(self, ids: Sequence[Tensor], tables: Sequence[Tensor]) -> Tensor: ...

    def centre(
        self, ids: Sequence[Tensor], tables: Sequence[Tensor], x: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def add(self, y: Tensor, part: Tensor, scales: Tensor, powers: Tensor) -> None: ...

    def weigh(self, x: Tensor, base: Tensor | None, e: Tensor) -> Tensor: ...

    def stand(self, base: Tensor | None, e: Tensor, gains: Tensor) -> Tensor: ...

    def largest(self, x: Tensor) -> Tensor: ...

    def learn(
        self,
        sums: Tensor,
        counts: Tensor,
        values: Tensor,
        ids: Tensor,
        x: Tensor,
        unit: int,
        rest: bool,
    ) -> Tensor | None: ...


def ops(x: Tensor) -> Ops:
    """Those for tensors like ``x``."""
    return cast(Ops, expect_kernels if expect_kernels.usable(x) else eager)
