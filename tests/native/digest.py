"""A hash of many payloads and decoded values, on data that is itself free of ISA differences.

Run as a script it prints the hash, so that a test can compare processes under different
``ATEN_CPU_CAPABILITY``.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from thinwire.codecs import codec

SPECS = [
    "raw",
    "bf16",
    "fp16",
    "fp8",
    *(f"int{bits}" for bits in range(1, 9)),
    *(f"int{bits}:symmetric" for bits in range(1, 9)),
    *(f"int{bits}:round=stochastic" for bits in (1, 2, 3, 8)),
    "int4:round=stochastic,symmetric",
    "int3:scale=std",
    "int4:scale=std,symmetric",
    "int8:scale=std,group=100",
    "int2:scale=range",
    "int4:group=row",
    "int2:group=8",
]


def integers(n: int, seed: int) -> Tensor:
    """Pseudo-random int64 in [-2**23, 2**23): one step of a linear congruential generator."""
    h = (torch.arange(n, dtype=torch.int64) + seed * 7919) * 1103515245 + 12345
    h = (h ^ (h >> 13)) * 69069 & 0xFFFFFFFF
    return (h >> 8) - 2**23


def cases() -> list[Tensor]:
    """Inputs built from integers by exact or single float32 operations."""
    sums = torch.stack([integers(6 * 421, seed) for seed in range(8)]).sum(0)
    bell = sums.to(torch.float32).view(6, 421)
    signs = integers(4 * 300, 9).view(4, 300)
    zeros = torch.where(signs > 0, 0.0, -0.0).to(torch.float32)
    return [
        bell * 2.0**-24,
        bell * 2.0**-24 + 1000,
        bell * bell * bell * 2.0**-66,
        bell * 2.0**70,
        bell * 2.0**-149,  # mostly subnormal
        bell.to(torch.bfloat16)[:3],
        zeros,  # both signs
        torch.where(signs % 3 == 0, signs, 0).to(torch.float32) * zeros.sign().add(1),
        torch.full((3, 130), 2.0**-9, dtype=torch.float32),
        bell[:1, :1] * 2.0**-24,
    ]


def digest(device: torch.device | str = "cpu") -> str:
    """SHA-256 over every codec and case, computed on ``device``."""
    total = hashlib.sha256()
    for index, x in enumerate(cases()):
        for spec in SPECS:
            if spec == "fp16" and float(x.abs().max()) > 65504:
                continue
            c = codec(spec)
            payload = c.encode(x.to(device), seed=index * 2**33 + 5)
            y = c.decode(payload, x.shape, x.dtype)
            total.update(payload.cpu().numpy().tobytes())
            total.update(y.cpu().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(digest())
