"""A run that was stopped or killed and resumed equals one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.distributed.runs import (
    TINY,
    Ending,
    assert_equal_runs,
    run,
    text_in,
)

CASES = {
    "delta(int4)": (2, []),
    "stochastic": (2, "--forward=delta(int2:round=stochastic) --backward=int4:round=stochastic"),
    "memory": (1, "--link.transport=memory --pipeline.stages=2"),
    "four ranks, tied": (4, "--model.tied=true --forward=delta(int4) --backward=delta(int4)"),
    "dropout": (2, "--model.dropout=0.2 --forward=bf16"),
    "two stages a rank": (2, "--pipeline.schedule=ZBV --forward=raw --backward=raw"),
    "torch's own operations": (2, "--forward=off --backward=off"),
    "fp32 on disk": (2, "--forward=delta(int4,ref=fp32) --ref.budget=26kb"),
    "bf16 on disk": (2, "--forward=delta(int3,ref=bf16) --ref.budget=14kb"),
    "int8 on disk": (2, "--ref.budget=7kb"),
    "int4 on disk": (2, "--forward=delta(int4,first=int6,ref=int4) --ref.budget=4kb"),
    "bounded on disk": (2, "--ref.budget=7kb --ref.disk=12kb"),
    "four stages on disk": (4, "--backward=delta(int4) --ref.budget=30kb"),
    "in memory, on disk": (1, "--link.transport=memory --pipeline.stages=4 --ref.budget=40kb"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    case: str, pool: Pool, tmp_path: Path
) -> None:
    world_size, more = CASES[case]
    options = [*TINY, "--data.path", text_in(tmp_path), "--checkpoint.every=5"]
    options += more.split() if isinstance(more, str) else more
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    found = pool.run(run, options, whole, world_size=world_size)
    assert {one.how for one in found} == {"complete"}
    found = pool.run(run, options, cut, ending=Ending(stop_at=4), world_size=world_size)
    assert {(one.how, one.step) for one in found} == {("stopped", 4)}  # one rank was asked
    found = pool.run(
        run, [], cut, resumed=True, ending=Ending(crash_after=3), world_size=world_size
    )
    assert {one.how for one in found} == {"crashed"}  # after step 7, with step 5 saved
    found = pool.run(run, [], cut, resumed=True, world_size=world_size)
    assert {one.how for one in found} == {"complete"}, found[0]
    assert "goes on after step 5" in found[0].shown
    assert "dropped" not in found[0].shown
    assert_equal_runs(Path(whole), Path(cut))
