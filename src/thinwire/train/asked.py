"""The words after ``thinwire eval`` and ``thinwire recalibrate``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.train import config as configuration
from thinwire.train import override, spelling
from thinwire.train.config import PLUGIN_HELP, Config, ConfigError
from thinwire.train.parser import Parser

OFF, AS_TRAINED = "off", "as-trained"
SPLITS = ("val", "test")
_SAMPLES = 2048  # that running statistics are estimated on
#: Settings that may be given, which change nothing of what is evaluated.
_GIVEN = ("data.path", "threads", "device", "link.rate", "link.latency")
_EPILOG = """examples:
  thinwire eval runs/one                          codec off, and as it was trained
  thinwire eval runs/one --codec int4 --split test
  thinwire eval runs/one --recalibrate            with statistics of batch normalization anew
  thinwire eval runs/one --nproc 4                across processes, as it was trained
  thinwire recalibrate runs/one                   the same, kept in the run's folder
"""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is to be evaluated.

    ``codecs``: each ``off``, ``as-trained`` or a spec. ``split``: ``val`` or ``test``.
    ``statistics``: a file of ``recalibrate``. ``recalibrate``: so many training samples, on which
    running statistics are estimated first, for each codec; 0: as they were trained. ``save``: put
    them into the run's folder.
    """

    codecs: tuple[str, ...] = (OFF, AS_TRAINED)
    split: str = "val"
    statistics: str | None = None
    recalibrate: int = 0
    save: bool = False


def read_eval(arguments: Sequence[str]) -> tuple[Config, Path, Asked]:
    """What ``thinwire eval`` was given: settings, the run's folder, and what to do with it."""
    parser = _parser("eval", "Evaluate a run that was trained, with any codec on its links.")
    parser.add_argument(
        "--codec",
        action="append",
        metavar="CODEC",
        help="off, as-trained, or a spec; may be given several times (default: the first two)",
    )
    parser.add_argument("--split", choices=SPLITS, default="val", help="default val")
    parser.add_argument("--statistics", metavar="FILE", help="a file that recalibrate has left")
    parser.add_argument(
        "--recalibrate",
        nargs="?",
        const=str(_SAMPLES),
        metavar="SAMPLES",
        help=f"estimate batch normalization's statistics on so many samples first ({_SAMPLES})",
    )
    given = vars(parser.parse_args(arguments))
    if given.get("statistics") and given.get("recalibrate"):
        raise ConfigError("--statistics and --recalibrate are two ways to the same; give one")
    asked = Asked(
        tuple(dict.fromkeys(given.pop("codec", None) or (OFF, AS_TRAINED))),
        given.pop("split"),
        given.pop("statistics", None),
        _samples(given.pop("recalibrate", None)),
    )
    return *_run_of(given), asked


def read_recalibrate(arguments: Sequence[str]) -> tuple[Config, Path, Asked]:
    """The same of ``thinwire recalibrate``."""
    parser = _parser(
        "recalibrate",
        "Estimate the statistics of a run's batch normalizations anew, for another codec than it "
        "was trained with, and keep them in its folder.",
    )
    parser.add_argument("--codec", default=OFF, metavar="CODEC", help="default off")
    parser.add_argument("--samples", default=str(_SAMPLES), help=f"default {_SAMPLES}")
    given = vars(parser.parse_args(arguments))
    asked = Asked((given.pop("codec"),), "val", None, _samples(given.pop("samples")), save=True)
    return *_run_of(given), asked


def _parser(command: str, description: str) -> Parser:
    parser = Parser(
        prog=f"thinwire {command}",
        description=description,
        epilog=_EPILOG,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    known = {entry.name: entry for entry in configuration.settings()}
    nproc = "processes to start, each with its stages (default: all stages in one)"
    parser.add_argument("--nproc", metavar="VALUE", help=nproc)
    parser.add_argument("--plugin", action="append", metavar="FILE", help=PLUGIN_HELP)
    for name in _GIVEN:
        parser.add_argument(f"--{name}", dest=name, metavar="VALUE", help=known[name].help)
    return parser


def _run_of(given: dict[str, Any]) -> tuple[Config, Path]:
    folder, as_json = Path(given.pop("run")), given.pop("json", False)
    plugins = tuple(given.pop("plugin", ()))
    known = {entry.name: entry for entry in configuration.settings()}
    values = {
        name: spelling.from_text(known[name], text) for name, text in given.items() if name in known
    }
    return override.evaluated(folder, {**values, "json": as_json, "plugin": plugins}), folder


def _samples(text: str | None) -> int:
    if text is None:
        return 0
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) < 2**40:
        raise ConfigError(f"'{text}' is no number of samples; write {_SAMPLES}")
    return int(text)
