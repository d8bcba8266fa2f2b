"""Arithmetic with the same result on all machines: whole numbers in floats, and powers of two.

A sum of floats depends on its order, which is another on each device. A sum of products of whole
numbers below 2^7 does not, as long as it stays below 2^24, where float32 holds every whole number:
then a matrix product is exact in whatever order it is computed, also where its factors are rounded
to bfloat16 or TF32 first. Scales are powers of two, by which a product is exact.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from thinwire.native.expect import centre, exponents_for, power_of_two
from thinwire.predict.ops import ops

_MOST, _MOST_POWER = 127, 100
#: Products of two whole numbers up to 127 of which a sum stays below 2^24.
_BLOCK = (1 << 24) // _MOST**2


def on_grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors ``x`` [n, d] float32 as whole numbers from -127 to 127, float32 [n, d], each times
    a power of two, float32 [n]."""
    return centre([], [], x)


@dataclasses.dataclass(frozen=True)
class Map:
    """A linear map: ``codes`` int8 [inputs, outputs], times 2^``exponents`` int8 [outputs]."""

    codes: Tensor
    exponents: Tensor

    @staticmethod
    def nbytes(inputs: int, outputs: int) -> int:
        """Bytes of ``payload``."""
        return outputs * (1 + inputs)

    @property
    def payload(self) -> Tensor:
        """Its exponents and its codes, row by row, uint8."""
        return torch.cat([self.exponents, self.codes.flatten()]).view(torch.uint8)

    @classmethod
    def parsed(cls, payload: Tensor, inputs: int, outputs: int) -> Map:
        """What ``payload`` is of. Raises ValueError where it is none of this size."""
        if payload.numel() != cls.nbytes(inputs, outputs):
            raise ValueError(f"{payload.numel()} bytes, a map of {inputs} to {outputs} has others")
        exponents, codes = payload.view(torch.int8).clone().split([outputs, inputs * outputs])
        beyond = exponents.to(torch.int32).abs() > _MOST_POWER
        if bool(beyond.any()) or bool((codes < -_MOST).any()):
            raise ValueError("a map with coefficients that are none")
        return cls(codes.view(inputs, outputs), exponents)

    @classmethod
    def of(cls, weights: Tensor) -> Map:
        """The nearest to ``weights`` [inputs, outputs]."""
        columns = weights.detach().to(torch.float32).T.contiguous()
        codes, _ = on_grid(columns)
        exponents = exponents_for(columns.abs().amax(1))
        return cls(codes.T.contiguous().to(torch.int8), exponents.to(torch.int8))

    @functools.cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        """The same as float32: codes, and powers of two."""
        return self.codes.to(torch.float32), power_of_two(self.exponents.to(torch.int32))

    def add_to(self, y: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Add the images of ``codes`` times ``scales``, as ``on_grid`` gives them, to ``y`` float32
        [n, outputs]. Exact before the sum, but for one rounding where there are more than 1,040
        inputs."""
        weights, powers = self._factors
        total = codes[:, :_BLOCK] @ weights[:_BLOCK]
        if len(weights) > _BLOCK:
            wide = total.double()
            for at in range(_BLOCK, len(weights), _BLOCK):
                wide += codes[:, at : at + _BLOCK] @ weights[at : at + _BLOCK]
            total = wide.to(torch.float32)
        ops(y).add(y, total, scales, powers)

    def __call__(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The images of ``codes`` times ``scales``, float32 [n, outputs]."""
        y = codes.new_zeros(len(codes), self.codes.shape[1])
        self.add_to(y, codes, scales)
        return y
