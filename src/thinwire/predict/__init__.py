"""What both ends of a link expect of a value before it travels: the same to the bit, anywhere.

A layer beneath the schemes, which send what differs from the expectation.
"""

from __future__ import annotations

from thinwire.predict.exact import Map, on_grid
from thinwire.predict.expectation import Expectation
from thinwire.predict.sources import Context, Source, register_source, sources
from thinwire.predict.table import Table

__all__ = [
    "Context",
    "Expectation",
    "Map",
    "Source",
    "Table",
    "on_grid",
    "register_source",
    "sources",
]
