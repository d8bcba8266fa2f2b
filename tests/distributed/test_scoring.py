"""``thinwire eval`` and ``thinwire recalibrate``: what a run computes with codecs, and without."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

from tests.distributed.pool import Pool
from tests.distributed.runs import TINY, run, text_in
from tests.images import idx_in
from thinwire.train import check, home
from thinwire.train.asked import Asked, read_eval, read_recalibrate
from thinwire.train.batches import epoch_order
from thinwire.train.build import Place, build
from thinwire.train.choose import choose
from thinwire.train.config import ConfigError, PlanConfig
from thinwire.train.resume import fetch_weights
from thinwire.train.scoring import score, warnings
from thinwire.train.tasks import task_of

IMAGES = [
    *("--model.kind=resnet8", "--train.batch=12", "--train.epochs=4", "--train.lr=0.02"),
    *("--pipeline.microbatches=4", "--link.rate=none", "--threads=1", "--data.validation=0.1"),
    *("--pipeline.stages=2", "--link.transport=memory"),
]


def scored(
    rank: int, world_size: int, words: list[str], folder: str, recalibrated: bool = False
) -> tuple[dict[str, Any] | str, str]:
    """What the command would print as JSON, or its error, and what it shows."""
    read = read_recalibrate if recalibrated else read_eval
    shown = io.StringIO()
    try:
        config, path, asked = read([folder, *words, *([f"--nproc={world_size}"])])
        config = check.resolved(config, world_size)
        where = home.visit(config, path, rank, rank)
        place = Place(rank, world_size, torch.device("cpu"))
        data = task_of(config).load(config)
        document = score(config, data, place, where, asked, Console(file=shown, width=200))
    except ConfigError as error:
        return str(error), shown.getvalue()
    return document, shown.getvalue()


def summary_of(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_is_what_its_summary_says(processes: int, pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    options = [*TINY, "--data.path", text_in(tmp_path), "--forward=topk:0.2/int8"]
    pool.run(run, options, folder, world_size=2)
    before = sorted(path for path in Path(folder).rglob("*"))
    summary = summary_of(folder)
    for document, shown in pool.run(scored, [], folder, world_size=processes):
        assert not isinstance(document, str), document
        off, trained = document["scores"]
        assert (off["codec"], trained["codec"]) == ("off", "as-trained")
        assert off["loss"] == summary["val_loss"]
        assert trained["loss"] == summary["val_loss_codec"]
        assert document["step"] == summary["steps"]
        assert "val loss with codec as-trained (topk:0.2/int8)" in shown
        assert "is a part of what it computes" in shown
    assert sorted(path for path in Path(folder).rglob("*")) == before


@pytest.mark.parametrize(
    "forward", ["delta(int2,first=int2,by=token+drift)", "predicted(int2,by=token)"]
)
def test_what_was_learned_is_used_in_evaluation(forward: str, pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    options = [*TINY, "--data.path", text_in(tmp_path), f"--forward={forward}"]
    pool.run(run, [*options, "--backward=int8"], folder, world_size=2)
    summary = summary_of(folder)
    for processes in (1, 2):
        for document, shown in pool.run(
            scored, ["--codec=as-trained"], folder, world_size=processes
        ):
            assert not isinstance(document, str), document
            (trained,) = document["scores"]
            assert trained["loss"] == summary["val_loss_codec"]
            assert trained["plan"] == "predicted(int2,by=token)"
            assert "note" not in shown
    ((again, shown),) = pool.run(scored, [f"--codec={forward}"], folder, world_size=1)
    assert not isinstance(again, str)
    assert again["scores"][0]["loss"] == summary["val_loss_codec"]
    assert "predicted(int2,by=token)" in shown
    ((plain, _),) = pool.run(scored, ["--codec=int2"], folder, world_size=1)
    assert not isinstance(plain, str)
    assert plain["scores"][0]["loss"] != summary["val_loss_codec"]


def test_any_codec_may_stand_on_the_links(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    options = [*TINY, "--data.path", text_in(tmp_path)]
    pool.run(run, options, folder, world_size=2)
    words = ["--codec=int1", "--codec=delta(int2,first=int8)", "--codec=raw"]
    ((document, _),) = pool.run(scored, words, folder, world_size=1)
    assert not isinstance(document, str)
    coarse, dense, exact = document["scores"]
    assert dense["plan"] == "int8"  # a scheme with state is evaluated without
    assert exact["loss"] == summary_of(folder)["val_loss"]
    assert abs(dense["loss"] - exact["loss"]) < abs(coarse["loss"] - exact["loss"])


def test_statistics_are_those_of_what_the_layers_are_given(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    options = [*IMAGES, "--data.path", idx_in(tmp_path), "--forward=topk:0.1", "--backward=int8"]
    (outcome,) = pool.run(run, options, folder, world_size=1)
    assert outcome.how == "complete", outcome
    ((document, shown),) = pool.run(scored, ["--samples=48"], folder, True, world_size=1)
    assert not isinstance(document, str), document
    assert f"statistics with codec off: {folder}/statistics-off.safetensors" in shown
    assert "another model" not in shown  # that is what they were estimated for
    found = load_file(Path(folder) / "statistics-off.safetensors")
    expected = pool.run(by_hand, folder, world_size=1)[0]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.allclose(tensor, torch.tensor(expected[name]), rtol=1e-4, atol=1e-6), name
    words = ["--codec=off", f"--statistics={folder}/statistics-off.safetensors", "--split=test"]
    ((again, shown),) = pool.run(scored, words, folder, world_size=1)
    assert "test loss with codec off, statistics of" in shown
    words = ["--codec=off", "--recalibrate=48", "--split=test"]
    ((anew, _),) = pool.run(scored, words, folder, world_size=1)
    assert not isinstance(again, str)
    assert not isinstance(anew, str)
    assert again["scores"] == anew["scores"]
    assert again["scores"][0]["loss"] != summary_of(folder)["test_loss"]


def by_hand(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    """Mean and variance of what enters each layer, over 48 samples, by plain torch."""
    config, path, _ = read_eval([folder])
    config = check.resolved(config, 1)
    data = task_of(config).load(config)
    place = Place(0, 1, torch.device("cpu"))
    made = build(config, data, place, path / "rank-0")
    choice, _ = choose(home.visit(config, path, 0, 0), 0, 1, lambda manifest: False)
    assert choice is not None
    fetch_weights(made, choice)
    given: dict[str, list[torch.Tensor]] = {}
    names = {id(t): n for n, t in made.model.named_tensors(made.stages).items()}
    for stage in made.stages:
        for module in stage.modules():
            if isinstance(module, nn.BatchNorm2d):
                name = names[id(module.running_mean)]
                module.register_forward_pre_hook(
                    lambda _, x, name=name: given.setdefault(name, []).append(x[0])
                )
    order = epoch_order(len(made.samples.training), made.config.train.seed, 0)
    for numbers in order[:48].split(12):
        batch = made.samples.training.batch(numbers, 0)
        for x in batch.inputs.tensor_split(4):
            with torch.no_grad():
                for stage in made.stages:
                    stage.train()
                    x = stage(x)
    made.pipeline.close()
    found = {}
    for name, tensors in given.items():
        values = torch.cat(tensors).double().transpose(0, 1).flatten(1)
        found[name] = values.mean(1).tolist()
        found[name.replace("running_mean", "running_var")] = values.var(1).tolist()
    return found


def test_what_cannot_be_evaluated_is_told_in_one_line(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    options = [*TINY, "--data.path", text_in(tmp_path)]
    pool.run(run, options, folder, world_size=2)
    cases = {
        ("--split=test",): "the data have no test split",
        ("--recalibrate",): "the model keeps no running statistics",
        ("--recalibrate=x",): "'x' is no number of samples",
        ("--statistics=nothing",): "can't read the statistics nothing",
        ("--statistics=a", "--recalibrate"): "are two ways to the same",
        ("--codec=topk:0.2,mask=shared",): "only gradients take their mask from activations",
        ("--split=train",): "invalid choice: 'train'",
    }
    for words, why in cases.items():
        ((found, _),) = pool.run(scored, list(words), folder, world_size=1)
        assert isinstance(found, str)
        assert why in found
    for part in Path(folder).glob("rank-1"):
        part.rename(tmp_path / "elsewhere")
    ((found, _),) = pool.run(scored, [], folder, world_size=1)
    assert isinstance(found, str)
    assert "there is no part of rank-1" in found


def test_only_a_plan_that_changes_the_function_is_warned_of() -> None:
    for spec in ("topk:0.1", "ef(topk:0.1)", "efmixed(topk:0.1)", "randk:0.1", "threshold:2"):
        assert warnings(PlanConfig(spec, "int8"), Asked())
        assert not warnings(PlanConfig(spec, "int8"), Asked(("as-trained",)))
    for spec in ("int4", "delta(int4)", "ef21(topk:0.1)", "delta(topk:0.5)", "off", "topk:1"):
        assert not warnings(PlanConfig(spec, "int8"), Asked())


def test_statistics_of_another_model_are_refused(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    options = [*IMAGES, "--data.path", idx_in(tmp_path), "--train.steps=1", "--backward=int8"]
    (outcome,) = pool.run(run, options, folder, world_size=1)
    assert outcome.how == "complete"
    save_file({"layer1.0.bn1.running_mean": torch.zeros(3)}, tmp_path / "other.safetensors")
    words = [f"--statistics={tmp_path / 'other.safetensors'}"]
    ((found, _),) = pool.run(scored, words, folder, world_size=1)
    assert isinstance(found, str)
    assert "the statistics are those of another model" in found


def test_compression_begins_when_it_is_told_and_what_it_loses_is_noted(
    pool: Pool, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    options = [*TINY, "--data.path", text_in(tmp_path), "--forward=topk:0.2", "--backward=int4"]
    options += ["--plan.dense_epochs=1", "--plan.dense_steps=2", "--train.measure_every=2"]
    outcome, _ = pool.run(run, options, str(folder), world_size=2)
    assert outcome.how == "complete", outcome
    assert "is a part of what it computes" in outcome.shown
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    an_epoch = len(steps) // 3
    measured = sorted({*range(2, len(steps) + 1, 2), len(steps)})  # the last one too
    assert [r["step"] for r in steps if "fidelity" in r] == measured
    for record in steps:
        for link in record.get("fidelity", []):
            dense = record["step"] <= an_epoch
            assert (link["relative_error"] == 0) == dense
            assert link["direction"] in ("forward", "backward")


@pytest.mark.parametrize(
    "plan",
    [
        ("--forward=ef(topk:0.3)",),
        ("--forward=predicted(int2,by=token+previous)", "--backward=predicted(int2)"),
    ],
)
def test_all_stages_in_one_process_are_the_same_run(
    plan: tuple[str, ...], pool: Pool, tmp_path: Path
) -> None:
    apart, together = tmp_path / "apart", tmp_path / "together"
    options = [*TINY, "--data.path", text_in(tmp_path), *plan]
    pool.run(run, options, str(apart), world_size=2)
    words = [*options, "--parallel.inprocess", "--pipeline.stages=2"]
    pool.run(run, words, str(together), world_size=1)
    one, other = summary_of(str(apart)), summary_of(str(together))
    assert one["val_loss"] == other["val_loss"]
    assert one["train_loss"] == other["train_loss"]
    kept = ("payload_bytes", "header_bytes", "messages", "values")
    assert [[link[k] for k in kept] for link in one["links"]] == [
        [link[k] for k in kept] for link in other["links"]
    ]
    assert other["config"]["link"]["transport"] == "memory"
