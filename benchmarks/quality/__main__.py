"""The quality experiment: ``python -m benchmarks.quality run``, ``… list`` and ``… report``.

`run` does the cases that the results lack and appends a line for each; it can be stopped and
started at will. `list` shows the cases in their order. `report` writes the tables and, where
matplotlib is installed, the plot.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.quality import report
from benchmarks.quality.cases import grid
from benchmarks.quality.results import load
from benchmarks.quality.runner import Limits, run_missing


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="do what is missing")
    run.add_argument("--texts", type=Path, help="folder with the other texts, by name")
    run.add_argument("--jobs", type=int, default=1, help="runs at once")
    run.add_argument("--load", type=float, default=1.5, help="load average for more than one")
    run.add_argument("--runs", type=int, help="runs after which to stop")
    run.add_argument("--stop", type=Path, help="a file; once it exists no further run is started")
    commands.add_parser("list", help="the cases in their order; x: there already")
    commands.add_parser("report", help="write the tables and the plot")
    options = parser.parse_args()
    if options.command == "run":
        limits = Limits(options.jobs, options.load, options.runs, options.stop)
        run_missing(options.texts, limits)
    elif options.command == "list":
        done = load()
        for case in grid():
            print("x" if case in done else " ", case)
    else:
        report.write(load())


if __name__ == "__main__":
    main()
