"""The scripts that train within their own process keep up with the product."""

import subprocess
import sys
from pathlib import Path

CODE = """
from benchmarks.quality import drift, measure
from thinwire.train import config

settings = {
    "link.transport": "memory", "link.rate": "none", "threads": 1, "pipeline.stages": 2,
    "plan.forward": "delta(int4)", "model.layers": 2, "model.dim": 16, "model.heads": 2,
    "model.context": 16, "train.quick": True, "train.epochs": 3,
}
watch = drift.Watch()
with watch.first_stage():
    found = measure._train(config.build(settings))
assert found["links"][0]["kinds"].keys() == {"first", "change"}, found["links"]
assert 0 < found["val_loss"] < 6, found
assert len(found["epoch_val_loss_codec"]) == 2, found
assert [epoch["epoch"] for epoch in watch.epochs()] == [1, 2, 3], watch.epochs()
"""


def test_a_quality_run_reports_losses_traffic_and_how_far_activations_move() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
