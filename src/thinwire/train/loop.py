"""One training run, from top to bottom, as every rank runs it.

thinwire train                                    two processes on this machine
torchrun --nproc-per-node 2 -m thinwire train     the same under torchrun
"""

from __future__ import annotations

import math
from typing import Any

import torch
from rich.console import Console

from thinwire.train import disk, storage
from thinwire.train.build import Place, Run, build
from thinwire.train.checkpoint import Checkpoints
from thinwire.train.config import Config, TrainConfig
from thinwire.train.evaluation import evaluate, final_numbers
from thinwire.train.home import Home
from thinwire.train.journal import Journal
from thinwire.train.metrics import SUMMARY, write_json
from thinwire.train.report import closing, opening
from thinwire.train.resume import Progress, resume
from thinwire.train.stop import Stop, Stopped
from thinwire.train.summary import summarise
from thinwire.train.task import Data


def train(
    config: Config, data: Data, place: Place, home: Home, screen: Console, stop: Stop
) -> dict[str, Any]:
    """Train, evaluate and report; returns the summary, the same on every rank.

    Raises Stopped, with a checkpoint saved, if ``stop`` was asked for; ConfigError where another
    process is at work on this run.
    """
    with home.alone(place.rank):
        return _train(config, data, place, home, screen, stop)


def _train(
    config: Config, data: Data, place: Place, home: Home, screen: Console, stop: Stop
) -> dict[str, Any]:
    own = disk.rank_folder(home.parts, place.rank)
    run = build(config, data, place, own, _has_rows(home, place.rank))
    own_folder = home.folder if place.rank == 0 else None
    torch.manual_seed(config.train.seed)  # for dropout; nothing that two ranks share
    progress = resume(run, home, screen) if home.resumed else Progress()
    lines = opening(config, data, run.samples, run.model, run.steps)
    screen.print(lines, soft_wrap=True, markup=False)
    if run.remembered is not None:
        screen.print(run.remembered, soft_wrap=True, markup=False)
    home.keep(config, steps=run.steps)

    journal = Journal(run, own_folder, screen, progress.step)
    progress.restore(journal)
    checkpoints = Checkpoints(run, home, journal, progress.step)
    with journal, stop.training(run.pipeline, home.folder):
        fit(run, journal, checkpoints, progress.step)
    summary = summarise(run, journal, final_numbers(run))
    run.pipeline.close()
    last = next(reversed(list(disk.parts(own))), None)
    if last is None or not last.manifest["pipeline"]["references"]:
        storage.discard(own / disk.REFERENCES)
    if own_folder is not None:
        write_json(own_folder / SUMMARY, summary)
    stop.complete(home.folder)
    closing(screen, summary, home.folder)
    return summary


def _has_rows(home: Home, rank: int) -> bool:
    """Whether references of this rank lie on disk, wherever the run has kept its checkpoints."""
    folders = [disk.rank_folder(parts, rank) / disk.REFERENCES for parts in home.all_parts()]
    return any(storage.row_files(folder) for folder in folders)


def fit(run: Run, journal: Journal, checkpoints: Checkpoints, done: int) -> None:
    """The training steps after the first ``done``. Raises Stopped after one, if asked to."""
    config, device = run.config, run.place.device
    training = run.samples.training
    upcoming = run.upcoming(done)
    epoch, numbers = next(upcoming)
    for step in range(done + 1, run.steps + 1):
        next_epoch, next_numbers = next(upcoming)
        is_last = step == run.steps
        lr = learning_rate(step, run.steps, config.train)
        for group in run.optimizer.param_groups:
            group["lr"] = lr

        every = config.train.measure_every
        measured = every > 0 and (step % every == 0 or is_last)
        journal.begin_step()
        samples = run.sized(training.batch(numbers, epoch), training)
        run.optimizer.zero_grad(set_to_none=True)
        result = run.pipeline.step(
            samples.inputs.to(device),
            target=samples.target.to(device),
            sample_ids=samples.sample_ids,
            lengths=samples.lengths,
            next_sample_ids=None if is_last else training.ids(next_numbers, next_epoch),
            dense=step <= run.dense_steps,
            measure=measured,
            context=run.context_of(samples),
        )
        journal.begin_optimizer()
        run.optimizer.step()
        ends_epoch = is_last or next_epoch != epoch
        log = ends_epoch or step % config.train.log_every == 0
        journal.end_step(step, epoch + 1, lr, result, log, measured)

        if ends_epoch and not is_last:
            validated = evaluate(run, run.samples.validation, codec=True)
            journal.end_epoch(step, epoch + 1, validated)
        if result.stop or is_last or checkpoints.due(step):
            # after the last step nothing more is sent, unless the run is made longer
            checkpoints.save(step, result.stop or config.checkpoint.every is not None)
        if result.stop:
            raise Stopped(step, run.steps)
        epoch, numbers = next_epoch, next_numbers


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Linear warm-up to ``lr``, then a cosine down to nothing; ``step`` counts from 1."""
    warmup = max(1, round(config.warmup * steps))
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / (steps - warmup + 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
