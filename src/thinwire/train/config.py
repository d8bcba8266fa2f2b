"""The settings of a training run: one frozen dataclass a section, and how they are read.

The order is: the defaults below, then a TOML file, then ``--section.field value``. Every mistake
is a ``ConfigError`` of one line that says what was found, where, and what to write instead.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.network.emulate import parse_latency, parse_rate
from thinwire.spec import nearest
from thinwire.train.words import one_line, printable, typed

BY_EPOCHS = "default"  # the forward scheme that suits the number of epochs
PLUGIN_HELP = "a Python file that registers codecs or schemes; may be given several times"
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBV")


_LONGEST = 600  # characters of an error; a longer one is cut in its middle


class ConfigError(ValueError):
    """A setting or an input file that the user can correct; the text is one line."""

    def __init__(self, message: str) -> None:
        line = printable(message)
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
        super().__init__(line)


def setting(default: Any, help_text: str, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field with the line that ``--help`` shows for it."""
    return dataclasses.field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True)
class ModelConfig:
    kind: str = setting("gpt", "the model family", ("gpt",))
    layers: int = setting(4, "transformer blocks, over all stages")
    dim: int = setting(128, "width of the residual stream, hence of what crosses a link")
    heads: int = setting(4, "attention heads; dim is a multiple of it")
    context: int = setting(128, "tokens in a sample")
    tied: bool = setting(False, "share the token embedding with the output head")
    dropout: float = setting(0.0, "dropout probability after attention and MLP")


@dataclass(frozen=True)
class DataConfig:
    path: str | None = setting(
        None, "a UTF-8 text file or a folder of them; none: the Python language reference"
    )
    validation: float = setting(0.05, "fraction of the text kept for validation")
    seed: int = setting(0, "chooses which topics or files are kept for validation")


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = setting(3, "passes over the training text")
    steps: int | None = setting(None, "optimizer steps; replaces epochs")
    quick: bool = setting(False, "train on 256 samples only, validate on 64")
    batch: int = setting(16, "samples in a step")
    lr: float = setting(1e-3, "peak learning rate of AdamW")
    warmup: float = setting(0.1, "fraction of the steps in which the learning rate rises")
    weight_decay: float = setting(0.1, "AdamW weight decay, on matrices only")
    frozen: int = setting(0, "so many blocks from the first on, and the embedding, are not trained")
    clip: float = setting(1.0, "largest gradient norm over all stages; 0: no clipping")
    seed: int = setting(0, "of the weights, the order of the samples and dropout")
    log_every: int = setting(10, "steps between two progress lines")


@dataclass(frozen=True)
class LinkConfig:
    rate: str = setting("100mbit", "emulated bit rate per direction and host; none: the bare link")
    latency: str = setting("5ms", "emulated one-way latency, if the rate is emulated")
    transport: str = setting(
        "gloo", "what carries the bytes; memory: all stages in one process", ("gloo", "memory")
    )


@dataclass(frozen=True)
class PlanConfig:
    forward: str = setting(
        BY_EPOCHS,
        "codec or scheme of the activations; default: delta(int4) from 3 epochs on, "
        "or from 2 on where a frozen stage can rest, else tile",
    )
    backward: str = setting("int8", "codec or scheme of the gradients")


@dataclass(frozen=True)
class RefConfig:
    budget: str | None = setting(
        None, "RAM of a rank for references, as 2gb, the rest on disk; none: all in RAM"
    )
    disk: str | None = setting(
        None, "disk of a rank for references, as 10gb; 0: in RAM alone; none: what they take"
    )


@dataclass(frozen=True)
class PipelineConfig:
    schedule: str = setting("Interleaved1F1B", "the order of the micro-batches", SCHEDULES)
    stages: int | None = setting(None, "stages of the model; none: nproc × stages_per_rank")
    stages_per_rank: int | None = setting(None, "stages in a process; none: 1, with ZBV 2")
    microbatches: int = setting(8, "parts into which a batch is cut")
    window: int = setting(8, "receives posted ahead on each link")
    deadline: float = setting(60.0, "seconds without a message after which a link is given up")
    first_deadline: float = setting(300.0, "the same for the first step")
    skip_frozen: bool = setting(
        True, "frozen stages neither compute nor send what the next link's ends remember"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    every: int | None = setting(
        None, "steps between two checkpoints; none: one when the run is stopped, one at its end"
    )
    dir: str | None = setting(
        None, "where this machine keeps the parts of its ranks; none: the run folder"
    )


@dataclass(frozen=True)
class Config:
    """All settings; ``resolved`` fills in those that depend on others."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    link: LinkConfig = LinkConfig()
    plan: PlanConfig = PlanConfig()
    ref: RefConfig = RefConfig()
    pipeline: PipelineConfig = PipelineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    nproc: int | None = setting(
        None,
        "processes to start on this machine, each with its stages; none: 2, "
        "or 1 with link.transport memory",
    )
    threads: int | None = setting(
        None, "torch's threads in a process; none: cores / nproc, in memory cores / stages"
    )
    device: str = setting("cpu", "where a stage computes: cpu, cuda or cuda:N")
    out: str | None = setting(None, "the run folder; none: a new one under runs/")
    plugin: tuple[str, ...] = setting((), PLUGIN_HELP)
    compare: bool = setting(False, "run uncompressed fp32 and bf16 as well, and compare")
    json: bool = setting(False, "print the summary as one JSON document on stdout")

    def __post_init__(self) -> None:
        object.__setattr__(self, "plugin", tuple(self.plugin))  # JSON has lists

    @property
    def microbatch_rows(self) -> int:
        """The samples of the largest micro-batch."""
        return -(-self.train.batch // self.pipeline.microbatches)

    @property
    def num_stages(self) -> int:
        """The number of stages of a resolved configuration."""
        assert self.pipeline.stages is not None, "the configuration is not resolved"
        return self.pipeline.stages


ALIASES = {
    "steps": "train.steps",
    "quick": "train.quick",
    "forward": "plan.forward",
    "backward": "plan.backward",
    "skip-frozen": "pipeline.skip_frozen",
}


@dataclass(frozen=True)
class Setting:
    """One field as the command line sees it: its dotted name, type, default and help."""

    name: str
    kind: Any
    default: Any
    help: str
    choices: tuple[str, ...] | None

    @property
    def alternatives(self) -> tuple[Any, ...]:
        """The types that a value may have, ``None`` left out."""
        kinds = typing.get_args(self.kind) if isinstance(self.kind, types.UnionType) else ()
        return tuple(k for k in kinds or (self.kind,) if k is not types.NoneType)

    @property
    def repeated(self) -> bool:
        """Whether it is a list of texts, of which an option adds one."""
        return typing.get_origin(self.kind) is tuple

    @property
    def optional(self) -> bool:
        return types.NoneType in typing.get_args(self.kind)

    def of(self, config: Config) -> Any:
        """Its value in ``config``."""
        section, _, field = self.name.rpartition(".")
        return getattr(getattr(config, section) if section else config, field)


def settings() -> Iterator[Setting]:
    """Every setting, the top-level ones first, then section by section."""
    sections: list[tuple[str, Any]] = [("", Config)]
    hints = typing.get_type_hints(Config)
    sections += [(n + ".", k) for n, k in hints.items() if dataclasses.is_dataclass(k)]
    for prefix, section in sections:
        kinds = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            if "help" in field.metadata:
                yield Setting(
                    prefix + field.name,
                    kinds[field.name],
                    field.default,
                    field.metadata["help"],
                    field.metadata["choices"],
                )


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file under their dotted names."""
    try:
        return from_toml(path.read_text(encoding="utf-8"), path)
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder; a run is repeated from its config.toml, and goes on with --resume"
        ) from None
    except OSError as error:
        raise ConfigError(f"can't read the config file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no TOML file: it is not UTF-8 text") from None


def from_toml(text: str, path: Path) -> dict[str, Any]:
    """The values of TOML text under their dotted names; errors say that it is in ``path``."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path} is no valid TOML: it is nested too deep") from None
    except ValueError as error:  # TOMLDecodeError, and a number of thousands of digits
        raise ConfigError(f"{path} is no valid TOML: {one_line(error)}") from None
    known = {s.name: s for s in settings()}
    sections = {name.split(".")[0] for name in known if "." in name}
    values: dict[str, Any] = {}
    for key, value in tables.items():
        if not isinstance(value, dict):
            values[key] = value
        elif key in sections:
            values.update({f"{key}.{inner}": v for inner, v in value.items()})
        else:
            raise ConfigError(f"{path}: unknown section [{key}]{nearest(key, sections)}")
    for name in values:
        if name not in known:
            raise ConfigError(f"{path}: unknown setting '{name}'{nearest(name, known)}")
    return {name: _from_toml(known[name], v, path) for name, v in values.items()}


def _from_toml(setting: Setting, value: Any, path: Path) -> Any:
    kinds = setting.alternatives
    if setting.repeated and isinstance(value, list) and all(type(v) is str for v in value):
        return tuple(value)
    if float in kinds and type(value) is int:
        return float(value) if abs(value) < 2**63 else math.inf
    if type(value) in kinds:
        return _chosen(setting, value, f"{path}: {setting.name}")
    shown = typed(value) if isinstance(value, bool) else repr(value)
    raise ConfigError(f"{path}: {setting.name} = {shown} is not {_described(setting)}")


def from_text(setting: Setting, text: str) -> Any:
    """The value of a command-line option, or ConfigError naming the option."""
    if setting.optional and text.lower() == "none":
        return None
    for kind in setting.alternatives:
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        if kind is str:
            return _chosen(setting, text, f"--{setting.name}")
    raise ConfigError(f"--{setting.name}: '{text}' is not {_described(setting)}")


def _chosen(setting: Setting, value: Any, where: str) -> Any:
    if setting.choices is None or value in setting.choices:
        return value
    by_lower = {choice.lower(): choice for choice in setting.choices}
    if value.lower() in by_lower:
        return by_lower[value.lower()]
    close = nearest(value, by_lower)
    meant = next((c for lower, c in by_lower.items() if f"'{lower}'" in close), None)
    close = f"; did you mean '{meant}'?" if meant else f"; known: {', '.join(setting.choices)}"
    raise ConfigError(f"{where}: unknown value '{value}'{close}")


def _described(setting: Setting) -> str:
    if setting.repeated:
        return "a list of texts"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    shown = [words[kind] for kind in setting.alternatives]
    return " or ".join([*shown, "none"] if setting.optional else shown)


def build(values: Mapping[str, Any]) -> Config:
    """The configuration with the given dotted settings replaced."""
    top: dict[str, Any] = {}
    for name, value in values.items():
        section, dot, field = name.rpartition(".")
        if dot:
            top[section] = dataclasses.replace(
                top.get(section, getattr(Config(), section)), **{field: value}
            )
        else:
            top[name] = value
    return Config(**top)


def to_toml(config: Config) -> str:
    """The settings as TOML that ``thinwire train`` reads back; those that are none left out.

    ``out`` is left out too, since the folder it names is full once the run is over.
    """
    lines, section = [], ""
    for entry in settings():
        if entry.name == "out":
            continue
        prefix, _, field = entry.name.rpartition(".")
        value = entry.of(config)
        if prefix != section:
            section = prefix
            lines.append(f"\n[{section}]")
        if value is not None:
            lines.append(f"{field} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):  # JSON escapes are TOML escapes, DEL aside
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def link_rate(link: LinkConfig) -> float | None:
    """The emulated rate in bit/s, None for the bare link; raises ConfigError."""
    try:
        return parse_rate(link.rate)
    except ValueError as error:
        raise ConfigError(f"link.rate: {one_line(error)}") from None


def link_latency(link: LinkConfig) -> float:
    """The emulated one-way latency in seconds, 0 on the bare link; raises ConfigError."""
    try:
        latency = parse_latency(link.latency)
    except ValueError as error:
        raise ConfigError(f"link.latency: {one_line(error)}") from None
    return 0.0 if link_rate(link) is None else latency


_SIZE = re.compile(r"([0-9]*\.?[0-9]+)((?:[kmgt]i?)?)b")
_FACTORS = {"": 1, **{prefix: 1000 ** (k + 1) for k, prefix in enumerate("kmgt")}}


def parse_size(text: str, name: str) -> int:
    """Bytes from ``2gb``, ``500 MB``, ``1gib``, ``0``; ConfigError names the setting."""
    if text.strip() == "0":
        return 0
    match = _SIZE.fullmatch("".join(text.split()).lower())
    if match is None:
        raise ConfigError(f"{name}: '{text}' is no size; write 500mb, 2gb or 1gib")
    prefix = match[2].removesuffix("i")
    factor = _FACTORS[prefix] if prefix == match[2] else 1024 ** (1 + "kmgt".index(prefix))
    size = float(match[1]) * factor
    if not 1 <= size < 2**60:
        raise ConfigError(f"{name} is {text}; it must be at least a byte, and below 2^60")
    return int(size)
