"""Which kernels code a tensor: the compiled ones on CPUs, Triton's on CUDA, or none.

Where there are none, the eager twin runs, on any device, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from thinwire.native import kernels, triton_kernels, triton_use
from thinwire.native.delta_reference import Kept
from thinwire.native.reference import IntegerFormat


class Kernels(Protocol):
    """What ``kernels`` and ``triton_kernels`` have in common; their docstrings say what each does.

    All tensors are on one device.
    """

    def encode(
        self,
        x: Tensor,
        sizes: Sequence[int] | None,
        fmt: IntegerFormat,
        seeds: Tensor,
        out: Tensor,
    ) -> int: ...

    def decode(
        self, payload: Tensor, sizes: Sequence[int] | None, fmt: IntegerFormat, y: Tensor
    ) -> bool: ...

    def delta_encode(
        self,
        x: Tensor,
        sizes: Sequence[int] | None,
        fmt: IntegerFormat,
        seeds: Tensor,
        out: Tensor,
        before: Sequence[Tensor] | Tensor,
        after: Sequence[Tensor] | Tensor,
        how: Kept,
        energies: Tensor | None = None,
    ) -> int: ...

    def delta_decode(
        self,
        payload: Tensor,
        shape: tuple[int, int],
        sizes: Sequence[int] | None,
        fmt: IntegerFormat,
        before: Sequence[Tensor] | Tensor,
        after: Sequence[Tensor] | Tensor,
        how: Kept,
        y: Tensor | None = None,
    ) -> bool: ...


def kernels_for(x: Tensor, fmt: IntegerFormat) -> Kernels | None:
    """The kernels that take tensors like ``x`` (device, dtype, size) in ``fmt``, if any do."""
    if kernels.usable(x):
        return kernels
    return triton_kernels if triton_use.usable(x, fmt) else None
