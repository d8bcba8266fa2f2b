"""What both ends of a link expect of a value before it travels: the same to the bit, anywhere.

A layer beneath the schemes, which send what differs from the expectation.
"""

from __future__ import annotations

from thinwire.predict.exact import Map, on_grid
from thinwire.predict.expectation import Guess
from thinwire.predict.expectations import Expectations, Part, Still, as_vectors, form_of
from thinwire.predict.fit import Fit
from thinwire.predict.sources import By, Context, Source, register_source, sources, tables_of
from thinwire.predict.table import Table
from thinwire.predict.tables import Tables

__all__ = [
    "By",
    "Context",
    "Expectations",
    "Fit",
    "Guess",
    "Map",
    "Part",
    "Source",
    "Still",
    "Table",
    "Tables",
    "as_vectors",
    "form_of",
    "on_grid",
    "register_source",
    "sources",
    "tables_of",
]
