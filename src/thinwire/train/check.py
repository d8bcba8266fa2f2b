"""Whether the settings of a run fit each other, asked before any process starts.

Every mistake is a ``ConfigError`` of one line: what was found, where, and what to change.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

from thinwire.spec import nearest
from thinwire.train import extend
from thinwire.train.config import (
    BY_EPOCHS,
    KINDS,
    Config,
    ConfigError,
    kinds_of,
    link_latency,
    link_rate,
    parse_size,
    settings,
    shortened,
)
from thinwire.train.task import Task
from thinwire.train.tasks import task_of
from thinwire.train.words import counted, listed, one_line, typed

ONE_STAGE_A_RANK = ("GPipe", "1F1B")  # torch drives these two with a single local stage
ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")  # these work through micro-batches in rounds


def resolved(config: Config, world_size: int | None = None) -> Config:
    """``config`` with nproc and the stage counts filled in, and all of it checked.

    ``world_size`` is what torchrun set, None outside it. Raises ConfigError before any process
    starts; codec strings are checked by ``check_plan`` since that needs torch.
    """
    if config.parallel.inprocess:
        config = dataclasses.replace(
            config,
            parallel=dataclasses.replace(config.parallel, inprocess=False),
            link=dataclasses.replace(config.link, transport="memory"),
        )
    task = task_of(config)
    _check_numbers(config, task)
    _check_paths(config, task)
    _check_task(config)
    task.check(config)
    pipeline, in_memory = config.pipeline, config.link.transport == "memory"
    per_rank = pipeline.stages_per_rank or (2 if pipeline.schedule == "ZBV" else 1)
    cut_into = task.cut_into(config)
    usual = 2 if cut_into is None else max(1, cut_into // per_rank)
    nproc = world_size or config.nproc or (1 if in_memory else usual)
    stages = pipeline.stages or cut_into
    stages = stages or (2 if in_memory and per_rank == 1 else nproc * per_rank)
    if stages % nproc == 0 and pipeline.stages_per_rank is None:
        per_rank = stages // nproc
    parts = config.checkpoint.dir
    config = dataclasses.replace(
        config,
        nproc=nproc,
        checkpoint=dataclasses.replace(
            config.checkpoint,
            dir=None if parts is None else str(Path(parts).absolute()),  # wherever it is resumed
        ),
        plugin=tuple(str(Path(file).absolute()) for file in config.plugin),
        pipeline=dataclasses.replace(pipeline, stages=stages, stages_per_rank=per_rank),
    )
    _check_pipeline(config, task)
    link_rate(config.link)
    link_latency(config.link)
    for name, size in (("--ref.budget", config.ref.budget), ("--ref.disk", config.ref.disk)):
        if size is not None:
            parse_size(size, name)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", config.device):
        close = nearest(config.device, ("cpu", "cuda"))
        raise ConfigError(f"--device: unknown device '{config.device}'{close}")
    task.check_size(
        config, nproc if world_size is None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )
    return config


_INT64 = 2**63 - 1
_DAY = 86400
_LIMITS: dict[str, tuple[float, float]] = {  # of whole numbers else from 1 to _INT64
    "nproc": (1, 1024),
    "threads": (1, 1024),
    "train.seed": (0, _INT64),
    "data.seed": (0, _INT64),
    "train.frozen": (0, _INT64),
    "train.measure_every": (0, _INT64),
    "plan.dense_steps": (0, _INT64),
    "plan.dense_epochs": (0, _INT64),
    "train.weight_decay": (0, math.inf),
    "train.clip": (0, math.inf),
    "data.size": (1, 4096),
    "data.variants": (0, 1 << 20),
}
_ABOVE_ZERO = {
    "train.lr": math.inf,
    "pipeline.deadline": _DAY,
    "pipeline.first_deadline": _DAY,
}
_FRACTIONS = ("data.validation", "train.warmup", "model.dropout")


def _check_numbers(config: Config, task: Task) -> None:
    for entry in settings():
        value = entry.of(config)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{entry.name} is {value}; write a finite number")
        whole = (1, _INT64) if isinstance(value, int) else (-math.inf, math.inf)
        least, most = _LIMITS.get(entry.name, whole)
        if value < least:
            raise ConfigError(f"{entry.name} is {shortened(value)}; it must be at least {least}")
        most = _ABOVE_ZERO.get(entry.name, most)
        if value > most:
            raise ConfigError(f"{entry.name} is {shortened(value)}; it must be at most {most}")
        if entry.name in _ABOVE_ZERO and value <= 0:
            raise ConfigError(f"{entry.name} is {value}; it must be above 0")
        if entry.name in _FRACTIONS and not 0 <= value < 1:
            raise ConfigError(f"{entry.name} is {value}; it must be from 0 to below 1")
    if config.data.validation == 0:
        raise ConfigError(f"data.validation is 0; keep some {task.noun} for validation, as 0.05")


def _check_task(config: Config) -> None:
    """Refuse settings that the model's kind has not."""
    kind = config.model.kind
    for entry in settings():
        value = entry.of(config)
        if entry.task not in (None, KINDS[kind]) and value != entry.default:
            kinds = listed(kinds_of(str(entry.task)))
            shown = typed(value) if isinstance(value, bool) else shortened(value)
            raise ConfigError(
                f"--{entry.name} {shown} is a setting of {kinds}, but model.kind is "
                f"{kind}; leave it out or change --model.kind"
            )


def _check_paths(config: Config, task: Task) -> None:
    for name, value, what in (
        ("data.path", config.data.path, task.path),
        ("out", config.out, "a new folder"),
        ("checkpoint.dir", config.checkpoint.dir, "a folder"),
        *[("plugin", file, "a Python file") for file in config.plugin],
    ):
        if value == "":
            raise ConfigError(f"--{name} is empty; name {what}")
        if value is not None and "\0" in value:
            raise ConfigError(f"--{name}: no path has a NUL character, as {value!r} has")
        if value is not None and any("\ud800" <= c <= "\udfff" for c in value):
            raise ConfigError(f"--{name}: {value} is not UTF-8; rename it")


def _check_pipeline(config: Config, task: Task) -> None:
    pipeline, nproc, stages = config.pipeline, config.nproc or 1, config.num_stages
    name, parts = pipeline.schedule, pipeline.microbatches
    if config.link.transport == "memory" and nproc != 1:
        raise ConfigError(
            f"link.transport memory keeps all stages in one process, but nproc is {nproc}; "
            "leave --nproc out or use --link.transport gloo"
        )
    if stages != nproc * (pipeline.stages_per_rank or 1):
        what, how = f"pipeline.stages {stages}", "--pipeline.stages to a multiple of --nproc"
        if pipeline.cuts is not None:
            what, how = f"{counted(stages, 'stage')} by pipeline.cuts", "--nproc to a divisor of it"
        raise ConfigError(
            f"{what} on {counted(nproc, 'process')} with {pipeline.stages_per_rank} a process "
            f"doesn't come out even; set {how}"
        )
    task.check_stages(config)
    if name == "ZBV" and stages != 2 * nproc:
        raise ConfigError(
            f"pipeline.schedule ZBV needs two stages a process, {2 * nproc} for "
            f"{counted(nproc, 'process')}, "
            f"but pipeline.stages is {stages}"
        )
    if name in ONE_STAGE_A_RANK and stages != nproc:
        raise ConfigError(
            f"pipeline.schedule {name} runs one stage a process, but {stages} stages are on "
            f"{nproc}; use --pipeline.schedule Interleaved1F1B"
        )
    _check_microbatches(name, parts, stages, nproc, config.train.batch)


def _check_microbatches(name: str, parts: int, stages: int, nproc: int, batch: int) -> None:
    if batch < parts:
        raise ConfigError(
            f"train.batch {batch} can't be cut into "
            f"{counted(parts, 'micro-batch')}; "
            f"raise --train.batch or set --pipeline.microbatches {batch}"
        )
    if name != "GPipe" and parts < stages:
        found = f"{counted(parts, 'micro-batch')} for {counted(stages, 'stage')}"
        raise ConfigError(
            f"{found}: {name} needs at least as many; "
            f"raise --pipeline.microbatches to {stages} or use --pipeline.schedule GPipe"
        )
    rounds = max(1, parts // nproc)
    if name in ROUNDS and parts % rounds:
        even = next(n for n in range(parts, 0, -1) if n % max(1, n // nproc) == 0)
        raise ConfigError(
            f"pipeline.schedule {name} on {counted(nproc, 'process')} can't run {parts} "
            f"micro-batches in equal rounds; set --pipeline.microbatches {even}"
        )


def check_codecs(specs: Iterable[str]) -> None:
    """Check codecs and schemes that were given with ``--codec``; imports torch."""
    import thinwire as tw

    for spec in specs:
        try:
            tw.scheme(spec)
        except tw.SpecError as error:
            raise ConfigError(f"--codec: {one_line(error)}") from None


def check_plan(config: Config, quiet: bool = False) -> None:
    """Load the plugins, and check both codec strings and the device; imports torch.

    ``quiet``: say nothing of what is not loaded.
    """
    extend.load(config.plugin, quiet)
    import torch

    import thinwire as tw

    forward, backward = config.plan.forward, config.plan.backward
    if forward == BY_EPOCHS:  # by the text, which is not read yet; either default is well-formed
        forward = "tile"
    for direction, spec in (("forward", forward), ("backward", backward)):
        try:
            if spec != "off":
                lacking = tw.scheme(spec).takes - task_of(config).context
                if lacking:
                    raise ConfigError(
                        f"--{direction}: {spec} needs {', '.join(sorted(lacking))}, which "
                        f"runs on {task_of(config).noun} do not have; they have "
                        f"{', '.join(sorted(task_of(config).context))}"
                    )
        except tw.SpecError as error:
            raise ConfigError(f"--{direction}: {one_line(error)}") from None
    try:
        tw.Plan(forward=forward, backward=backward)
    except tw.SpecError as error:
        raise ConfigError(f"--forward, --backward: {one_line(error)}") from None
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {config.device}: this torch ({torch.__version__}) finds no CUDA device; "
            "use --device cpu"
        )


def check_out(config: Config) -> None:
    """Refuse a run folder in which something would be overwritten."""
    if config.out is None:
        return
    out = Path(config.out)
    try:
        if any(os.scandir(out)):
            raise ConfigError(
                f"--out {out} is not empty; name a new folder, nothing is overwritten"
            )
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ConfigError(f"--out {out} is a file, or in one; name a new folder") from None
    except OSError as error:
        raise ConfigError(f"--out: can't use {out}: {error.strerror}") from None
