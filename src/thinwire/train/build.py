"""What a run is made of on one rank: samples, stages, links, pipeline and optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.train import disk, pace, storage
from thinwire.train.batches import Batch, Samples, Split, steps_per_epoch, training_numbers
from thinwire.train.config import (
    BY_EPOCHS,
    Config,
    ConfigError,
    TrainConfig,
    link_latency,
    link_rate,
)
from thinwire.train.stage import Stage
from thinwire.train.task import Data, Model, Task
from thinwire.train.tasks import task_of
from thinwire.train.words import counted


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
    task: Task
    data: Data
    samples: Split
    model: Model
    stages: list[Stage]
    pipeline: tw.Pipeline
    optimizer: torch.optim.Optimizer
    busy_s: Callable[[], float] | None  # how long the emulated link was busy sending
    remembered: str | None  # what this rank will remember, and where

    @property
    def least(self) -> int:
        """The samples of the smallest batch that is trained on."""
        return self.task.least_rows * self.config.pipeline.microbatches

    def upcoming(self, done: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Epoch and sample numbers of the batches after the first ``done``, for ever."""
        train = self.config.train
        return training_numbers(
            len(self.samples.training),
            train.batch,
            self.least,
            train.seed,
            done,
            fixed=train.shuffle == "batches",
        )

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.samples.training), self.config.train.batch, self.least)

    def sized(self, batch: Batch, samples: Samples) -> Batch:
        """``batch`` as it goes into the pipeline: full size where edges are torch's own.

        Those take one shape only, that of a full batch in equal micro-batches.
        """
        if self.config.plan.forward != "off":
            return batch
        parts = self.config.pipeline.microbatches
        return samples.filled(batch, self.config.microbatch_rows * parts)

    def context_of(self, batch: Batch) -> dict[str, Tensor] | None:
        """What both ends of a link may predict ``batch`` by, if the plan does."""
        return batch.context if self.pipeline.takes else None

    @property
    def steps(self) -> int:
        return self.config.train.steps or self.config.train.epochs * self.steps_per_epoch

    @property
    def dense_steps(self) -> int:
        """So many steps are trained on values as they are, before compression begins."""
        plan = self.config.plan
        return max(plan.dense_steps, plan.dense_epochs * self.steps_per_epoch)

    @property
    def epochs(self) -> int:
        return math.ceil(self.steps / self.steps_per_epoch)


def planned(config: Config, data: Data, say: Callable[[str], None] = lambda line: None) -> Config:
    """``config`` with the forward scheme that suits the number of epochs, if none was chosen.

    ``say`` is told which, and why.
    """
    if config.plan.forward != BY_EPOCHS:
        return config
    task = task_of(config)
    training = task.split(config, data).training
    least = task.least_rows * config.pipeline.microbatches
    epoch = max(1, steps_per_epoch(len(training), config.train.batch, least))
    epochs = config.train.epochs if config.train.steps is None else config.train.steps / epoch
    visits = epochs / training.variants if training.variants else 1
    resting, tokens = may_rest(config, task.model(config, data)), "token" in task.context
    forward = tw.default_forward(visits, resting=resting, tokens=tokens)
    why = "1 epoch is planned" if epochs == 1 else f"{epochs:.3g} epochs are planned"
    if training.variants > 1:
        why += f", each with one of {training.variants} variants of a sample"
    elif not training.variants:
        why = "no sample ever comes again: each epoch has new variants of all"
    if forward != tw.default_forward(visits, tokens=tokens):
        why += " and frozen stages can rest"
    say(f"forward {forward}, since {why}")
    return dataclasses.replace(config, plan=dataclasses.replace(config.plan, forward=forward))


def may_rest(config: Config, model: Model) -> bool:
    """Whether stages that are frozen as a whole can rest, where the next link's end remembers."""
    if model.draws or not config.pipeline.skip_frozen:
        return False
    return any(not model.has_gradients(link.edge) for link in pace.links_of(config))


def build(config: Config, data: Data, place: Place, own: Path, is_on_disk: bool = False) -> Run:
    """Cut the data into samples, and build this rank's stages, its pipeline and its optimizer.

    ``own``: the folder of this rank alone, which need not be there yet. ``is_on_disk``: a resumed
    run has rows of references elsewhere, which will be brought here.
    """
    task = task_of(config)
    samples, model = task.split(config, data), task.model(config, data)
    count, variants = len(samples.training), samples.training.variants
    asked = config.train.samples
    if asked is not None and count < asked:
        raise ConfigError(
            f"train.samples is {asked}, but {data.source} has {counted(count, 'sample')} to train "
            "on; lower it or leave it out"
        )
    task.check_samples(config, data, count)
    need = storage.need_of(config, model, place.rank, count, variants)
    kept = storage.storage_of(
        config, need, own / disk.REFERENCES, place.local_world_size, is_on_disk
    )
    transport, busy_s = build_transport(config)
    stages = build_stages(config, model, place)
    return Run(
        config,
        place,
        task,
        data,
        samples,
        model,
        stages,
        build_pipeline(config, place, task, model, stages, transport, kept),
        build_optimizer(config.train, stages),
        busy_s,
        storage.sentence(config, model, need, kept, stages, place.device),
    )


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


def build_stages(config: Config, model: Model, place: Place) -> list[Stage]:
    """This rank's stages on its device, with the weights that any other split would start from."""
    indices = tw.stages_of_rank(
        config.pipeline.schedule, place.rank, place.world_size, config.num_stages
    )
    return [stage.to(place.device) for stage in model.stages(indices)]


def build_pipeline(
    config: Config,
    place: Place,
    task: Task,
    model: Model,
    stages: list[Stage],
    transport: tw.Transport,
    references: tw.Storage,
) -> tw.Pipeline:
    """torch's schedule over our stages, with the plan of the configuration on every link."""
    rows = config.microbatch_rows
    wrapped = []
    for stage in stages:
        args, outputs = model.arguments(stage.stage_index, config.num_stages, rows)
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
        config.pipeline.schedule, wrapped, config.pipeline.microbatches, task.loss()
    )
    return tw.Pipeline(
        schedule,
        wrapped,
        tw.Plan(forward=config.plan.forward, backward=config.plan.backward),
        transport=transport,
        max_grad_norm=config.train.clip or None,
        deadline=config.pipeline.deadline,
        first_deadline=config.pipeline.first_deadline,
        window=config.pipeline.window,
        tied=model.tied(stages),
        references=references,
        skip_frozen=config.pipeline.skip_frozen,
    )


def build_optimizer(config: TrainConfig, stages: list[Stage]) -> torch.optim.Optimizer:
    """The optimizer of what this rank trains, each parameter once; weight decay on matrices and
    convolutions only."""
    everyone = (p for stage in stages for p in stage.parameters())
    parameters = {id(p): p for p in everyone if p.requires_grad}
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups: list[dict[str, list[nn.Parameter] | float]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95))
