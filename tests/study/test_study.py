"""``thinwire study``: real runs, resumable, and one table."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.runs import text_in
from thinwire.store.lock import FolderLock, is_held
from thinwire.study import arguments, runner
from thinwire.study.arguments import read_options
from thinwire.study.results import load
from thinwire.train.config import ConfigError

GRID = """
title = "A tiny study"
seeds = 1
learning_rates = [0.001, 0.01]
rates = ["10mbit"]

[settings]
model.dim = 16
model.heads = 2
model.context = 16
train.batch = 8
train.epochs = 2
pipeline.microbatches = 4
data.validation = 0.2
data.path = "{0}"

[[plan]]
name = "fp32"
forward = "raw"
backward = "raw"

[[plan]]
forward = "topk:0.2"
backward = "topk:0.2,mask=shared"
"""


@pytest.mark.timeout(300)
def test_a_study_runs_what_it_lacks_and_tells_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, out = tmp_path / "tiny.toml", tmp_path / "out"
    grid.write_text(GRID.format(text_in(tmp_path)))
    words = [str(grid), "--out", str(out), "--jobs", "2"]
    assert arguments.run(words) == 0
    said = capsys.readouterr()
    assert (
        said.err.count("val loss with codec off") == 4
    )  # two plans at two rates; seed 0 is a trial
    results = load(out)
    assert len(results) == 4
    assert {result["lr"] for result in results.values()} == {0.001, 0.01}
    assert not list(out.glob("runs/*/rank-*"))  # checkpoints go, what was found stays
    assert "| `fp32` | 0.01 | 1 |" in said.out
    assert {path.name for path in out.iterdir()} >= {
        *("study.json", "study.md", "study.tex", "study.png")
    }

    def never(*_: Any) -> None:
        raise AssertionError("everything is there already")

    monkeypatch.setattr(runner.Runner, "_process", never)
    assert arguments.run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    fp32, sparse = found["plans"]
    assert fp32["scores"]["off"] == fp32["scores"]["as-trained"]
    assert sparse["scores"]["off"] != sparse["scores"]["as-trained"]
    assert sparse["mbytes"] < fp32["mbytes"] / 3
    assert found["split"] == "val"

    lines = (out / "results.jsonl").read_text().splitlines(keepends=True)
    (out / "results.jsonl").write_text("".join(lines[:-1]))  # stopped before it was scored
    assert arguments.run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.timeout(180)
def test_a_study_that_is_stopped_saves_its_runs_and_goes_on(tmp_path: Path) -> None:
    grid, out = tmp_path / "tiny.toml", tmp_path / "out"
    text = GRID.format(text_in(tmp_path)).replace("train.epochs = 2", "train.steps = 1000000")
    grid.write_text(text.replace("learning_rates = [0.001, 0.01]\n", ""))
    command = [sys.executable, "-m", "thinwire", "study", str(grid), "--out", str(out)]
    study = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not any("loss" in file.read_text() for file in out.glob("runs/*/metrics.jsonl")):
        assert study.poll() is None
        time.sleep(0.1)
    study.send_signal(signal.SIGTERM)
    _, said = study.communicate()
    assert study.returncode == 128 + signal.SIGTERM
    assert said.splitlines() == [
        "stopping: runs are saved, and go on with the same command",
        "thinwire: stopped by SIGTERM",
    ]
    (saved,) = out.glob("runs/*/rank-0")
    assert list(saved.glob("step-*"))
    assert not is_held(saved)  # nobody goes on in it
    for manifest in saved.glob("step-*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(ConfigError, match=r"is damaged.*; remove .*/runs/\w+ to run it anew"):
        arguments.run([str(grid), "--out", str(out)])


@pytest.mark.timeout(120)
def test_a_run_that_is_refused_ends_the_study_with_its_line(tmp_path: Path) -> None:
    grid = tmp_path / "tiny.toml"
    grid.write_text(GRID.format(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"fp32, seed 0, lr 0\.001: --data\.path: can't read"):
        arguments.run([str(grid), "--out", str(tmp_path / "out")])


def test_a_folder_that_cannot_be_a_studys_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.Runner, "run", lambda self, cases: {})
    grid = tmp_path / "tiny.toml"
    grid.write_text(GRID.format("x"))
    (tmp_path / "file").write_text("")
    (tmp_path / "busy").mkdir()
    (tmp_path / "odd" / "results.jsonl").mkdir(parents=True)
    lock = FolderLock(tmp_path / "busy")
    for name, why in {
        "file": "can't keep the study in",
        "x" * 300: "can't keep the study in",
        "odd": "can't keep the study in",
        "busy": "is in use by another study",
    }.items():
        with pytest.raises(ConfigError, match=why):
            arguments.run([str(grid), "--out", str(tmp_path / name)])
    lock.release()
    with pytest.raises(ConfigError, match="--report: there is no study in"):
        arguments.run([str(grid), "--out", str(tmp_path / "none"), "--report"])
    (tmp_path / "empty").mkdir()
    assert arguments.run([str(grid), "--out", str(tmp_path / "empty"), "--report"]) == 0
    assert not list((tmp_path / "empty").iterdir())  # nothing found is nothing to write down


def test_words(tmp_path: Path) -> None:
    grid = tmp_path / "tiny.toml"
    grid.write_text(GRID.format("x"))
    options = read_options([str(grid), "--add", "int4", "--seeds", "2", "--jobs", "3", "--report"])
    assert [plan.name for plan in options.grid.plans][-1] == "int4 / int4"
    assert (options.grid.seeds, options.jobs, options.report) == (2, 3, True)
    assert options.folder == Path("studies/tiny")
    for words, why in {
        ("nothing",): "there is no study nothing; those that come with thinwire:",
        (str(grid), "--seeds", "x"): "--seeds: 'x' is no whole number from 1 to 100",
        (str(grid), "--jobs", "0"): "--jobs: '0' is no whole number",
    }.items():
        with pytest.raises(ConfigError) as caught:
            read_options(words)
        assert why in str(caught.value)
