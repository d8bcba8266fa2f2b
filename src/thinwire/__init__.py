"""thinwire: train PyTorch models over slow networks; what crosses a link is compressed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from thinwire.codecs import Bits, Codec, Ragged, TensorCodec, codec, register_codec
    from thinwire.data_parallel import (
        CompressedDDP,
        CompressedFSDP,
        GradientReducer,
        LocalSteps,
        OneBitAdam,
        QuantizedAdam,
        compress_ddp,
        compress_fsdp,
    )
    from thinwire.errors import (
        EngineError,
        FrameError,
        LinkError,
        NonFiniteError,
        PeerAborted,
        SpecError,
    )
    from thinwire.exchange import register_exchange
    from thinwire.frame import Kind, Section, pack, unpack
    from thinwire.network import EmulatedTransport, GlooTransport, MemoryTransport, Transport
    from thinwire.pipeline import (
        SCHEDULES,
        ClassLoss,
        EvalResult,
        Pipeline,
        PipelineStage,
        Plan,
        StepResult,
        Storage,
        TokenLoss,
        build_schedule,
        default_forward,
        stages_of_rank,
    )
    from thinwire.predict import Source, register_source
    from thinwire.schemes import (
        Receiver,
        Scheme,
        Sender,
        Value,
        Visit,
        register_scheme,
        scheme,
    )
    from thinwire.spec import parse

# Names are imported when first used: torch takes seconds, and the command's errors need none of it.
_HOMES = {
    "thinwire.codecs": ("Bits", "Codec", "Ragged", "TensorCodec", "codec", "register_codec"),
    "thinwire.data_parallel": (
        "CompressedDDP",
        "CompressedFSDP",
        "GradientReducer",
        "LocalSteps",
        "OneBitAdam",
        "QuantizedAdam",
        "compress_ddp",
        "compress_fsdp",
    ),
    "thinwire.exchange": ("register_exchange",),
    "thinwire.errors": (
        "EngineError",
        "FrameError",
        "LinkError",
        "NonFiniteError",
        "PeerAborted",
        "SpecError",
    ),
    "thinwire.frame": ("Kind", "Section", "pack", "unpack"),
    "thinwire.network": ("EmulatedTransport", "GlooTransport", "MemoryTransport", "Transport"),
    "thinwire.pipeline": (
        "SCHEDULES",
        "ClassLoss",
        "EvalResult",
        "Pipeline",
        "PipelineStage",
        "Plan",
        "StepResult",
        "Storage",
        "TokenLoss",
        "build_schedule",
        "default_forward",
        "stages_of_rank",
    ),
    "thinwire.predict": ("Source", "register_source"),
    "thinwire.schemes": (
        "Receiver",
        "Scheme",
        "Sender",
        "Value",
        "Visit",
        "parse",
        "register_scheme",
        "scheme",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # it would make every unknown name pass

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
        home = _HOME_OF[name]
        if home != "thinwire.errors":
            importlib.import_module("thinwire.exchange")  # so that every spec has its name
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


__all__ = [
    "SCHEDULES",
    "Bits",
    "ClassLoss",
    "Codec",
    "CompressedDDP",
    "CompressedFSDP",
    "EmulatedTransport",
    "EngineError",
    "EvalResult",
    "FrameError",
    "GlooTransport",
    "GradientReducer",
    "Kind",
    "LinkError",
    "LocalSteps",
    "MemoryTransport",
    "NonFiniteError",
    "OneBitAdam",
    "PeerAborted",
    "Pipeline",
    "PipelineStage",
    "Plan",
    "QuantizedAdam",
    "Ragged",
    "Receiver",
    "Scheme",
    "Section",
    "Sender",
    "Source",
    "SpecError",
    "StepResult",
    "Storage",
    "TensorCodec",
    "TokenLoss",
    "Transport",
    "Value",
    "Visit",
    "build_schedule",
    "codec",
    "compress_ddp",
    "compress_fsdp",
    "default_forward",
    "pack",
    "parse",
    "register_codec",
    "register_exchange",
    "register_scheme",
    "register_source",
    "scheme",
    "stages_of_rank",
    "unpack",
]
