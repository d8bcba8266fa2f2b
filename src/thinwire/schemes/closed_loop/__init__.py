"""Closed loops: both ends of a link hold the same reference of each row, and changes are sent."""

from __future__ import annotations

from thinwire.schemes.closed_loop.coding import Coding
from thinwire.schemes.closed_loop.receiver import LoopReceiver
from thinwire.schemes.closed_loop.sender import LoopSender

__all__ = ["Coding", "LoopReceiver", "LoopSender"]
