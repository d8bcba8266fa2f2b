"""How messages spell what they tell: values as they are typed, counts, what an exception says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def typed(value: Any) -> str:
    """A setting's value as it is typed after its option: ``true``, ``none``."""
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def counted(count: int, noun: str) -> str:
    """``1 stage``, ``2 stages``, ``3 micro-batches``."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


def listed(items: Sequence[str]) -> str:
    """``one``, ``one and two``, ``one, two and three``."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def one_line(error: BaseException) -> str:
    """The text of an exception on one line."""
    return printable(" ".join(str(error).split()))


def printable(text: str) -> str:
    """``text`` with control characters, newlines among them, as the escapes of Python."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )
