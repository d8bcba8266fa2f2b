"""What a run is made of on one rank: samples, stages, links, pipeline and optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import thinwire as tw
from thinwire.train import data, disk, model, pace, storage
from thinwire.train.config import (
    BY_EPOCHS,
    Config,
    ConfigError,
    TrainConfig,
    link_latency,
    link_rate,
)
from thinwire.train.words import counted

QUICK_TRAIN, QUICK_VALIDATION = 256, 64  # samples that --quick uses


@dataclass(frozen=True)
class Place:
    """Where this process stands: its rank, the number of processes, its device, and how many of
    the processes are on this machine."""

    rank: int
    world_size: int
    device: torch.device
    local_world_size: int = 1


@dataclass(frozen=True)
class Run:
    """What a run is made of on this rank."""

    config: Config
    place: Place
    training: data.Samples
    validation: data.Samples
    stages: list[model.Stage]
    pipeline: tw.Pipeline
    optimizer: torch.optim.Optimizer
    busy_s: Callable[[], float] | None  # how long the emulated link was busy sending
    text_sha256: str
    remembered: str | None  # what this rank will remember, and where

    @property
    def steps_per_epoch(self) -> int:
        config = self.config
        return data.steps_per_epoch(
            len(self.training), config.train.batch, config.pipeline.microbatches
        )

    def sized(self, batch: data.Batch, samples: data.Samples) -> data.Batch:
        """``batch`` as it goes into the pipeline: full size where edges are torch's own.

        Those take one shape only, that of a full batch in equal micro-batches.
        """
        if self.config.plan.forward != "off":
            return batch
        parts = self.config.pipeline.microbatches
        return samples.filled(batch, self.config.microbatch_rows * parts)

    @property
    def steps(self) -> int:
        return self.config.train.steps or self.config.train.epochs * self.steps_per_epoch

    @property
    def epochs(self) -> int:
        return math.ceil(self.steps / self.steps_per_epoch)


def planned(
    config: Config, text: data.Text, say: Callable[[str], None] = lambda line: None
) -> Config:
    """``config`` with the forward scheme that suits the number of epochs, if none was chosen.

    ``say`` is told which, and why.
    """
    if config.plan.forward != BY_EPOCHS:
        return config
    training, _ = cut(config, text)
    parts = config.pipeline.microbatches
    epoch = max(1, data.steps_per_epoch(len(training), config.train.batch, parts))
    epochs = config.train.epochs if config.train.steps is None else config.train.steps / epoch
    forward = tw.default_forward(epochs, resting=may_rest(config))
    why = "1 epoch is planned" if epochs == 1 else f"{epochs:.3g} epochs are planned"
    if forward != tw.default_forward(epochs):
        why += " and frozen stages can rest"
    say(f"forward {forward}, since {why}")
    return dataclasses.replace(config, plan=dataclasses.replace(config.plan, forward=forward))


def may_rest(config: Config) -> bool:
    """Whether stages that are frozen as a whole can rest, where the next link's end remembers."""
    if config.model.dropout or not config.pipeline.skip_frozen:
        return False
    frozen, stages = config.train.frozen, config.num_stages
    return any(
        not model.learns(config.model, link.edge, stages, frozen) for link in pace.links_of(config)
    )


def build(
    config: Config, text: data.Text, place: Place, own: Path, is_on_disk: bool = False
) -> Run:
    """Cut the text, and build this rank's stages, its pipeline and its optimizer.

    ``own``: the folder of this rank alone, which need not be there yet. ``is_on_disk``: a resumed
    run has rows of references elsewhere, which will be brought here.
    """
    training, validation = cut(config, text)
    if len(training) < config.pipeline.microbatches:
        raise ConfigError(
            f"{text.source}: {counted(len(training), 'sample')} of training text, fewer than the "
            f"{config.pipeline.microbatches} micro-batches of a step; give more text or lower "
            "--model.context"
        )
    need = storage.need_of(config, place.rank, len(training))
    kept = storage.storage_of(
        config, need, own / disk.REFERENCES, place.local_world_size, is_on_disk
    )
    transport, busy_s = build_transport(config)
    stages = build_stages(config, place)
    return Run(
        config,
        place,
        training,
        validation,
        stages,
        build_pipeline(config, place, stages, transport, kept),
        build_optimizer(config.train, stages),
        busy_s,
        text.sha256,
        storage.sentence(config, need, kept, stages, place.device),
    )


def cut(config: Config, text: data.Text) -> tuple[data.Samples, data.Samples]:
    """Training and validation samples; the first few of them with ``--quick``."""
    limits = (QUICK_TRAIN, QUICK_VALIDATION) if config.train.quick else (None, None)
    training = data.Samples(text.train, config.model.context, limits[0])
    return training, data.Samples(text.validation, config.model.context, limits[1])


def build_transport(config: Config) -> tuple[tw.Transport, Callable[[], float] | None]:
    """The transport, and where the link is emulated how long it was busy sending, in seconds."""
    memory = config.link.transport == "memory"
    inner: tw.Transport = tw.MemoryTransport() if memory else tw.GlooTransport()
    rate = link_rate(config.link)
    if rate is None:
        return inner, None
    emulated = tw.EmulatedTransport(inner, rate, link_latency(config.link))
    if not memory:
        return emulated, lambda: emulated.busy_seconds
    hosts = [emulated.endpoint(stage) for stage in range(config.num_stages)]
    return emulated, lambda: max(host.busy_seconds for host in hosts)


def build_stages(config: Config, place: Place) -> list[model.Stage]:
    """This rank's stages on its device, with the weights that any other split would start from."""
    indices = tw.stages_of_rank(
        config.pipeline.schedule, place.rank, place.world_size, config.num_stages
    )
    stages = [
        model.build_stage(config.model, index, config.num_stages, config.train.seed)
        for index in indices
    ]
    if config.model.tied:
        model.tie_local(stages)
    for stage in stages:
        model.freeze(stage, config.train.frozen, config.model.tied)
    return [stage.to(place.device) for stage in stages]


def build_pipeline(
    config: Config,
    place: Place,
    stages: list[model.Stage],
    transport: tw.Transport,
    references: tw.Storage,
) -> tw.Pipeline:
    """torch's schedule over our stages, with the plan of the configuration on every link."""
    rows = config.microbatch_rows
    wrapped = []
    for stage in stages:
        args, outputs = model.boundary_args(
            config.model, stage.stage_index, config.num_stages, rows, config.train.frozen
        )
        wrapped.append(
            tw.PipelineStage(
                stage,
                stage.stage_index,
                config.num_stages,
                place.device,
                input_args=(args,),
                output_args=(outputs,),
            )
        )
    schedule = tw.build_schedule(
        config.pipeline.schedule, wrapped, config.pipeline.microbatches, tw.TokenLoss(data.IGNORED)
    )
    shared = model.tied_parameter(stages) if config.model.tied else None
    return tw.Pipeline(
        schedule,
        wrapped,
        tw.Plan(forward=config.plan.forward, backward=config.plan.backward),
        transport=transport,
        max_grad_norm=config.train.clip or None,
        deadline=config.pipeline.deadline,
        first_deadline=config.pipeline.first_deadline,
        window=config.pipeline.window,
        tied=None if shared is None else {"embedding": shared},
        references=references,
        skip_frozen=config.pipeline.skip_frozen,
    )


def build_optimizer(config: TrainConfig, stages: list[model.Stage]) -> torch.optim.Optimizer:
    """AdamW over what this rank trains, each parameter once; weight decay on matrices only."""
    everyone = (p for stage in stages for p in stage.parameters())
    parameters = {id(p): p for p in everyone if p.requires_grad}
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups: list[dict[str, list[nn.Parameter] | float]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95))
