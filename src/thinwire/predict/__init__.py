"""What both ends of a link expect of a value before it travels: the same to the bit, anywhere.

A layer beneath the schemes, which send what differs from the expectation.
"""

from __future__ import annotations

from thinwire.predict.exact import Map, on_grid
from thinwire.predict.table import Table

__all__ = ["Map", "Table", "on_grid"]
