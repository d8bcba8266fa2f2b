"""One training run, from top to bottom, as every rank runs it.

thinwire train                                    two processes on this machine
torchrun --nproc-per-node 2 -m thinwire train     the same under torchrun
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import thinwire as tw
from thinwire.train import data, model
from thinwire.train.config import Config, ConfigError, TrainConfig, link_latency, link_rate
from thinwire.train.journal import Journal
from thinwire.train.metrics import write_json
from thinwire.train.report import closing, opening
from thinwire.train.summary import summarise

QUICK_TRAIN, QUICK_VALIDATION = 256, 64  # samples that --quick uses


@dataclass(frozen=True)
class Place:
    """Where this process stands: its rank, the number of processes, and its device."""

    rank: int
    world_size: int
    device: torch.device


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
        return samples.filled(batch, rows_of_microbatch(self.config) * parts)

    @property
    def steps(self) -> int:
        return self.config.train.steps or self.config.train.epochs * self.steps_per_epoch

    @property
    def epochs(self) -> int:
        return math.ceil(self.steps / self.steps_per_epoch)


def train(
    config: Config, text: data.Text, place: Place, folder: Path, screen: Console
) -> dict[str, Any]:
    """Train, evaluate and report; returns the summary, the same on every rank."""
    run = build(config, text, place)
    own_folder = folder if place.rank == 0 else None
    counts = len(run.training), len(run.validation)
    screen.print(opening(config, text, *counts, run.steps), soft_wrap=True, markup=False)

    journal = Journal(run.pipeline, run.busy_s, own_folder, screen, run.steps, run.epochs)
    with journal:
        train_loss = fit(run, journal)
    losses = {
        "train_loss": train_loss,
        "val_loss": evaluate(run, codec=False),
        "val_loss_codec": evaluate(run, codec=True),
    }
    summary = summarise(config, text, run.pipeline, journal, losses, run.steps, run.epochs)
    run.pipeline.close()
    if own_folder is not None:
        write_json(own_folder / "summary.json", summary)
    closing(screen, summary, folder)
    return summary


def fit(run: Run, journal: Journal) -> float:
    """The training steps; returns the last one's loss."""
    config, device = run.config, run.place.device
    upcoming = data.training_ids(
        len(run.training), config.train.batch, config.pipeline.microbatches, config.train.seed
    )
    torch.manual_seed(config.train.seed)  # for dropout; nothing that two ranks share
    epoch, ids = next(upcoming)
    loss = math.nan
    for step in range(1, run.steps + 1):
        next_epoch, next_ids = next(upcoming)
        is_last = step == run.steps
        lr = learning_rate(step, run.steps, config.train)
        for group in run.optimizer.param_groups:
            group["lr"] = lr

        journal.begin_step()
        samples = run.sized(run.training.batch(ids), run.training)
        run.optimizer.zero_grad(set_to_none=True)
        result = run.pipeline.step(
            samples.inputs.to(device),
            target=samples.target.to(device),
            sample_ids=samples.sample_ids,
            lengths=samples.lengths,
            next_sample_ids=None if is_last else next_ids,
        )
        journal.begin_optimizer()
        run.optimizer.step()
        loss = result.loss
        ends_epoch = is_last or next_epoch != epoch
        log = ends_epoch or step % config.train.log_every == 0
        journal.end_step(step, epoch + 1, lr, result, log)

        if ends_epoch and not is_last:
            journal.end_epoch(step, epoch + 1, evaluate(run, codec=True))
        epoch, ids = next_epoch, next_ids
    return loss


def evaluate(run: Run, codec: bool) -> float:
    """Validation loss per token, with the plan's codecs on the links or without."""
    config, device = run.config, run.place.device
    loss_sum, tokens = 0.0, 0
    for batch in data.evaluation_batches(
        run.validation, config.train.batch, config.pipeline.microbatches
    ):
        part = run.sized(batch, run.validation)
        result = run.pipeline.eval(
            part.inputs.to(device), target=part.target.to(device), lengths=part.lengths, codec=codec
        )
        loss_sum, tokens = loss_sum + result.loss_sum, tokens + result.tokens
    run.pipeline.take_timers()  # starts them anew: evaluation is no part of a step
    return loss_sum / tokens


def build(config: Config, text: data.Text, place: Place) -> Run:
    """Cut the text, and build this rank's stages, its pipeline and its optimizer."""
    training, validation = cut(config, text)
    if len(training) < config.pipeline.microbatches:
        raise ConfigError(
            f"{text.source}: {len(training)} samples of training text, fewer than the "
            f"{config.pipeline.microbatches} micro-batches of a step; give more text or lower "
            "--model.context"
        )
    transport, busy_s = build_transport(config)
    stages = build_stages(config, place)
    return Run(
        config,
        place,
        training,
        validation,
        stages,
        build_pipeline(config, place, stages, transport),
        build_optimizer(config.train, stages),
        busy_s,
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
    config: Config, place: Place, stages: list[model.Stage], transport: tw.Transport
) -> tw.Pipeline:
    """torch's schedule over our stages, with the plan of the configuration on every link."""
    rows = rows_of_microbatch(config)
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
        skip_frozen=config.pipeline.skip_frozen,
    )


def rows_of_microbatch(config: Config) -> int:
    """The samples of the largest micro-batch."""
    return math.ceil(config.train.batch / config.pipeline.microbatches)


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


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Linear warm-up to ``lr``, then a cosine down to nothing; ``step`` counts from 1."""
    warmup = max(1, round(config.warmup * steps))
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / (steps - warmup + 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
