"""``thinwire study GRID.toml``: its words, and what becomes of them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.store.lock import FolderInUseError, FolderLock
from thinwire.study import tables
from thinwire.study.grid import Grid, Plan, read
from thinwire.study.results import Result, load
from thinwire.train import extend
from thinwire.train.config import PLUGIN_HELP, ConfigError
from thinwire.train.parser import Parser
from thinwire.train.words import one_line

if TYPE_CHECKING:
    from thinwire.study.runner import Runner

_SHIPPED = Path(__file__).parent / "grids"
_EPILOG = """examples:
  thinwire study quantization                    a study that comes with thinwire
  thinwire study mine.toml --plugin sign.py --add sign --seeds 1
  thinwire study images --set data.path=mnist    a setting of all runs, instead of the file's
  thinwire study mine.toml --report              the table of what is there so far

Runs that are finished are not run again: stop and start a study at will.
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for."""

    grid: Grid
    folder: Path
    jobs: int
    json: bool
    report: bool
    keep: bool


def run(arguments: Sequence[str]) -> int:
    """Run and report a study; returns the exit code. Raises ConfigError."""
    options = read_options(arguments)
    from thinwire.study.runner import Runner, Stopped  # torch takes seconds
    from thinwire.train.stop import say, stopped_by

    folder = options.folder
    try:
        if options.report and not folder.is_dir():
            raise ConfigError(f"--report: there is no study in {folder}; run it first")
        folder.mkdir(parents=True, exist_ok=True)
        lock = None if options.report else FolderLock(folder)
        runner = Runner(folder, options.jobs, say, options.keep)
        found = _found(options, runner)
        if lock is not None:
            lock.release()
    except FolderInUseError:
        raise ConfigError(f"{folder} is in use by another study; wait, or give --out") from None
    except OSError as error:
        raise ConfigError(f"can't keep the study in {folder}: {error.strerror}") from None
    except Stopped as stopped:
        say(stopped_by(stopped.number))
        return 128 + stopped.number
    print(json.dumps(found, indent=2) if options.json else tables.markdown(found))
    return 0


def _found(options: Options, runner: Runner) -> dict[str, Any]:
    """What the study found, with the runs that were missing; into its folder too."""
    results = load(options.folder)
    best: dict[str, float | None] = {}
    for plan in options.grid.plans:
        if not options.report:
            results = runner.run(options.grid.trials(plan))
        best[plan.name] = chosen(options.grid, plan, results)
    if not options.report:
        finals = [
            case
            for plan in options.grid.plans
            for case in options.grid.finals(plan, best[plan.name])
        ]
        results = runner.run(sorted(finals, key=lambda case: case.seed))
    found = tables.document(options.grid, results, best)
    if any(plan["runs"] or plan["failed"] for plan in found["plans"]):
        write(options.folder, found, options.grid, results, best)
    return found


def chosen(grid: Grid, plan: Plan, results: Mapping[str, Result]) -> float | None:
    """The learning rate with which a plan ended lowest on validation, codec on; None where there is
    no choice, or nothing to choose by."""
    scored = {
        case.lr: results[case.key]["curve"][-1]["val_loss_codec"]
        for case in grid.trials(plan)
        if "curve" in results.get(case.key, {})
    }
    return min(scored, key=lambda lr: scored[lr], default=None)


def write(
    folder: Path,
    found: Mapping[str, Any],
    grid: Grid,
    results: Mapping[str, Result],
    best: Mapping[str, float | None],
) -> None:
    """The tables and, where matplotlib is installed, the plots of a study into its folder."""
    (folder / "study.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (folder / "study.md").write_text(tables.markdown(found), encoding="utf-8")
    (folder / "study.tex").write_text(tables.latex(found), encoding="utf-8")
    try:
        from thinwire.study.plot import draw
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    curves = {
        plan.name: [
            results[case.key]
            for case in grid.finals(plan, best[plan.name])
            if "curve" in results.get(case.key, {})
        ]
        for plan in grid.plans
    }
    if any(curves.values()):
        draw(found, curves, folder / "study.png")


def read_options(arguments: Sequence[str]) -> Options:
    """The words after ``thinwire study``; raises ConfigError."""
    parser = _parser()
    given = parser.parse_args(arguments)
    path = Path(given.grid)
    if not path.is_file() and path.suffix != ".toml":  # a folder may have a study's name
        path = _SHIPPED / f"{given.grid}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in _SHIPPED.glob("*.toml")))
        raise ConfigError(f"there is no study {given.grid}; those that come with thinwire: {known}")
    grid = read(
        path,
        given.add or [],
        _whole("--seeds", given.seeds),
        given.plugin or [],
        given.set or [],
    )
    extend.load(tuple(grid.settings.get("plugin", ())))
    check_specs(grid)
    folder = Path(given.out) if given.out else Path("studies") / path.stem
    return Options(
        grid,
        folder,
        _whole("--jobs", given.jobs) or 1,
        given.json,
        given.report,
        given.keep,
    )


def check_specs(grid: Grid) -> None:
    """Refuse a plan whose schemes cannot be read, or do not go together, before anything runs."""
    import thinwire as tw

    for plan in grid.plans:
        settings = grid.case(plan, 0, None).settings
        forward = settings.get("plan.forward", "raw")
        backward = settings.get("plan.backward", "raw" if forward == "off" else "int8")
        try:
            tw.Plan("raw" if forward == "default" else forward, backward)
        except tw.SpecError as error:
            raise ConfigError(f"the plan '{plan.name}': {one_line(error)}") from None


def _whole(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 3 or not 1 <= int(text) <= 100:
        raise ConfigError(f"{name}: '{text}' is no whole number from 1 to 100")
    return int(text)


def _parser() -> Parser:
    parser = Parser(
        prog="thinwire study",
        description="Compare plans over seeds: run what is missing, and tell it in one table.",
        epilog=_EPILOG,
    )
    parser.add_argument("grid", metavar="GRID", help="a TOML file, or a study of thinwire's own")
    parser.add_argument(
        "--add", action="append", metavar="SPEC", help="a further plan: int4, or 'int4 / int8'"
    )
    parser.add_argument("--plugin", action="append", metavar="FILE", help=PLUGIN_HELP)
    parser.add_argument(
        "--set",
        action="append",
        metavar="NAME=VALUE",
        help="a setting of all runs instead of the file's, as data.path=images",
    )
    parser.add_argument("--seeds", metavar="N", help="seeds for each plan, instead of the file's")
    parser.add_argument("--out", metavar="DIR", help="the study's folder (default studies/NAME)")
    parser.add_argument("--jobs", metavar="N", help="runs side by side, a thread each (default 1)")
    parser.add_argument(
        "--report", action="store_true", help="run nothing: the table of what is there"
    )
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints of all runs")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON on stdout")
    return parser
