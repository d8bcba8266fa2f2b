"""The examples run as they stand."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FINETUNE = Path(__file__).parents[1] / "examples" / "finetune.py"


def losses(folder: Path, epochs: int, code: int = 0) -> list[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [str(FINETUNE), "--out", str(folder), "--epochs", str(epochs)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == code, found.stderr
    return [line for line in found.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.timeout(300)
def test_the_fine_tuning_example_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = losses(tmp_path / "whole", 3)
    assert len(whole) == 12
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for rank in range(2):  # as if it had been killed after step 10
        (tmp_path / "cut" / f"rank-{rank}" / "last").write_text("10")
        shutil.rmtree(tmp_path / "cut" / f"rank-{rank}" / "step-12")
    assert losses(tmp_path / "cut", 3) == whole[10:]


def test_the_example_of_a_trainable_boundary_sends_a_quarter() -> None:
    words = [sys.executable, str(FINETUNE.with_name("bottleneck.py")), "--steps", "2"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    sent = [float(line.split()[-3]) for line in found.stdout.splitlines()]
    assert len(sent) == 4
    assert sent[2] == pytest.approx(sent[0] / 4, rel=0.02)
    assert sent[3] == pytest.approx(sent[1] / 4, rel=0.05)
