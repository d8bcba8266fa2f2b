"""Does the runs that a study lacks, each in a process of its own, some of them side by side."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from thinwire.study.grid import Case
from thinwire.study.results import Result, append, load, of_failure, of_run, split_of
from thinwire.train import config as configuration
from thinwire.train.config import KINDS, VISION, ConfigError
from thinwire.train.metrics import SUMMARY
from thinwire.train.spelling import to_toml
from thinwire.train.stop import heeded

_POLL_S = 0.2
#: How a run ends that the plan itself has broken: the study goes on, and says so.
_BROKEN = re.compile(r"not finite|diverged|\b(nan|inf) at index")


class Stopped(Exception):
    """The study was stopped by the signal ``number``, and its runs with it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


@dataclass
class _Running:
    """``process``: None where an earlier study was stopped before it scored the run. ``resumed``:
    whether it goes on from where one was stopped."""

    case: Case
    folder: Path
    process: subprocess.Popen[str] | None
    stderr: IO[str]
    resumed: bool = False

    @property
    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    @property
    def done(self) -> bool:
        """Whether it has ended with all that a run leaves."""
        return (self.process is None or self.process.returncode == 0) and (
            self.folder / SUMMARY
        ).exists()


class Runner:
    """Runs cases in ``folder`` with ``jobs`` processes at once; results are kept there.

    ``say`` is told of each run that has ended. ``keep``: leave the runs' checkpoints where they
    are.
    """

    def __init__(
        self, folder: Path, jobs: int, say: Callable[[str], None], keep: bool = False
    ) -> None:
        self._folder, self._jobs, self._say, self._keep = folder, jobs, say, keep
        self._running: list[_Running] = []
        self._signal: int | None = None  # that asked to stop

    def run(self, cases: Iterable[Case]) -> dict[str, Result]:
        """The results of all of ``cases``, by key; those that are there already are not run again.

        Raises ConfigError with the run's own line where one is refused or breaks off, and
        ``Stopped`` once runs that were asked to stop have saved where they are.
        """
        with self._heeding():
            return self._run(cases)

    def _run(self, cases: Iterable[Case]) -> dict[str, Result]:
        done = load(self._folder)
        waiting = [case for key, case in {c.key: c for c in cases}.items() if key not in done]
        total = len(waiting)
        try:
            while waiting or self._running:
                for one in [r for r in self._running if r.ended]:
                    self._running.remove(one)
                    result = self._result(one)
                    append(self._folder, result)
                    self._clear(one)
                    done[one.case.key] = result
                    left = len(waiting) + len(self._running)
                    self._say(f"{total - left}/{total}  {_described(one.case, result)}")
                if self._signal is not None:
                    raise Stopped(self._signal)
                while waiting and len(self._running) < self._jobs:
                    self._running.append(self._start(waiting.pop(0)))
                time.sleep(_POLL_S)
        finally:
            self._end()
            for one in self._running:
                if one.process is not None:
                    one.process.wait()
        return done

    def _end(self) -> None:
        """Ask runs to stop where they are, once more to stop at once."""
        for one in self._running:
            if one.process is not None:
                one.process.terminate()

    @contextlib.contextmanager
    def _heeding(self) -> Iterator[None]:
        """While inside, a signal stops the study, and a second one its runs at once."""

        def take(number: int, frame: FrameType | None) -> None:
            if self._signal is not None:
                self._end()
                return
            self._signal = number
            self._say("stopping: runs are saved, and go on with the same command")

        previous = {number: signal.signal(number, take) for number in heeded()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, case: Case) -> _Running:
        folder = self._folder / "runs" / case.key
        if (folder / SUMMARY).exists():
            return _Running(case, folder, None, _temporary())
        words, resumed = ["train", "--resume", str(folder)], (folder / "run.json").exists()
        if not resumed:
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            settings = folder.parent / f"{case.key}.toml"
            settings.write_text(to_toml(configuration.build(case.settings)), encoding="utf-8")
            words = ["train", str(settings), "--out", str(folder)]
        return _Running(case, folder, *self._process(words), resumed)

    def _process(self, words: Sequence[str]) -> tuple[subprocess.Popen[str], IO[str]]:
        command = [sys.executable, "-m", "thinwire", *words]
        stderr = _temporary()
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=_environment(),
            text=True,
            start_new_session=True,  # what a terminal sends comes through the study alone
        )
        return process, stderr

    def _result(self, one: _Running) -> dict[str, Any]:
        """The result of a run that has ended."""
        line = _line(one.stderr)
        if not one.done:
            if _BROKEN.search(line):
                return of_failure(one.case, line)
            anew = f"; remove {one.folder} to run it anew" if one.resumed else ""
            raise ConfigError(f"{_name(one.case)}: {line}{anew}")
        summary = json.loads((one.folder / SUMMARY).read_text(encoding="utf-8"))
        return of_run(one.case, one.folder, summary, self._recalibrated(one, summary))

    def _clear(self, one: _Running) -> None:
        """Once its result is kept, a run's checkpoints can go."""
        if not self._keep and one.done:
            for checkpoints in one.folder.glob("rank-*"):
                shutil.rmtree(checkpoints)

    def _recalibrated(self, one: _Running, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The score with the codec off and statistics of batch normalization anew, where the model
        has those."""
        if KINDS[summary["config"]["model"]["kind"]] != VISION:
            return []
        words = ["eval", str(one.folder), "--json", "--codec", "off", "--recalibrate"]
        command = [sys.executable, "-m", "thinwire", *words, "--split", split_of(summary)]
        found = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=_environment(),
            start_new_session=True,
        )
        if found.returncode != 0:
            raise ConfigError(f"{_name(one.case)}: {_last(found.stderr)}")
        scores = json.loads(found.stdout)["scores"]
        return [{**score, "codec": "off, recalibrated"} for score in scores]


def _temporary() -> IO[str]:
    """For what a process says; ``_line`` closes it."""
    return tempfile.TemporaryFile("w+", encoding="utf-8")


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def _name(case: Case) -> str:
    rate = "" if case.lr is None else f", lr {case.lr:g}"
    return f"{case.plan.name}, seed {case.seed}{rate}"


def _described(case: Case, result: Result) -> str:
    if "failed" in result:
        return f"{_name(case)}: {result['failed']}"
    measure = "accuracy" if "accuracy" in result["scores"][0] else "loss"
    parts = [f"{score['codec']} {_shown(score[measure], measure)}" for score in result["scores"]]
    split = result["scores"][0]["split"]
    return f"{_name(case)}: {split} {measure} with codec {', '.join(parts)}"


def _shown(value: float, measure: str) -> str:
    return f"{value:.4f}" if measure == "loss" else f"{100 * value:.2f} %"


def _line(stderr: IO[str]) -> str:
    with stderr:
        stderr.seek(0)
        return _last(stderr.read())


def _last(text: str) -> str:
    """The last line of what a process said, without its beginning."""
    lines = text.strip().splitlines() or ["it ended without a word"]
    return lines[-1].removeprefix("thinwire: error: ")
