"""What a compressed run is said to be, beside fp32 and bf16."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from thinwire.train import comparison

LINKS = [{"payload_bytes": 1000, "header_bytes": 100, "kinds": {"first": {}}}]


def summary(step_ms: float, train_s: float, val_loss: float, forward: str) -> dict[str, Any]:
    return {
        "step_ms_median": step_ms,
        "train_s": train_s,
        "val_loss": val_loss,
        "val_loss_codec": val_loss,
        "steps": 648,
        "links": LINKS,
        "config": {"plan": {"forward": forward, "backward": forward}},
    }


def test_the_comparison_gives_speed_ups_and_loss_differences() -> None:
    runs = {
        "compressed": summary(10, 5, 2.001, "int4"),
        "fp32": summary(40, 15, 2.0, "raw"),
        "bf16": summary(20, 10, 2.0, "bf16"),
    }
    found = comparison.compared(runs)
    assert found["against_fp32"]["speedup_step"] == 4
    assert found["against_bf16"]["speedup_run"] == 2
    assert found["against_fp32"]["val_loss_difference"] == pytest.approx(0.001)
    sentence = comparison.sentence(found, runs)
    assert sentence.startswith("Over 648 steps, first visits included, the compressed run")
    assert "3.00x as fast as fp32" in sentence
    stream = io.StringIO()
    Console(file=stream, width=118).print(comparison.table(runs))
    assert "4.00x" in stream.getvalue()
