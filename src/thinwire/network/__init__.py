"""Transports: bytes between endpoints."""

from thinwire.network.emulate import EmulatedTransport
from thinwire.network.gloo import GlooTransport
from thinwire.network.memory import MemoryTransport
from thinwire.network.transport import Handle, Message, Transport, TransportError

__all__ = [
    "EmulatedTransport",
    "GlooTransport",
    "Handle",
    "MemoryTransport",
    "Message",
    "Transport",
    "TransportError",
]
