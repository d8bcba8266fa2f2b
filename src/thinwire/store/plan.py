"""Which samples of a step have a reference, and who must leave: pure functions, alike at both ends.

A store that cannot hold all samples keeps those that it has: in an epoch each comes once, so a
newcomer is no more likely to be seen again than a member, and least-recently-used would throw
away each one just before its turn. A member leaves when it has not been seen for twice the longest
time that any has taken to come back: it belongs to data that are no longer used.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence

#: While nobody has come back, a member stays for so many visits a member.
_PATIENCE = 16

Microbatches = Sequence[tuple[Sequence[int], Sequence[int]]]


class Visit(enum.Enum):
    """How a sample's value travels in this step."""

    FIRST = "first"  # no reference, or one of another length: a value that becomes the reference
    AGAIN = "again"  # the reference is there: its change
    REPEAT = "repeat"  # the sample's second occurrence in this step: a value, state untouched
    UNKEPT = "unkept"  # no room for a reference: a value, state untouched


@dataclasses.dataclass(frozen=True)
class StepVisits:
    """The visits of a step, a list for each micro-batch, and the keys whose references go."""

    visits: list[list[Visit]]
    evicted: list[int]


class Members:
    """The keys of a bounded store by their last visit: what decides who stays.

    ``capacity``: bytes of references. ``nbytes_of``: bytes of a reference of so many values. Time
    counts visits.
    """

    def __init__(self, capacity: int, nbytes_of: Callable[[int], int]) -> None:
        self.capacity, self.nbytes_of = capacity, nbytes_of
        #: Bytes of the references that there are.
        self.used = 0
        #: Key to the time of its last visit, the longest ago first.
        self.last: dict[int, int] = {}
        self.now = 0
        #: The longest time between two visits of a key so far.
        self.longest = 0

    def departing(self, staying: set[int]) -> Iterator[int]:
        """Those that may leave for others, the one not seen for the longest time first."""
        limit = 2 * self.longest or _PATIENCE * len(self.last)
        for key, seen in self.last.items():
            if self.now - seen <= limit:
                return
            if key not in staying:
                yield key

    def advance(self, microbatches: Microbatches, plan: StepVisits) -> None:
        """A step that was planned takes place."""
        for key in plan.evicted:
            self.last.pop(key, None)
        for (keys, _), visits in zip(microbatches, plan.visits, strict=True):
            for key, visit in zip(keys, visits, strict=True):
                self.now += 1
                if visit in (Visit.FIRST, Visit.AGAIN):
                    seen = self.last.pop(key, None)
                    if seen is not None:
                        self.longest = max(self.longest, self.now - seen)
                    self.last[key] = self.now

    def forget(self, key: int) -> None:
        """``key`` has no reference any more."""
        self.last.pop(key, None)


def plan_step(
    held: Mapping[int, int], microbatches: Microbatches, members: Members | None = None
) -> StepVisits:
    """What both ends of a link do in a step, without a message, and without changing anything.

    ``held`` maps the keys that have a reference to its number of values; ``microbatches`` has
    (keys, values) for each micro-batch, in order of number; ``members`` bounds the store.
    """
    room = None if members is None else _Room(held, microbatches, members)
    met: set[int] = set()
    plan = []
    for keys, lengths in microbatches:
        visits = []
        for key, length in zip(keys, lengths, strict=True):
            if key in met:
                visits.append(Visit.REPEAT)
            elif held.get(key) == length:
                visits.append(Visit.AGAIN)
            elif room is None or room.admits(key, length):
                visits.append(Visit.FIRST)
            else:
                visits.append(Visit.UNKEPT)
            met.add(key)
        plan.append(visits)
    return StepVisits(plan, [] if room is None else room.evicted)


class _Room:
    """What is left of the capacity while a step is planned."""

    def __init__(
        self, held: Mapping[int, int], microbatches: Microbatches, members: Members
    ) -> None:
        self.held, self.members = held, members
        self.evicted: list[int] = []
        self.free = members.capacity - members.used
        self._departing = members.departing({key for keys, _ in microbatches for key in keys})

    def admits(self, key: int, length: int) -> bool:
        nbytes_of = self.members.nbytes_of
        needed = nbytes_of(length) - (nbytes_of(self.held[key]) if key in self.held else 0)
        while needed > self.free:
            leaving = next(self._departing, None)
            if leaving is None:
                return False
            if leaving in self.held:
                self.free += nbytes_of(self.held[leaving])
            self.evicted.append(leaving)
        self.free -= needed
        return True
