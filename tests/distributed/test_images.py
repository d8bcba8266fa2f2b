"""Networks on images, trained in stages: BatchNorm, schedules, augmentation, and going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.pool import Pool
from tests.distributed.runs import (
    Ending,
    assert_equal_runs,
    entry_digest,
    loaded,
    records,
    references,
    results,
    run,
    saved,
)
from tests.images import idx_in
from thinwire.train import batches, build, check, weights
from thinwire.train.arguments import read_train
from thinwire.train.loop import learning_rate
from thinwire.train.tasks import task_of

#: Four steps an epoch, the last one of fewer images.
TINY = [
    "--model.kind=resnet8",
    "--train.batch=12",
    "--train.epochs=2",
    "--train.lr=0.02",
    "--pipeline.microbatches=4",
    "--link.rate=none",
    "--threads=1",
    "--data.validation=0.1",
]
MEMORY = ["--link.transport=memory"]
RAW = ["--forward=raw", "--backward=raw"]


def options_in(folder: Path, *more: str) -> list[str]:
    return [*TINY, "--data.path", idx_in(folder), *more]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if "loss" in record]


def by_hand(options: list[str]) -> tuple[list[float], dict[str, str]]:
    """The same run by plain torch on the whole network: losses, and its tensors with the
    optimizer's."""
    torch.set_num_threads(1)
    config = check.resolved(read_train([*options, *MEMORY, "--pipeline.stages=1"])[0])
    task = task_of(config)
    data = task.load(config)
    samples, model = task.split(config, data).training, task.model(config, data)
    (network,) = stages = model.stages([0])
    optimizer = build.build_optimizer(config.train, stages)
    per_epoch = batches.steps_per_epoch(len(samples), config.train.batch, 8)
    steps, found = config.train.epochs * per_epoch, []
    upcoming = batches.training_numbers(len(samples), config.train.batch, 8, config.train.seed)
    for step in range(1, steps + 1):
        epoch, numbers = next(upcoming)
        batch = samples.batch(numbers, epoch)
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(batch.inputs.tensor_split(4), batch.target.tensor_split(4), strict=True):
            loss = nn.functional.cross_entropy(network(x), y, reduction="sum") / len(numbers)
            loss.backward()
            total += loss.item()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, config.train)
        optimizer.step()
        found.append(total)
    entries = weights.collect(model.named_tensors(stages), optimizer)
    return found, {name: entry_digest(entry) for name, entry in entries.items()}


@pytest.mark.parametrize("cuts", ["layer1.2,layer2.1,layer3.0", None])
def test_four_stages_equal_the_network_in_one_piece_bit_for_bit(
    cuts: str | None, pool: Pool, tmp_path: Path
) -> None:
    options = options_in(tmp_path, "--model.kind=resnet20", "--train.epochs=1", *RAW)
    split = [f"--pipeline.cuts={cuts}"] if cuts else ["--pipeline.stages=4"]
    folder = tmp_path / "run"
    (found,) = pool.run(run, [*options, *MEMORY, *split], str(folder), world_size=1)
    assert found.how == "complete", found
    expected, tensors = by_hand(options)
    assert losses(folder) == pytest.approx(expected, abs=1e-7)
    assert saved(folder) == tensors
    assert {"bn1.running_mean", "layer3.2.bn2.num_batches_tracked"} <= tensors.keys()


SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBV"]


def test_every_schedule_trains_the_same_network(pool: Pool, tmp_path: Path) -> None:
    options = options_in(tmp_path, "--model.kind=resnet20", "--train.steps=2", *RAW)
    found = {}
    for schedule in SCHEDULES:
        folder = tmp_path / schedule
        words = [*options, f"--pipeline.schedule={schedule}"]
        (one, _) = pool.run(run, words, str(folder), world_size=2)
        assert one.how == "complete", (schedule, one)
        found[schedule] = losses(folder), saved(folder)
    expected, tensors = found["GPipe"]
    for schedule, (other, others) in found.items():
        # sums of gradients in another order differ in their last digits
        assert other == pytest.approx(expected, abs=1e-5), schedule
        if schedule in ("1F1B", "Interleaved1F1B"):
            assert others == tensors, schedule


def test_what_is_seen_in_training_is_learned_and_evaluation_moves_nothing(
    pool: Pool, tmp_path: Path
) -> None:
    options = options_in(tmp_path, "--train.epochs=6", "--train.lr=0.1", "--forward=delta(int4)")
    folder = tmp_path / "run"
    (one, _) = pool.run(run, options, str(folder), world_size=2)
    assert one.how == "complete", one
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test_accuracy"] == summary["test_accuracy_codec"] == 1
    assert summary["val_accuracy"] == 1
    assert summary["images"] == 24 * 12 - 6 * 3
    assert summary["images_per_s"] > 0
    assert "tokens" not in summary
    epochs = [record for record in records(folder) if "val_loss_codec" in record]
    assert [record["epoch"] for record in epochs] == [1, 2, 3, 4, 5]
    assert all(0 <= record["val_accuracy_codec"] <= 1 for record in epochs)
    assert "(accuracy 100.00 %) with the codec off" in one.shown
    assert "images/s" in one.shown
    # each micro-batch is counted by BatchNorm once, and no batch of an evaluation
    assert tracked(folder) == {4 * 24}


def tracked(folder: Path) -> set[int]:
    """How many batches each BatchNorm of the newest checkpoint has seen."""
    from safetensors.torch import load_file

    found = set()
    for path in folder.glob("rank-*/*/model.safetensors"):
        tensors = load_file(path)
        found |= {int(t) for name, t in tensors.items() if name.endswith("num_batches_tracked")}
    return found


CASES: dict[str, tuple[int, list[str]]] = {
    "delta(int4)": (2, ["--forward=delta(int4)"]),
    "delta, variants": (
        2,
        [
            "--forward=delta(int4)",
            "--data.augment=crop-flip",
            "--data.variants=2",
            "--train.epochs=3",
        ],
    ),
    "new ones each epoch": (2, ["--forward=delta(int4)", "--data.augment=crop-flip"]),
    "in memory": (1, [*MEMORY, "--pipeline.stages=3", "--forward=delta(int3)"]),
    "torch's own operations": (2, ["--forward=off", "--backward=off"]),
    "frozen": (2, ["--forward=delta(int4)", "--train.frozen=1", "--pipeline.cuts=layer1"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    case: str, pool: Pool, tmp_path: Path
) -> None:
    world_size, more = CASES[case]
    options = options_in(tmp_path, "--checkpoint.every=3", *more)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    found = pool.run(run, options, str(whole), world_size=world_size)
    assert {one.how for one in found} == {"complete"}, found
    ending = Ending(crash_after=5)
    pool.run(run, options, str(cut), ending=ending, world_size=world_size)
    found = pool.run(run, [], str(cut), resumed=True, world_size=world_size)
    assert {one.how for one in found} == {"complete"}, found
    assert "goes on after step 3" in found[0].shown
    assert_equal_runs(whole, cut)
    summary = json.loads((whole / "summary.json").read_text())
    (forward,) = [k for k in summary["links"] if k["direction"] == "forward"][:1] or [None]
    check_visits(case, forward, references(whole), found[0].shown)


def check_visits(case: str, forward: Any, remembered: dict[str, Any], shown: str) -> None:
    """What a delta scheme has met again, and remembers."""
    if case == "delta, variants":  # variants 0, 1, and 0 again
        assert forward["hit_rate"] == pytest.approx(1 / 3, abs=0.03)
        assert {len(table) for table in remembered.values()} == {2 * 45}
    elif case == "new ones each epoch":
        assert forward["hit_rate"] == 0
        assert not any(remembered.values())
        assert "note: delta(int4) meets no sample again, since each epoch has new" in shown
        assert "There was no room" not in shown
    elif case == "frozen":
        assert forward["rested"] > 0


OTHERS = {
    "in memory to 3": (1, 1, ["--pipeline.stages=3"]),
    "3 by names to 2": (3, 2, ["--nproc=2"]),
    "2 to other cuts": (2, 2, ["--pipeline.cuts=layer2"]),
    "in memory to other cuts": (1, 1, ["--pipeline.cuts=layer2"]),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_stages_go_on_with_the_same_weights_and_statistics(
    case: str, pool: Pool, tmp_path: Path
) -> None:
    before, after, words = OTHERS[case]
    named = {3: ["--pipeline.cuts=layer1,layer2"], 1: MEMORY}.get(before, [])
    options = options_in(tmp_path, *RAW, *named)
    whole, folder = tmp_path / "whole", tmp_path / "run"
    pool.run(run, options, str(whole), world_size=before)
    pool.run(run, options, str(folder), ending=Ending(stop_at=5), world_size=before)
    for found, shown in pool.run(loaded, words, str(folder), world_size=after):
        assert found.items() <= saved(folder).items()
        assert "goes on after step 5" in shown
        assert "the links' counters begin anew" in shown
    found = pool.run(run, words, str(folder), resumed=True, world_size=after)
    assert {one.how for one in found} == {"complete"}, found
    numbers = ("train_loss", "val_loss", "val_accuracy", "test_loss", "test_accuracy")
    assert {n: results(folder)[n] for n in numbers} == {n: results(whole)[n] for n in numbers}
    if after >= before:  # else a rank that is gone has left its part of the checkpoint before
        assert saved(folder).items() >= saved(whole).items()


def test_other_images_or_settings_are_refused_on_resuming(pool: Pool, tmp_path: Path) -> None:
    options = options_in(tmp_path, *MEMORY)
    folder = tmp_path / "run"
    pool.run(run, options, str(folder), ending=Ending(stop_at=2), world_size=1)
    refused = {
        "--data.augment=crop-flip": "--data.augment can't change in a resumed run",
        "--train.optimizer=adamw": "--train.optimizer can't change in a resumed run",
        "--model.kind=resnet20": "--model.kind can't change in a resumed run",
    }
    for word, message in refused.items():
        (found,) = pool.run(run, [word], str(folder), resumed=True, world_size=1)
        assert message in found.how
    idx_in(tmp_path, train=49)
    (found,) = pool.run(run, [], str(folder), resumed=True, world_size=1)
    assert "the images are not those that it was trained on" in found.how
