"""How often a sample's reference is still there, by the rule of who must leave a full store.

python benchmarks/eviction.py      (seconds; prints the table of docs/decisions/0007)

Each epoch visits all samples once in a new order. ``ours`` is ``plan_step`` itself; the last
column changes to other samples after five epochs, and looks at the five after that.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator

from thinwire.store import Members, Visit, plan_step

SAMPLES, EPOCHS, BATCH = 2000, 10, 16
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)


def visits(seed: int, changed: bool) -> Iterator[tuple[int, list[int]]]:
    """(epoch, keys of a batch), one batch after the other."""
    chance = random.Random(seed)
    for epoch in range(EPOCHS):
        keys = list(range(SAMPLES))
        if changed and epoch >= EPOCHS // 2:
            keys = [key + SAMPLES for key in keys]
        chance.shuffle(keys)
        for start in range(0, SAMPLES, BATCH):
            yield epoch, keys[start : start + BATCH]


def ours(capacity: int, changed: bool = False) -> float:
    """The hit rate of ``plan_step``; first visits that nothing can avoid are left out."""
    members = Members(capacity, lambda n: n)
    held: dict[int, int] = {}
    hits = total = 0
    for epoch, keys in visits(0, changed):
        step = [(keys, [1] * len(keys))]
        plan = plan_step(held, step, members)
        for key in plan.evicted:
            held.pop(key, None)
        members.advance(step, plan)
        for key, visit in zip(keys, plan.visits[0], strict=True):
            if visit == Visit.FIRST:
                held[key] = 1
            if epoch % (EPOCHS // 2 if changed else EPOCHS):
                total += 1
                hits += visit == Visit.AGAIN
        members.used = len(held)
        assert len(held) <= capacity
    return hits / total


def evicting(capacity: int, at_random: bool) -> float:
    """The hit rate where each newcomer puts out the least recently used, or any other."""
    held: OrderedDict[int, None] = OrderedDict()
    chance = random.Random(1)
    hits = total = 0
    for epoch, keys in visits(0, False):
        for key in keys:
            known = key in held
            hits += known and epoch > 0
            total += epoch > 0
            if known:
                held.move_to_end(key)
            else:
                if len(held) == capacity:
                    out = chance.choice(list(held)) if at_random else next(iter(held))
                    del held[out]
                held[key] = None
    return hits / total


def main() -> None:
    """Print the table."""
    print("| capacity | least recently used | random | ours | ours, other samples later |")
    print("|---|---|---|---|---|")
    for share in SHARES:
        capacity = round(share * SAMPLES)
        rates = [
            evicting(capacity, at_random=False),
            evicting(capacity, at_random=True),
            ours(capacity),
            ours(capacity, changed=True),
        ]
        print(f"| {100 * share:.0f} % | " + " | ".join(f"{100 * r:.0f} %" for r in rates) + " |")


if __name__ == "__main__":
    main()
