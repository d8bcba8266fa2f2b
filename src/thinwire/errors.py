"""The exceptions that thinwire raises for a reason its user can act on."""

from __future__ import annotations


class SpecError(ValueError):
    """A codec, scheme or plan string that cannot be read; the text names the nearest match."""


class FrameError(ValueError):
    """Bytes that are no intact frame of this version for this place."""


class NonFiniteError(ValueError):
    """A NaN, an infinity, or a value that the codec's format cannot hold."""


class LinkError(RuntimeError):
    """A message that did not arrive, or arrived wrong; names stage, rank and micro-batch."""


class EngineError(RuntimeError):
    """This torch's pipelining engine is not one that our pipelines are written for."""


class PeerAborted(LinkError):
    """Another stage gave up; the text is that stage's own reason.

    ``kind`` is the class name of the exception that was raised there.
    """

    def __init__(self, message: str, kind: str = "LinkError") -> None:
        super().__init__(message)
        self.kind = kind
