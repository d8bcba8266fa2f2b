"""What a link counts, and that it goes on from there."""

import torch

from thinwire.counters import LinkCounters, add_gains
from thinwire.frame import Kind, Section


def test_counters_that_are_restored_report_what_was_counted() -> None:
    counters = LinkCounters(0, "forward", "delta(int4)")
    section = Section(Kind.FIRST, "int8", shape=(2, 4), payload=torch.zeros(10, dtype=torch.uint8))
    counters.count([section], 50, [8], train=True)
    counters.count([section], 50, [8], train=False)
    counters.rested = 3
    add_gains(counters.gained, [(Kind.FIRST, 100.0, 10.0), (Kind.CHANGE, 2.0, 0.0)])
    restored = LinkCounters(0, "forward", "delta(int4)")
    restored.add(counters.state())
    assert restored == counters
    assert restored.report()["rested"] == 3
    assert restored.report()["gain_db"] == {"first": 10.0}
    restored.add(counters.state())
    assert restored.gained == {"first": [200.0, 20.0], "change": [4.0, 0.0]}
