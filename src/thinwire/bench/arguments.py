"""The words after ``thinwire bench``: read, or refused in one line; then measured and shown."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.bench import OPS, ROW
from thinwire.spec import names, nearest
from thinwire.train import extend
from thinwire.train.config import PLUGIN_HELP, ConfigError
from thinwire.train.parser import Parser

if TYPE_CHECKING:
    from thinwire.codecs import Codec

_SIZES, _QUICK_SIZES = "4M,16M,64M", "4M"
_ROUNDS, _QUICK_ROUNDS = 15, 5
_MOST_ROUNDS = 10_000
_MOST_THREADS = 1024
_LARGEST = 1 << 31  # values; top-k takes no longer rows
_OPTIONS = {
    "--quick": "4M values and few rounds: less than a minute",
    "--sizes": f"numbers of values, as 64K or 4M (default {_SIZES})",
    "--codecs": "codecs, as int4,int4:group=1024 (default: the usual ones)",
    "--plugin": PLUGIN_HELP,
    "--ops": f"operations to measure (default {','.join(OPS)})",
    "--rounds": f"rounds, in each of which an operation runs once (default {_ROUNDS})",
    "--threads": "torch's threads; above 1 wall-clock time is measured (default 1)",
    "--level": "instruction set of the kernels, or eager (default: the best there is)",
    "--json": "print one JSON document on stdout, everything else on stderr",
    "--out": "a file to which the JSON document is written as well",
}
_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

_EXAMPLES = """examples:
  thinwire bench codecs                             4M, 16M and 64M values; some minutes
  thinwire bench codecs --quick                     4M values, less than a minute
  thinwire bench codecs --sizes 1M --codecs int4,int8:group=64 --json
"""


@dataclass(frozen=True)
class Options:
    """What ``thinwire bench codecs`` was asked for; codecs and ops as texts, None: the usual."""

    sizes: tuple[int, ...]
    codecs: str | None
    plugins: tuple[str, ...]
    ops: tuple[str, ...]
    rounds: int
    threads: int
    level: str | None
    json: bool
    out: Path | None


def run(arguments: Sequence[str]) -> int:
    """Run ``thinwire bench`` with these words; returns its exit code. Raises ConfigError."""
    parser = Parser(
        prog="thinwire bench",
        description="Measure what the codecs cost on this machine.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("what", nargs="?", help="what to measure: codecs")
    options, rest = parser.parse_known_args(list(arguments[:1]))
    if rest or options.what != "codecs":
        what = options.what or (rest[0] if rest else "")
        raise ConfigError(f"can't measure '{what}'; write thinwire bench codecs")
    return measure(read_options(arguments[1:]))


def read_options(arguments: Sequence[str]) -> Options:
    """Read the words after ``thinwire bench codecs``, without torch; raises ConfigError."""
    given, unknown = _parser().parse_known_args(list(arguments))
    if unknown and unknown[0].startswith("-"):
        raise ConfigError(f"unknown option {unknown[0]}{nearest(unknown[0], _OPTIONS)}")
    if unknown:
        raise ConfigError(f"unexpected argument '{unknown[0]}'; codecs are named by --codecs")
    sizes = given.sizes or (_QUICK_SIZES if given.quick else _SIZES)
    rounds = given.rounds or str(_QUICK_ROUNDS if given.quick else _ROUNDS)
    return Options(
        tuple(dict.fromkeys(_size(text) for text in sizes.split(","))),
        given.codecs,
        tuple(given.plugin or ()),
        OPS if given.ops is None else _ops(given.ops),
        _number("--rounds", rounds, _MOST_ROUNDS),
        _number("--threads", given.threads or "1", _MOST_THREADS),
        given.level,
        given.json,
        None if given.out is None else _writable(given.out),
    )


def _parser() -> Parser:
    parser = Parser(
        prog="thinwire bench codecs",
        description="Measure the codecs and the AQ-SGD step beside a copy and beside their peers.",
        epilog=_EXAMPLES,
    )
    for name, text in _OPTIONS.items():
        if name in ("--quick", "--json"):
            parser.add_argument(name, action="store_true", help=text)
        elif name == "--plugin":
            parser.add_argument(name, action="append", metavar="FILE", help=text)
        else:
            parser.add_argument(name, metavar="VALUE", help=text)
    return parser


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12})([KMG]?)", text.strip().upper())
    if found is None:
        raise ConfigError(f"--sizes: '{text}' is no number of values; write 64K, 4M or 4194304")
    numel = int(found[1]) * _SUFFIXES[found[2]]
    if numel % ROW or not 0 < numel < _LARGEST:
        raise ConfigError(
            f"--sizes: {text} values; a size is a multiple of {ROW} from {ROW} to below 2G"
        )
    return numel


def _ops(text: str) -> tuple[str, ...]:
    asked = [op.strip() for op in text.split(",")]
    for op in asked:
        if op not in OPS:
            raise ConfigError(f"--ops: unknown operation '{op}'{nearest(op, OPS)}")
    return tuple(op for op in OPS if op in asked)


def _number(option: str, text: str, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise ConfigError(f"{option}: '{text}' is not a whole number from 1 to {most}")
    return int(text)


def _writable(text: str) -> Path:
    """The file to write, which is replaced if it is there; refused before minutes are spent."""
    path = Path(text)
    try:
        if text == "" or path.is_dir():
            raise ConfigError(f"--out: '{text}' is no file; name one, as bench.json")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"--out: can't write {text}; its folder must be there, and writable")
    except (OSError, ValueError) as error:  # a name too long, or with a NUL character
        raise ConfigError(f"--out: can't use {text}: {error}") from None
    return path


def _named(text: str, known: Sequence[str]) -> list[str]:
    """The specs in a list whose commas also divide the options of a codec."""
    specs: list[str] = []
    for part in text.split(","):
        name = re.split(r"[:(]", part.strip())[0]
        if specs and ":" in specs[-1] and name not in known:
            specs[-1] += "," + part
        else:
            specs.append(part)
    return specs


def measure(options: Options) -> int:
    """Measure, show the table, and write what was asked for; returns the exit code."""
    extend.load(options.plugins)
    from thinwire.bench import report, timing
    from thinwire.bench import run as benchmark
    from thinwire.native import library
    from thinwire.train.report import LiveLine, console

    coders: list[Codec] | None = None
    if options.codecs is not None:
        coders = benchmark.named_codecs(_named(options.codecs, names("codec")))
    if options.level is not None and options.level not in (*library.levels(), library.EAGER):
        known = (*library.levels(), library.EAGER)
        raise ConfigError(f"--level: no '{options.level}' here{nearest(options.level, known)}")
    heap_kept = timing.keep_heap()
    with contextlib.suppress(ValueError):  # not the main thread, which alone sees signals
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the live line cleans up
    level = contextlib.nullcontext() if options.level is None else library.forced(options.level)
    with level, LiveLine(console(to_stderr=True)) as line:
        document = benchmark.document(
            options.sizes,
            coders,
            options.ops,
            options.rounds,
            options.threads,
            heap_kept,
            line.show,
        )
    report.show(console(to_stderr=options.json), document)
    _write(options, document)
    return 0


def _write(options: Options, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1)
    if options.json:
        sys.stdout.write(text + "\n")
    if options.out is not None:
        try:
            options.out.write_text(text + "\n")
        except OSError as error:
            raise ConfigError(f"--out: can't write {options.out}: {error.strerror}") from None
