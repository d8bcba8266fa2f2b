"""Replicas of a model, or of a stage: what they tell each other of their gradients."""

from __future__ import annotations

from thinwire.data_parallel.adam import OneBitAdam, QuantizedAdam
from thinwire.data_parallel.ddp import CompressedDDP, compress_ddp
from thinwire.data_parallel.fsdp import CompressedFSDP, compress_fsdp
from thinwire.data_parallel.local import LocalSteps
from thinwire.data_parallel.reducer import GradientReducer

__all__ = [
    "CompressedDDP",
    "CompressedFSDP",
    "GradientReducer",
    "LocalSteps",
    "OneBitAdam",
    "QuantizedAdam",
    "compress_ddp",
    "compress_fsdp",
]
