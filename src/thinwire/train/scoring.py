"""Evaluates a run that has been trained, with its codecs on the links, without, or with others.

``thinwire eval`` and ``thinwire recalibrate``. Nothing of the run is changed: weights are read from
its newest complete checkpoint, evaluation moves no state.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import thinwire as tw
from thinwire.schemes import SharedMask
from thinwire.train import check, report, statistics
from thinwire.train.asked import AS_TRAINED, OFF, Asked
from thinwire.train.build import Place, Run, build
from thinwire.train.choose import Choice, choose
from thinwire.train.config import Config, ConfigError, PlanConfig, RefConfig
from thinwire.train.evaluation import Evaluation, evaluate
from thinwire.train.home import Home
from thinwire.train.resume import fetch_weights, settings_of
from thinwire.train.task import Data

STATISTICS = "statistics-{}.safetensors"


def score(
    config: Config, data: Data, place: Place, home: Home, asked: Asked, screen: Console
) -> dict[str, Any]:
    """Evaluate as ``asked``, and show it; returns it as JSON values, alike on all ranks.

    Raises ConfigError, on all ranks alike, where there is no complete checkpoint, no such split, or
    nothing to recalibrate.
    """
    trained = config.plan
    choice, lines = choose(home, place.rank, place.world_size, lambda manifest: False)
    if choice is None:
        raise ConfigError(f"{home.folder} has no complete checkpoint to evaluate")
    for line in lines:
        _say(screen, f"note: {line}")
    found = []
    for codec in asked.codecs:
        plan = _plan(trained, codec)
        coded = dataclasses.replace(config, plan=plan, ref=RefConfig())
        check.check_plan(coded)
        run = build(coded, data, place, home.folder / f"rank-{place.rank}")
        _load(run, choice, asked)
        for line in _expect(run, home, choice):
            _say(screen, f"note: {line}")
        samples = run.samples.parts.get(asked.split)
        if samples is None:
            raise ConfigError(f"the data have no {asked.split} split; leave --split out")
        if asked.recalibrate:
            _recalibrate(run, home, codec, asked, screen)
        one = evaluate(run, samples, codec=codec != OFF)
        run.pipeline.close()
        found.append({"codec": codec, "plan": plan.forward, **_numbers(one)})
        what = _statistics_of(asked)
        _say(screen, f"{asked.split} loss with codec {_named(codec, plan)}{what}: {one}")
    document = {
        "run": str(home.folder),
        "step": choice.key.step,
        "split": asked.split,
        "recalibrated": bool(asked.recalibrate or asked.statistics),
        "scores": [{"split": asked.split, **one} for one in found],
    }
    for line in warnings(trained, asked):
        _say(screen, f"note: {line}")
    return document


def warnings(trained: PlanConfig, asked: Asked) -> list[str]:
    """What there is to know of a plan that is a part of the model's function."""
    line = report.part_of_the_model(trained.forward)
    as_it_was = OFF in asked.codecs and not asked.recalibrate and asked.statistics is None
    return [line] if line is not None and as_it_was else []


def _statistics_of(asked: Asked) -> str:
    """Which statistics of batch normalization a loss was found with, unless they are the run's."""
    if asked.statistics is not None:
        return f", statistics of {asked.statistics}"
    return ", statistics estimated anew" if asked.recalibrate else ""


def _plan(trained: PlanConfig, codec: str) -> PlanConfig:
    """The plan without samples that a codec stands for; gradients do not travel."""
    if codec == OFF or (codec == AS_TRAINED and trained.forward == "off"):
        return PlanConfig("raw", "raw")
    learned = None if trained.forward == "off" else tw.scheme(trained.forward).evaluated()
    if codec == AS_TRAINED:
        return PlanConfig(str(learned), "raw")
    scheme = tw.scheme(codec)
    if scheme.evaluated() == learned:  # what the run has learned is of use to it
        return PlanConfig(str(learned), "raw")
    if isinstance(scheme, SharedMask):
        raise ConfigError(f"--codec {codec}: only gradients take their mask from activations")
    return PlanConfig(str(scheme.stateless()), "raw")


def _named(codec: str, plan: PlanConfig) -> str:
    return codec if codec in (OFF, plan.forward) else f"{codec} ({plan.forward})"


def _load(run: Run, choice: Choice, asked: Asked) -> None:
    """Give this rank's stages the weights of a checkpoint, and the statistics asked for."""
    fetch_weights(run, choice)
    if asked.statistics is not None:
        path = Path(asked.statistics)
        try:
            statistics.put(run, load_file(path))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"can't read the statistics {path}: {error}") from None


def _expect(run: Run, home: Home, choice: Choice) -> list[str]:
    """Let links expect what they had learned when a checkpoint was written, if anything; lines on
    those that do not (collective)."""
    scheme = tw.scheme(run.config.plan.forward)
    if scheme == scheme.stateless():
        return []
    cut = run.task.cut_at(run.config)
    parts = {
        part.folder: part.manifest["pipeline"]
        for part in choice.parts.values()
        if run.task.cut_at(settings_of(part.manifest, home)) == cut
    }
    return run.pipeline.expect(parts)


def _recalibrate(run: Run, home: Home, codec: str, asked: Asked, screen: Console) -> None:
    if not statistics.gathered(run):
        raise ConfigError("the model keeps no running statistics: there is nothing to recalibrate")
    statistics.estimate(run, codec != OFF, asked.recalibrate)
    if asked.save:
        found = statistics.gathered(run)
        if run.place.rank == 0:
            name = STATISTICS.format("".join(c if c.isalnum() else "-" for c in codec))
            save_file(found, home.folder / name)
            _say(screen, f"statistics with codec {codec}: {home.folder / name}")


def _numbers(one: Evaluation) -> dict[str, float]:
    accuracy = {} if one.accuracy is None else {"accuracy": one.accuracy}
    return {"loss": one.loss, **accuracy}


def _say(screen: Console, line: str) -> None:
    screen.print(line, soft_wrap=True, markup=False)
