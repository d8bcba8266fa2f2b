"""Which settings a resumed run may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from thinwire.train import config as configuration
from thinwire.train import spelling
from thinwire.train.arguments import read_train
from thinwire.train.config import Config, ConfigError
from thinwire.train.words import typed


def resumed(folder: Path, before: dict[str, Any], *words: str) -> Config:
    """The settings with which a run of the settings ``before`` goes on."""
    made = configuration.build({"nproc": 2, "plan.forward": "delta(int4)"} | before)
    (folder / "config.toml").write_text(spelling.to_toml(made))
    return read_train([*words, "--resume", str(folder)])[0]


def test_epochs_that_are_given_replace_the_steps_of_the_run(tmp_path: Path) -> None:
    by_steps = {"train.steps": 9}
    assert resumed(tmp_path, by_steps).train.steps == 9
    longer = resumed(tmp_path, by_steps, "--train.epochs=5").train
    assert (longer.epochs, longer.steps) == (5, None)
    longer = resumed(tmp_path, by_steps, "--train.epochs=5", "--train.steps=12").train
    assert longer.steps == 12
    assert resumed(tmp_path, {"train.epochs": 2}, "--steps=12").train.steps == 12


def test_epochs_that_are_given_replace_the_steps_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 9\n")
    read = read_train([str(file), "--train.epochs=5"])[0].train
    assert (read.epochs, read.steps) == (5, None)


DISK = {"ref.disk": "1gb"}
FREE: list[tuple[dict[str, Any], str]] = [
    ({}, "--train.log_every=3"),
    ({}, "--ref.budget=2gb"),
    (DISK, "--ref.budget=2gb"),
    ({"ref.budget": "2gb"}, "--ref.budget=none"),
    ({"ref.disk": "0", "plan.forward": "int4"}, "--ref.budget=2gb"),
    ({"plan.forward": "tile"}, "--ref.disk=2gb"),
]


@pytest.mark.parametrize(("before", "word"), FREE)
def test_what_changes_no_result_may_change(
    before: dict[str, Any], word: str, tmp_path: Path
) -> None:
    name, _, text = word.removeprefix("--").partition("=")
    entry = next(one for one in configuration.settings() if one.name == name)
    assert typed(entry.of(resumed(tmp_path, before, word))) == text


KEPT: list[tuple[dict[str, Any], str, str]] = [
    ({}, "--ref.disk=2gb", "--ref.disk can't change in a resumed run, where it is none;"),
    (DISK, "--ref.disk=none", "--ref.disk can't change in a resumed run, where it is 1gb;"),
    ({"ref.disk": "0"}, "--ref.budget=2gb", "--ref.budget can't change in a resumed run"),
    ({}, "--model.tied", "--model.tied can't change in a resumed run, where it is false;"),
    ({}, "--train.seed=1", "--train.seed can't change in a resumed run, where it is 0;"),
]


@pytest.mark.parametrize(("before", "word", "message"), KEPT)
def test_what_would_change_what_is_trained_or_remembered_is_refused(
    before: dict[str, Any], word: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed(tmp_path, before, word)
    assert str(caught.value).startswith(message)


def test_cuts_and_the_stages_that_follow_from_them_replace_each_other(tmp_path: Path) -> None:
    before = {
        "model.kind": "resnet18",
        "data.path": "images",
        "nproc": 3,
        "pipeline.stages": 3,
        "pipeline.stages_per_rank": 1,
        "pipeline.cuts": "layer1,layer2",
    }
    same = resumed(tmp_path, before)
    assert (same.nproc, same.pipeline.stages, same.pipeline.cuts) == (3, 3, "layer1,layer2")
    for word in ("--nproc=2", "--pipeline.stages=6"):
        assert resumed(tmp_path, before, word).pipeline.cuts is None
    other = resumed(tmp_path, before, "--pipeline.cuts=layer3")
    assert (other.nproc, other.pipeline.stages) == (None, None)
