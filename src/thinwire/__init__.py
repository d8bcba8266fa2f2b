"""thinwire: train PyTorch models over slow networks; what crosses a link is compressed."""

from thinwire.codecs import Codec, codec, register_codec
from thinwire.errors import (
    EngineError,
    FrameError,
    LinkError,
    NonFiniteError,
    PeerAborted,
    SpecError,
)
from thinwire.frame import pack, unpack
from thinwire.network import EmulatedTransport, GlooTransport, MemoryTransport, Transport
from thinwire.pipeline import (
    SCHEDULES,
    EvalResult,
    Pipeline,
    PipelineStage,
    Plan,
    StepResult,
    TokenLoss,
    build_schedule,
    stages_of_rank,
)
from thinwire.schemes import Scheme, scheme
from thinwire.spec import parse

__version__ = "0.1.0"

__all__ = [
    "SCHEDULES",
    "Codec",
    "EmulatedTransport",
    "EngineError",
    "EvalResult",
    "FrameError",
    "GlooTransport",
    "LinkError",
    "MemoryTransport",
    "NonFiniteError",
    "PeerAborted",
    "Pipeline",
    "PipelineStage",
    "Plan",
    "Scheme",
    "SpecError",
    "StepResult",
    "TokenLoss",
    "Transport",
    "build_schedule",
    "codec",
    "pack",
    "parse",
    "register_codec",
    "scheme",
    "stages_of_rank",
    "unpack",
]
