"""What all ranks tell of their links, put together: plain numbers, the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from thinwire.counters import sum_reports
from thinwire.edge import EdgeEnd

Found = Iterable[Iterable[dict[str, Any]]]


def of_links(found: Found) -> list[dict[str, Any]]:
    """The counters of each link in order, and those of what crossed between steps, as one."""
    everyone = [one for rank in found for one in rank]
    control = [one for one in everyone if one["edge"] < 0]
    return [*_in_order(one for one in everyone if one["edge"] >= 0), sum_reports(control)]


def fidelity(ends: Sequence[EdgeEnd]) -> list[dict[str, Any]]:
    """What coding lost on the links that ``ends`` send on, if it was measured."""
    return [
        {
            "edge": link.place.edge,
            "direction": link.place.direction.name.lower(),
            **link.fidelity.report(),
        }
        for link in (end.outgoing for end in ends)
        if link.fidelity is not None and not link.silent
    ]


def of_fidelity(found: Found) -> list[dict[str, Any]]:
    """What coding lost on each link, in order."""
    return _in_order(one for rank in found for one in rank)


def _in_order(links: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(links, key=lambda one: (one["edge"], one["direction"] != "forward"))
