"""The words after ``thinwire check``: read, or refused in one line; then checked and shown."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire import plugins
from thinwire.spec import nearest
from thinwire.train import extend
from thinwire.train.config import PLUGIN_HELP, ConfigError
from thinwire.train.parser import Parser

if TYPE_CHECKING:
    from thinwire.contract.suite import Report

_EXAMPLES = """examples:
  thinwire check sign.py                            what the file registers
  thinwire check grid.py --spec grid:bits=5         with other options as well
  thinwire check --spec 'delta(int4)' --json        what is built in
"""
_OPTIONS = ("--spec", "--plugin", "--json", "--help")


@dataclass(frozen=True)
class Options:
    """What ``thinwire check`` was asked for."""

    files: tuple[str, ...]
    specs: tuple[str, ...]
    plugins: tuple[str, ...]
    json: bool


def run(arguments: Sequence[str]) -> int:
    """Run ``thinwire check`` with these words; returns its exit code. Raises ConfigError."""
    options = read_options(arguments)
    specs = _specs(options)
    from thinwire.contract import report
    from thinwire.contract.suite import examine
    from thinwire.train.report import LiveLine, console

    with contextlib.suppress(ValueError):  # not the main thread, which alone sees signals
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the live line cleans up
    reports: list[Report] = []
    screen = console(to_stderr=options.json)
    for spec in specs:
        with LiveLine(screen) as line:

            def at(name: str, line: LiveLine = line, spec: str = spec) -> None:
                line.show(f"{spec}: {name}", False)

            with contextlib.redirect_stdout(sys.stderr):  # what somebody's code prints
                found = examine(spec, at)
        reports.append(found)
        report.show(screen, found)
    if options.json:
        print(json.dumps(report.document(reports), indent=1))
    complaint = report.complaint(reports)
    if complaint is not None:
        sys.stdout.flush()
        print(f"thinwire: error: {complaint}", file=sys.stderr)
    return 0 if complaint is None else 1


def read_options(arguments: Sequence[str]) -> Options:
    """Read the words, without torch; raises ConfigError."""
    parser = Parser(
        prog="thinwire check",
        description="Try all that is asked of a codec or scheme.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="of which all is checked")
    parser.add_argument(
        "--spec", action="append", default=[], help="a codec or scheme; may be given several times"
    )
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="FILE", help=f"{PLUGIN_HELP}; not checked"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    given, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}{nearest(unknown[0], _OPTIONS)}")
    if not given.files and not given.spec:
        raise ConfigError("nothing to check: name a Python file, or a codec by --spec")
    return Options(tuple(given.files), tuple(given.spec), tuple(given.plugin), given.json)


def _specs(options: Options) -> list[str]:
    """What is to be checked: the names that the files register, and the specs, each once."""
    extend.load(options.plugins)
    own = extend.load(options.files, quiet=True)
    import thinwire as tw
    from thinwire.spec import simplest

    specs = []
    for name in own:
        try:
            specs.append(simplest(name))
        except tw.SpecError as error:
            if not any(spec.startswith(name) for spec in options.specs):
                raise ConfigError(f"{error}; give it with --spec, as --spec '{name}:…'") from None
    for file in options.files:
        specs += [f"predicted(int8,by={name})" for name in plugins.sources_of(Path(file))]
    for spec in options.specs:
        try:
            tw.scheme(spec)
        except tw.SpecError as error:
            raise ConfigError(f"--spec: {error}") from None
        specs.append(spec)
    return list(dict.fromkeys(specs))
