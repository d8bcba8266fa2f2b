"""The settings of a training run: one frozen dataclass a section.

Every mistake is a ``ConfigError`` of one line that says what was found, where, and what to write
instead.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.train.words import one_line, printable
from thinwire.units import parse_latency, parse_rate

BY_EPOCHS = "default"  # the forward scheme that suits the number of epochs
LANGUAGE, VISION = "language", "vision"  # tasks, each with its kinds of models
KINDS = {
    "gpt": LANGUAGE,
    "resnet8": VISION,
    "resnet10": VISION,
    "resnet20": VISION,
    "resnet18": VISION,
}
BY_TASK = "default"  # the optimizer that suits the task
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


def shortened(value: float) -> str:
    """A number as it is shown; of thousands of digits only how many there are."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a number of {len(str(abs(value)))} digits" if abs(value) < 10**4000 else "huge"
    return str(value)


def setting(
    default: Any,
    help_text: str,
    choices: tuple[str, ...] | None = None,
    task: str | None = None,
    otherwise: Mapping[str, Any] | None = None,
) -> Any:
    """A dataclass field with the line that ``--help`` shows for it.

    ``task``: the only one that has it. ``otherwise``: the defaults under other tasks or optimizers.
    """
    known = {"help": help_text, "choices": choices, "task": task, "otherwise": otherwise or {}}
    return dataclasses.field(default=default, metadata=known)


@dataclass(frozen=True)
class ModelConfig:
    kind: str = setting(
        "gpt", "a GPT on text, or a network on images, which data.path names", tuple(KINDS)
    )
    layers: int = setting(4, "transformer blocks, over all stages", task=LANGUAGE)
    dim: int = setting(
        128, "width of the residual stream, hence of what crosses a link", task=LANGUAGE
    )
    heads: int = setting(4, "attention heads; dim is a multiple of it", task=LANGUAGE)
    context: int = setting(128, "tokens in a sample", task=LANGUAGE)
    tied: bool = setting(False, "share the token embedding with the output head", task=LANGUAGE)
    dropout: float = setting(0.0, "dropout probability after attention and MLP", task=LANGUAGE)


@dataclass(frozen=True)
class DataConfig:
    path: str | None = setting(
        None,
        "a UTF-8 text file or a folder of them; none: the Python language reference; of images a "
        "folder in the format of MNIST or of CIFAR's binary version, or one with a folder a class",
    )
    validation: float = setting(0.05, "fraction of what is trained on that is kept for validation")
    seed: int = setting(0, "chooses which topics, files or images are kept for validation")
    size: int | None = setting(
        None,
        "images of a folder a class get so many pixels a side; none: all are of one size",
        task=VISION,
    )
    augment: str = setting(
        "none",
        "crop-flip: pad images by 4, crop at random, flip every other one",
        ("none", "crop-flip"),
        task=VISION,
    )
    variants: int = setting(
        0,
        "augmentations of an image that recur, one an epoch, as delta needs it; 0: always new ones",
        task=VISION,
    )


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = setting(3, "passes over the training data")
    steps: int | None = setting(None, "optimizer steps; replaces epochs")
    samples: int | None = setting(
        None, "train on so many samples only: a text's first, images spread evenly; none: all"
    )
    quick: bool = setting(False, "train on 256 samples only, validate on 64")
    batch: int = setting(16, "samples in a step", otherwise={VISION: 128})
    shuffle: str = setting(
        "samples",
        "what each epoch has in an order of its own: all samples, or batches that stay the same",
        ("samples", "batches"),
    )
    optimizer: str = setting(
        "adamw",
        "AdamW, or SGD with Nesterov momentum of 0.9; default: that of the model's kind",
        (BY_TASK, "adamw", "sgd"),
        otherwise={VISION: "sgd"},
    )
    lr: float = setting(1e-3, "peak learning rate", otherwise={"sgd": 0.1})
    warmup: float = setting(0.1, "fraction of the steps in which the learning rate rises")
    weight_decay: float = setting(
        0.1, "weight decay, on matrices and convolutions only", otherwise={"sgd": 5e-4}
    )
    frozen: int = setting(
        0, "so many blocks from the first on, and what is before them, are not trained"
    )
    clip: float = setting(
        1.0, "largest gradient norm over all stages; 0: no clipping", otherwise={VISION: 0.0}
    )
    seed: int = setting(0, "of the weights, the order of the samples, dropout and augmentation")
    log_every: int = setting(10, "steps between two progress lines")
    measure_every: int = setting(
        50,
        "steps between two measurements of what coding loses on each link, and the last; 0: none",
    )


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
        "or from 2 on where a frozen stage can rest; else tile, of text what tokens do not tell",
    )
    backward: str = setting("int8", "codec or scheme of the gradients")
    dense_steps: int = setting(0, "steps before compression begins, which fill what schemes keep")
    dense_epochs: int = setting(0, "the same in epochs; the later of the two counts")


@dataclass(frozen=True)
class ParallelConfig:
    inprocess: bool = setting(
        False, "all stages in one process, as a debugger wants them: link.transport memory"
    )


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
    cuts: str | None = setting(
        None,
        "cut after these layers or blocks, as layer1,layer2.0; none: into stages of equal compute",
        task=VISION,
    )
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
    parallel: ParallelConfig = ParallelConfig()
    ref: RefConfig = RefConfig()
    pipeline: PipelineConfig = PipelineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    nproc: int | None = setting(
        None,
        "processes to start on this machine, each with its stages; none: 2, with pipeline.cuts "
        "as many as it takes, or 1 with link.transport memory",
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
    task: str | None
    otherwise: Mapping[str, Any]

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
                    field.metadata["task"],
                    field.metadata["otherwise"],
                )


def build(values: Mapping[str, Any]) -> Config:
    """The configuration with the given dotted settings, and the others as they suit these."""
    given = {k: v for k, v in values.items() if (k, v) != ("train.optimizer", BY_TASK)}
    top: dict[str, Any] = {}
    for name, value in (_suited(given) | given).items():
        section, dot, field = name.rpartition(".")
        if dot:
            top[section] = dataclasses.replace(
                top.get(section, getattr(Config(), section)), **{field: value}
            )
        else:
            top[name] = value
    return Config(**top)


def _suited(given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that are others under the task and the optimizer of what is given."""
    known = {entry.name: entry for entry in settings()}
    task, optimizer = KINDS[given.get("model.kind", ModelConfig.kind)], known["train.optimizer"]
    under = task, given.get(optimizer.name, optimizer.otherwise.get(task, optimizer.default))
    return {
        entry.name: entry.otherwise[one]
        for entry in known.values()
        for one in under
        if one in entry.otherwise
    }


def kinds_of(task: str) -> list[str]:
    """The kinds of models that a task has."""
    return [kind for kind, of in KINDS.items() if of == task]


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
