"""Stopping a run by a signal, and going on with it, as a user does."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.distributed import runs
from tests.distributed.pool import Pool
from tests.train.test_launch import run, start_long_run
from thinwire.train import stop
from thinwire.train.stop import Stop, at_once_line, heeded, torchrun_command


def test_a_run_that_sigterm_stopped_goes_on_as_if_nothing_had_happened(
    pool: Pool, tmp_path: Path
) -> None:
    options = [*runs.TINY, "--data.path", runs.text_in(tmp_path), "--steps=30"]
    options += ["--link.rate=1gbit", "--link.latency=10ms"]  # some steps after the first one
    pool.run(runs.run, options, str(tmp_path / "whole"), world_size=2)
    process = start_long_run(tmp_path, *options)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 143
    told, last = errors.splitlines()
    assert told.startswith("thinwire: stopping after this step")
    (part,) = (tmp_path / "run" / "rank-1").glob("step-*")
    step = int(part.name.removeprefix("step-"))
    assert step < 30
    line = f"stopped by SIGTERM at step {step} of 30; go on with: thinwire train --resume run"
    assert last == f"thinwire: {line}"
    run("--resume", "run", cwd=tmp_path)
    assert runs.records(tmp_path / "run") == runs.records(tmp_path / "whole")
    assert runs.results(tmp_path / "run") == runs.results(tmp_path / "whole")


class Pipeline:
    """What a ``Stop`` asks."""

    asked = 0

    def ask_to_stop(self) -> None:
        self.asked += 1


@pytest.fixture
def watched() -> Any:
    """A ``Stop`` that has this process's signals."""
    before = {number: signal.getsignal(number) for number in stop.SIGNALS}
    watching = Stop()
    watching.watch()
    yield watching
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_that_torchrun_passes_on_is_the_one_that_the_terminal_sent(
    watched: Stop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline: Any = Pipeline()
    with watched.training(pipeline, tmp_path):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # by the agent
        os.kill(os.getpid(), signal.SIGINT)
        assert (pipeline.asked, watched.number) == (1, signal.SIGINT)
        later = time.monotonic() + 2.1
        monkeypatch.setattr(time, "monotonic", lambda: later)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_ends_a_run_at_once_where_nothing_can_be_lost(
    watched: Stop, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    pipeline: Any = Pipeline()
    with watched.training(pipeline, tmp_path):
        pass
    assert watched.phase == "closing"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert pipeline.asked == 0


def test_a_run_that_is_asked_before_its_first_step_stops_after_it(tmp_path: Path) -> None:
    notes: list[tuple[str, Path]] = []
    early = Stop(lambda phase, folder: notes.append((phase, folder)))
    early.ask(signal.SIGTERM)
    pipeline: Any = Pipeline()
    with early.training(pipeline, tmp_path):
        assert pipeline.asked == 1
    assert notes == [("training", tmp_path), ("closing", tmp_path)]


def phases(rank: int, world_size: int, options: list[str], folder: str) -> list[tuple[str, bool]]:
    """The phases of a run, each with whether it has its summary."""
    told: list[tuple[str, bool]] = []
    stop = Stop(lambda phase, own: told.append((phase, (own / "summary.json").exists())))
    screen = Console(quiet=True)
    runs._run(rank, world_size, options, Path(folder), False, False, screen, stop)
    return told


def test_a_run_is_complete_once_it_has_its_summary(pool: Pool, tmp_path: Path) -> None:
    options = [*runs.TINY, "--data.path", runs.text_in(tmp_path), "--link.transport=memory"]
    (told,) = pool.run(phases, options, str(tmp_path / "run"), world_size=1)
    assert told == [("training", False), ("closing", False), ("complete", True)]


@pytest.mark.parametrize(
    ("phase", "line"),
    [
        (None, "thinwire: stopped"),
        ("training", "thinwire: stopped"),
        ("closing", "thinwire: stopped; the last step is saved, go on with: RESUME run"),
        ("complete", "thinwire: stopped; the run in run is complete"),
    ],
)
def test_a_complete_run_is_not_to_be_gone_on_with(phase: str | None, line: str) -> None:
    known = None if phase is None else (phase, Path("run"))
    assert at_once_line(signal.SIGINT, known, lambda folder: f"RESUME {folder}") == line


def test_a_hangup_that_nohup_has_ignored_stays_so() -> None:
    assert signal.SIGHUP in heeded()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert heeded() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_under_torchrun_the_command_to_resume_is_torchruns() -> None:
    one = torchrun_command(Path("runs/a b"), 2, 2)
    assert one == "torchrun --nproc-per-node 2 -m thinwire train --resume 'runs/a b'"
    several = torchrun_command(Path("run"), 4, 2)
    assert several == "torchrun --nnodes 2 --nproc-per-node 2 … -m thinwire train --resume run"
