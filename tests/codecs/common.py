"""What the codec tests share: settings, data, and a round trip."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from thinwire.codecs import codec

#: Properties draw few, cheap examples; the device fixture may be shared between them.
quick = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

#: One of each kind of arithmetic.
LOSSY = [
    "bf16",
    "fp16",
    "fp8",
    "int1",
    "int2",
    "int3:scale=std,symmetric",
    "int4",
    "int4:group=row",
    "int5:symmetric",
    "int2:round=stochastic",
    "int8",
    "int4:hadamard",
    "int4:zstd",
    "tile",
    "topk:0.1",
    "randk:0.2",
    "randk:0.5/int8,unbiased",
    "threshold:1.5",
    "threshold:2/int4",
    "rudakov-int4",
    "acsgd-int4",
]
ALL = ["raw", *LOSSY]
#: Those whose rows are coded each on its own, and those whose size follows from the shape.
ROWWISE = [name for name in ALL if not codec(name).together]
FIXED = [name for name in ALL if codec(name).fixed_size]


def normal(*shape: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Standard normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(device)


def round_trip(spec: str, x: Tensor, **options: Any) -> Tensor:
    """Decode what ``spec`` encodes of ``x``; options other than the seed reach both ends."""
    c = codec(spec)
    payload = c.encode(x, **options)
    options.pop("seed", None)
    return c.decode(payload, x.shape, x.dtype, **options)


def snr_db(x: Tensor, y: Tensor) -> float:
    """Signal to noise ratio in dB."""
    x, y = x.double(), y.double()
    return float(10 * torch.log10(x.square().sum() / (x - y).square().sum()))
