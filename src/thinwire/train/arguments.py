"""The words after ``thinwire``: read into a configuration, or refused in one line.

Those after ``thinwire bench`` are read by ``thinwire.bench.arguments``, those after ``thinwire
check`` by ``thinwire.contract.arguments``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from thinwire.spec import nearest
from thinwire.train import config as configuration
from thinwire.train import launch, override, spelling
from thinwire.train.asked import read_eval, read_recalibrate
from thinwire.train.config import Config, ConfigError, Setting
from thinwire.train.parser import Parser
from thinwire.train.words import typed

_EXAMPLES = """examples:
  thinwire train                                    the embedded text, two processes, 100 Mbit/s
  thinwire train --quick                            the same in some seconds
  thinwire train --compare                          also uncompressed and in bf16
  thinwire train run.toml --forward 'delta(int2)' --link.rate 30mbit
  thinwire train --model.kind resnet8 --data.path mnist/ --pipeline.cuts layer1,layer2
  thinwire train --resume runs/one                  go on with a run that was stopped or killed
  torchrun --nproc-per-node 2 -m thinwire train run.toml
"""
_NAMES = {configuration.LANGUAGE: "gpt", configuration.VISION: "resnets"}  # as options call tasks
_COMMANDS = {
    "train": "train a model in pipeline stages whose links are compressed",
    "eval": "evaluate a run with its codecs on the links, without, or with others",
    "recalibrate": "estimate the statistics of a run's batch normalizations anew",
    "study": "compare plans over seeds, and tell it in one table",
    "inspect": "show what a run folder tells: progress, checkpoints, traffic",
    "check": "check codecs and schemes, your own too, against all that is asked of one",
    "bench": "measure what the codecs cost on this machine: thinwire bench codecs",
    "selftest": "check that this machine computes the same bytes as all others",
}


def run(arguments: list[str]) -> int:
    """Run the command with these words; returns its exit code. Raises ConfigError."""
    parser = Parser(
        prog="thinwire",
        description="Train PyTorch models over slow networks.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=_version())
    described = "; ".join(f"{name}: {what}" for name, what in _COMMANDS.items())
    parser.add_argument("command", nargs="?", help=described)
    if not arguments:
        parser.print_help()
        return 0
    options, rest = parser.parse_known_args(arguments[:1])
    if options.command is None and not rest:  # a lone --
        rest = arguments[:1]
    if rest:
        raise ConfigError(f"unknown option '{rest[0]}'{nearest(rest[0], ('--help', '--version'))}")
    if options.command == "train":
        return launch.train(*read_train(arguments[1:]))
    if options.command == "eval":
        return launch.evaluate(*read_eval(arguments[1:]))
    if options.command == "recalibrate":
        return launch.evaluate(*read_recalibrate(arguments[1:]))
    if options.command == "inspect":
        folder, as_json = read_inspect(arguments[1:])
        from thinwire.train.inspection import inspect

        return inspect(folder, as_json)
    raise ConfigError(f"unknown command '{options.command}'{nearest(options.command, _COMMANDS)}")


def _version() -> str:
    try:
        return f"thinwire {metadata.version('thinwire')}"
    except metadata.PackageNotFoundError:
        return "thinwire (run from its source tree)"


def read_arguments(arguments: Sequence[str]) -> Config:
    """The configuration that ``thinwire train`` was given; raises ConfigError."""
    return read_train(arguments)[0]


def read_train(arguments: Sequence[str]) -> tuple[Config, Path | None]:
    """What ``thinwire train`` was given: its configuration, and the folder of a run to resume."""
    known = {entry.name: entry for entry in configuration.settings()}
    parser = _train_parser(known)
    options, unknown = parser.parse_known_args(_joined(arguments, known))
    if unknown:
        raise ConfigError(_unknown(unknown[0], known))
    given = vars(options)
    path, run = given.pop("config", None), given.pop("resume", None)
    values = {
        name: tuple(found) if known[name].repeated else spelling.from_text(known[name], found)
        for name, found in given.items()
    }
    if run is None:
        read = spelling.read_toml(Path(path)) if path else {}
        if "train.epochs" in values:  # else the file's steps would go on replacing them
            read.pop("train.steps", None)
        return configuration.build(read | values), None
    if path is not None:
        raise ConfigError(f"--resume {run} has its own settings; leave {path} out")
    world_size = os.environ.get("WORLD_SIZE") if launch.under_torchrun() else None
    config = override.resumed(Path(run), values, None if world_size is None else int(world_size))
    return config, Path(run)


def read_inspect(arguments: Sequence[str]) -> tuple[Path, bool]:
    """What ``thinwire inspect`` was given: a run folder, and whether JSON is wanted."""
    parser = Parser(
        prog="thinwire inspect",
        description="Show what the folder of a run tells, whether it goes on or has ended.",
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    options = parser.parse_args(arguments)
    return Path(options.run), options.json


def _train_parser(known: dict[str, Setting]) -> Parser:
    parser = Parser(
        prog="thinwire train",
        description="Train a model in pipeline stages whose links are compressed.",
        epilog=_EXAMPLES,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("config", nargs="?", help="a TOML file of settings; options override it")
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with the run in this folder, with its own settings; pipeline, link, plan, "
        "processes and more epochs or steps may be given anew",
    )
    short = {name: alias for alias, name in configuration.ALIASES.items()}
    groups = {"": parser.add_argument_group("run")}
    for name, entry in known.items():
        section = name.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        flags = [f"--{short[name]}"] if name in short else []
        groups[section].add_argument(
            *flags,
            f"--{name}",
            dest=name,
            action="append" if entry.repeated else "store",
            metavar="VALUE" if entry.kind is not bool else "true|false",
            help=_help(entry),
        )
    return parser


def _help(entry: Setting) -> str:
    default = typed(entry.default)
    choices = f"; one of {', '.join(entry.choices)}" if entry.choices else ""
    others = [f", with {_NAMES.get(n, n)} {typed(v)}" for n, v in entry.otherwise.items()]
    shown = "" if entry.default in (None, ()) else f" (default {default}{''.join(others)})"
    only = "" if entry.task is None else f"{_NAMES[entry.task]}: "
    return f"{only}{entry.help}{choices}{shown}".replace("%", "%%")


def _joined(arguments: Sequence[str], known: dict[str, Setting]) -> list[str]:
    """Each option and its value as one word, ``--name=value``.

    A flag may stand alone, with a config file after it, and a value may begin with a minus;
    argparse would misread both.
    """
    long_names = configuration.ALIASES | {name: name for name in known}
    joined: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name = long_names.get(word[2:]) if word.startswith("--") else None
        takes_word = name is not None or word == "--resume"
        if name is not None and known[name].kind is bool:
            word = f"{word}={rest.pop(0) if rest and _is_flag_value(rest[0]) else 'true'}"
        elif takes_word and rest and not rest[0].startswith("--"):
            word = f"{word}={rest.pop(0)}"
        joined.append(word)
    return joined


def _is_flag_value(word: str) -> bool:
    """Whether a word after a flag is meant as its value, right or wrong, and not as a file."""
    if word.lower() in ("true", "false"):
        return True
    return (
        not word.startswith("-")
        and not any(c in word for c in "./\\")
        and not (Path(word).exists())
    )


def _unknown(word: str, known: dict[str, Setting]) -> str:
    if not word.startswith("--"):
        return f"unexpected argument '{word}'; one config file, then --section.field value"
    name = word[2:].partition("=")[0]
    section, dot, field = name.rpartition(".")
    sections = {known_name.rpartition(".")[0] for known_name in known} - {""}
    if dot and section not in sections:
        return f"unknown section '{section}' in --{name}{nearest(section, sections)}"
    if dot:
        fields = [n.rpartition(".")[2] for n in known if n.startswith(section + ".")]
        return f"unknown field '{field}' in --{name}{nearest(field, fields)}"
    fields_anywhere = {n.rpartition(".")[2]: n for n in known}
    if name in fields_anywhere:
        return f"unknown option --{name}; did you mean '--{fields_anywhere[name]}'?"
    return f"unknown option --{name}{nearest(name, [*known, *configuration.ALIASES])}"
