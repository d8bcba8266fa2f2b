"""The quality experiment: ``python -m benchmarks.quality run`` and ``… report``.

`run` does the cases that the results lack, one after the other, and appends a line for each. It can
be stopped and started at will. `report` writes the tables and, where matplotlib is installed, the
plot.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.quality import report
from benchmarks.quality.cases import Case, grid
from benchmarks.quality.results import RESULTS, append, load

_ROOT = Path(__file__).parents[2]


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="do what is missing")
    run.add_argument("--texts", type=Path, help="folder with the other texts, by name")
    run.add_argument("--limit", type=int, help="runs after which to stop")
    run.add_argument("--stop", type=Path, help="a file; once it exists no further run is started")
    commands.add_parser("list", help="the cases in their order; x: there already")
    commands.add_parser("report", help="write the tables and the plot")
    options = parser.parse_args()
    if options.command == "run":
        run_missing(options.texts, options.limit, options.stop)
    elif options.command == "list":
        done = load()
        for case in grid():
            print("x" if case in done else " ", case)
    else:
        report.write(load())


def run_missing(texts: Path | None, limit: int | None, stop: Path | None) -> None:
    """Run the cases without a result in their order, each in a process of its own."""
    missing = [case for case in grid() if case not in load()]
    for number, case in enumerate(missing[:limit], start=1):
        if stop is not None and stop.exists():
            print(f"stopped by {stop}")
            return
        if case.text != "reference" and texts is None:
            print(f"left out, for want of --texts: {case}")
            continue
        began = time.monotonic()
        line = _in_a_process(case, texts)
        append(line, RESULTS / f"{case.text}.jsonl")
        outcome = json.loads(line)
        loss = outcome.get("val_loss")
        print(
            f"{number}/{len(missing)} {case.text} {case.stages} stages {case.epochs} epochs "
            f"lr {case.lr:g} seed {case.seed} {case.plan}: "
            + (f"{loss:.4f}" if loss is not None else outcome["failed"])
            + f", {time.monotonic() - began:.0f} s",
            flush=True,
        )


def _in_a_process(case: Case, texts: Path | None) -> str:
    command = [sys.executable, "-m", "benchmarks.quality.measure"]
    command += [json.dumps(dataclasses.asdict(case))]
    if texts is not None:
        command += ["--texts", str(texts.resolve())]
    found = subprocess.run(
        command,
        cwd=_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return found.stdout.splitlines()[-1]


if __name__ == "__main__":
    main()
