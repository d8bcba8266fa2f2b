"""Closed loops: both ends of a link hold the same reference of each row, and changes are sent."""

from __future__ import annotations

from thinwire.schemes.closed_loop.coding import Coding
from thinwire.schemes.closed_loop.scheme import LoopScheme

__all__ = ["Coding", "LoopScheme"]
