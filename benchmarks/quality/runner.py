"""Does the cases that the results lack, each in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.quality.cases import Case, grid
from benchmarks.quality.results import RESULTS, append, load

_ROOT = Path(__file__).parents[2]
_POLL_S = 2.0
_SETTLE_S = 60.0  # after a start: by then the load average of a minute knows of it


@dataclass(frozen=True)
class Limits:
    """When a further run is started: not beside others while the load average is above ``load``.

    None is once the file ``stop`` exists, and at most ``runs`` are in all.
    """

    jobs: int = 1
    load: float = 1.5
    runs: int | None = None
    stop: Path | None = None


@dataclass
class _Run:
    case: Case
    process: subprocess.Popen[str]
    output: IO[str]
    began: float


def run_missing(texts: Path | None, limits: Limits) -> None:
    """Run the cases without a result in their order; a run that breaks ends all."""
    done = load()
    missing = [case for case in grid() if case not in done]
    lacking = [case for case in missing if case.text != "reference" and texts is None]
    if lacking:
        print(f"{len(lacking)} runs on other texts are left out for want of --texts")
    waiting = [case for case in missing if case not in lacking][: limits.runs]
    running: list[_Run] = []
    try:
        while waiting or running:
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                _record(run, left=len(waiting) + len(running))
            if limits.stop is not None and limits.stop.exists():
                waiting.clear()
            if waiting and _may_start(running, limits):
                running.append(_started(waiting.pop(0), texts))
            time.sleep(_POLL_S)
    finally:
        for run in running:
            run.process.terminate()


def _may_start(running: list[_Run], limits: Limits) -> bool:
    if not running:
        return True
    settled = time.monotonic() - running[-1].began > _SETTLE_S
    return len(running) < limits.jobs and settled and os.getloadavg()[0] < limits.load


def _started(case: Case, texts: Path | None) -> _Run:
    command = [sys.executable, "-m", "benchmarks.quality.measure"]
    command += [json.dumps(dataclasses.asdict(case))]
    if texts is not None:
        command += ["--texts", str(texts.resolve())]
    output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed by _record
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=output, text=True)
    return _Run(case, process, output, time.monotonic())


def _record(run: _Run, left: int) -> None:
    """Append the result of a run that has ended."""
    if run.process.returncode != 0:
        raise RuntimeError(f"exit code {run.process.returncode}: {run.case}")
    with run.output as output:
        output.seek(0)
        line = output.read().splitlines()[-1]
    append(line, RESULTS / f"{run.case.text}.jsonl")
    outcome, case = json.loads(line), run.case
    print(
        f"{case.text} {case.stages} stages {case.epochs} epochs lr {case.lr:g} "
        f"{case.layers} blocks seed {case.seed} {case.plan}: "
        + (f"{outcome['val_loss']:.4f}" if "val_loss" in outcome else outcome["failed"])
        + f", {time.monotonic() - run.began:.0f} s, {left} left",
        flush=True,
    )
