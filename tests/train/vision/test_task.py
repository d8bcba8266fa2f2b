"""What a run on images says and remembers before its first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.images import idx_in, labelled, write_idx
from thinwire.train import bound, build, check, pace, report, storage
from thinwire.train.arguments import read_arguments
from thinwire.train.batches import Split
from thinwire.train.config import Config, ConfigError
from thinwire.train.task import Data, Model
from thinwire.train.tasks import task_of
from thinwire.train.vision import task


def made(folder: Path, *words: str) -> tuple[Config, Data, Split, Model]:
    given = ["--model.kind=resnet8", "--data.path", idx_in(folder), "--train.batch=16", *words]
    config = check.resolved(read_arguments(given))
    task = task_of(config)
    data = task.load(config)
    return config, data, task.split(config, data), task.model(config, data)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "forward delta(int4), since 3 epochs are planned"),
        (
            ("--data.augment=crop-flip",),
            "forward tile, since no sample ever comes again: each epoch has new variants of all",
        ),
        (
            ("--data.augment=crop-flip", "--data.variants=2"),
            "forward tile, since 3 epochs are planned, each with one of 2 variants of a sample",
        ),
        (
            ("--data.augment=crop-flip", "--data.variants=2", "--train.epochs=6"),
            "forward delta(int4), since 6 epochs are planned, each with one of 2 variants of a sam",
        ),
    ],
)
def test_the_default_scheme_follows_from_the_visits_of_a_variant(
    words: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    config, data, _, _ = made(tmp_path, *words)
    told: list[str] = []
    build.planned(config, data, told.append)
    assert told[0].startswith(line)


def test_what_is_trained_on_is_told_with_what_is_kept_apart(tmp_path: Path) -> None:
    words = ["--data.augment=crop-flip", "--train.frozen=1", "--forward=tile"]
    config, data, samples, model = made(tmp_path, *words)
    shown = report.opening(config, data, samples, model, 9)
    assert "model: 77,299 parameters in 2 stages" in shown
    assert "images, 8×8 in 1 channel and 3 classes, 48 samples to train, " in shown
    assert "2 to validate and 8 to test, sha256 " in shown
    assert "the stem and 1 of 3 blocks frozen" in shown
    assert "note" not in shown  # nothing recurs, so nothing could rest
    config, *_ = made(tmp_path, "--data.augment=crop-flip", "--forward=delta(int4)")
    note = "note: delta(int4) meets no sample again, since each epoch has new variants of all; "
    assert note in report.opening(config, data, samples, model, 9)


def test_an_end_of_a_link_remembers_every_variant_of_what_crosses_it(tmp_path: Path) -> None:
    words = ["--nproc=3", "--data.augment=crop-flip", "--data.variants=2"]
    config, _, samples, model = made(tmp_path, *words, "--forward=delta(int4)", "--backward=raw")
    assert [model.values(edge) for edge in (0, 1)] == [16 * 8 * 8, 32 * 4 * 4]
    needs = [
        storage.need_of(config, model, rank, len(samples.training), samples.training.variants)
        for rank in range(3)
    ]
    assert [need.ends for need in needs] == [1, 2, 1]
    assert needs[0].samples == 96
    assert needs[1].bytes_a_sample == needs[0].bytes_a_sample + needs[2].bytes_a_sample
    assert needs[0].named == "96 variants of samples"
    # the rank in between sends gradients of one size and activations of another
    assert pace.link_s(config, model, 1.0) > 0


def test_too_few_images_for_the_micro_batches_are_one_line(tmp_path: Path) -> None:
    config, data, samples, _ = made(tmp_path)
    write_idx(tmp_path / "few", "train-", *labelled(12))
    with pytest.raises(ConfigError, match="11 images to train on, fewer than the 16 of a step of"):
        task_of(config).check_samples(config, data, 11)
    task_of(config).check_samples(config, data, len(samples.training))


def test_fewer_images_are_spread_over_all_and_more_than_there_are_is_one_line(
    tmp_path: Path,
) -> None:
    _, _, every, _ = made(tmp_path)
    config, data, some, _ = made(tmp_path, "--train.samples=20")
    numbers, kept = torch.arange(20), torch.arange(20) * len(every.training) // 20
    assert torch.equal(some.training.batch(numbers).inputs, every.training.batch(kept).inputs)
    assert len(some.validation) == len(every.validation)
    config, data, _, _ = made(tmp_path, "--train.samples=90")
    with pytest.raises(ConfigError, match=r"train.samples is 90, but .* has 48 samples to train"):
        build.build(config, data, build.Place(0, 1, torch.device("cpu")), tmp_path)


def test_images_whose_activations_do_not_fit_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "physical_memory", lambda: 10_000)
    with pytest.raises(ConfigError, match=r"2 images of 8×8 in a micro-batch need 0\.0 GB"):
        made(tmp_path)


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("resnet8", "--model.kind resnet20"),
        ("resnet10", "--model.kind resnet20"),
        ("resnet20", "--model.kind resnet18"),
        ("resnet18", "--pipeline.cuts layer3"),
    ],
)
def test_a_run_whose_link_cannot_be_narrowed_should_compute_more(
    kind: str, flag: str, tmp_path: Path
) -> None:
    words = [f"--model.kind={kind}", "--forward=int2", "--backward=int2", "--link.rate=none"]
    config, *_ = made(tmp_path, *words)
    costs = bound.StepCosts(100, 1, 50, 1, 1, 0)
    assert bound.next_flag(costs, [], config) == flag


def test_more_micro_batches_are_advised_with_images_enough_for_them(tmp_path: Path) -> None:
    costs, links = bound.StepCosts(100, 50, 1, 1, 1, 0), [{"edge": 0}]
    words = ["--link.rate=none", "--pipeline.cuts=layer1"]
    for batch, more in ((16, " --train.batch 32"), (32, "")):
        config, *_ = made(tmp_path, *words, f"--train.batch={batch}")
        flag = bound.next_flag(costs, links, config)
        assert flag == f"--pipeline.microbatches 16{more}"
        again = [word for word in flag.split() if word]
        made(tmp_path, *words, f"--train.batch={batch}", *again)
