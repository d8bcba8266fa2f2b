"""Arithmetic with the same result on all machines: whole numbers in floats, and powers of two.

A sum of floats depends on its order, which is another on each device. A sum of products of whole
numbers below 2^7 does not, as long as it stays below 2^24, where float32 holds every whole number:
then a matrix product is exact in whatever order it is computed, also where its factors are rounded
to bfloat16 or TF32 first. Scales are powers of two, by which a product is exact.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

_MOST = 127
#: Products of two whole numbers up to 127 of which a sum stays below 2^24.
_BLOCK = (1 << 24) // _MOST**2
_LEAST_POWER, _MOST_POWER = -100, 100
_NEARLY_TWO = 0x7E0000  # fraction bits of 127/64


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents as float32, made of its bits; ``exponents`` int32 within -126 to 127."""
    return ((exponents + 127) << 23).view(torch.float32)


def exponents_for(largest: Tensor, most: int = 7) -> Tensor:
    """The least int32 k with ``largest`` <= (2^most - 1) 2^k nearly, by the bits of ``largest``.

    ``largest`` float32, finite, not below zero; k stays within -100 and 100.
    """
    bits = largest.contiguous().view(torch.int32)
    exponents = (bits >> 23) - 126 - most + ((bits & 0x7FFFFF) > _NEARLY_TWO).to(torch.int32)
    return exponents.clamp(_LEAST_POWER, _MOST_POWER)


def on_grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors ``x`` [n, d] float32 as whole numbers from -127 to 127, float32 [n, d], each times
    a power of two, float32 [n, 1]."""
    exponents = exponents_for(x.abs().amax(1, keepdim=True))
    codes = (x * power_of_two(-exponents)).round_().clamp_(-_MOST, _MOST)
    return codes, power_of_two(exponents)


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
        if int(codes.min()) < -_MOST or int(exponents.abs().max()) > _MOST_POWER:
            raise ValueError("a map with coefficients that are none")
        return cls(codes.view(inputs, outputs), exponents)

    @classmethod
    def of(cls, weights: Tensor) -> Map:
        """The nearest to ``weights`` [inputs, outputs]."""
        columns = weights.detach().to(torch.float32).T.contiguous()
        codes, _ = on_grid(columns)
        exponents = exponents_for(columns.abs().amax(1))
        return cls(codes.T.contiguous().to(torch.int8), exponents.to(torch.int8))

    def __call__(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The images of ``codes * scales``, as ``on_grid`` gives them, float32 [n, outputs].

        Exact but for one rounding where there are more than 1,040 inputs.
        """
        weights = self.codes.to(torch.float32)
        total = codes[:, :_BLOCK] @ weights[:_BLOCK]
        for at in range(_BLOCK, len(weights), _BLOCK):
            part = codes[:, at : at + _BLOCK] @ weights[at : at + _BLOCK]
            total = total.double() + part.double()
        total = total * scales * power_of_two(self.exponents.to(torch.int32))
        return total.to(torch.float32)
