"""Which samples of a step are seen for the first time: a pure function, run alike at both ends."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence


class Visit(enum.Enum):
    """How a sample's value travels in this step."""

    FIRST = "first"  # no reference, or one of another length: a value that becomes the reference
    AGAIN = "again"  # the reference is there: its change
    REPEAT = "repeat"  # the sample's second occurrence in this step: a value, state untouched


def plan_step(
    lengths_held: Mapping[int, int],
    microbatches: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[list[Visit]]:
    """The visits of one step, a list for each micro-batch.

    ``lengths_held`` maps the keys in the store to the number of values of their reference;
    ``microbatches`` has (keys, values) for each micro-batch, in order of number. The result
    depends on nothing else, so both ends of a link reach it without a message.
    """
    met: set[int] = set()
    plan = []
    for keys, lengths in microbatches:
        visits = []
        for key, length in zip(keys, lengths, strict=True):
            if key in met:
                visits.append(Visit.REPEAT)
            elif lengths_held.get(key) == length:
                visits.append(Visit.AGAIN)
            else:
                visits.append(Visit.FIRST)
            met.add(key)
        plan.append(visits)
    return plan
