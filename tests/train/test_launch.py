"""Whole runs: processes, run folders, failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.images import idx_in
from thinwire.train import inspection, launch, report
from thinwire.train.arguments import read_arguments
from thinwire.train.config import ConfigError

TILE = "predicted(tile,by=token+previous)"
TINY = ["--quick", "--steps", "4", "--threads", "1", "--model.dim", "32", "--model.context", "32"]
SUMMARY_KEYS = {
    "val_loss",
    "val_loss_codec",
    "train_loss",
    "tokens_per_s",
    "step_ms_median",
    "train_s",
    "steps",
    "epochs",
    "tokens",
    "links",
    "control",
    "bound",
    "cpu",
    "data",
    "parameters",
    "seed",
    "threads",
    "versions",
    "config",
    "checkpoints",
}
LINK_KEYS = {
    "edge",
    "direction",
    "codec",
    "messages",
    "rested",
    "payload_bytes",
    "header_bytes",
    "raw_bytes",
    "values",
    "kinds",
    "bits_per_value",
    "steady_bits_per_value",
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "thinwire", "train", *arguments]


def run(*arguments: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_a_run_leaves_its_settings_metrics_and_summary(tmp_path: Path) -> None:
    result = run(*TINY, "--out", "run", cwd=tmp_path)
    assert sorted(p.name for p in (tmp_path / "run").glob("[!.]*")) == [
        "config.toml",
        "metrics.jsonl",
        "rank-0",
        "rank-1",
        "run.json",
        "summary.json",
    ]
    summary = summary_of(tmp_path / "run")
    assert summary.keys() >= SUMMARY_KEYS
    assert {(link["edge"], link["direction"]) for link in summary["links"]} == {
        (0, "forward"),
        (0, "backward"),
    }
    for link in summary["links"]:
        assert link.keys() >= LINK_KEYS
        assert link["messages"] == 4 * 8
        assert 0 < link["payload_bytes"] < link["raw_bytes"] / 3
    records = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").open()]
    saved = records.pop()
    assert saved["step"] == 4
    assert saved["checkpoint"] == {n: summary["checkpoints"][n] for n in ("bytes", "seconds")}
    assert summary["checkpoints"]["count"] == 1
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "lr", "tokens_per_s", "timers_ms"} <= records[0].keys()
    assert records[-1]["links"]
    assert summary["bound"]["sentence"] in result.stdout
    assert len(summary["cpu"]) == 2
    for cpu in summary["cpu"]:
        assert 0 < cpu["codec_ms"] < cpu["step_ms"]
        assert cpu["codec_share"] == pytest.approx(cpu["codec_ms"] / cpu["step_ms"])
    assert report.compression_sentence(summary["cpu"]) in result.stdout
    assert "validation loss" in result.stdout
    assert result.stdout.startswith(f"forward {TILE}, since 0.25 epochs are planned\n")


def test_a_written_config_repeats_the_run_exactly(tmp_path: Path) -> None:
    run(*TINY, "--link.transport", "memory", "--out", "one", cwd=tmp_path)
    run("one/config.toml", "--out", "two", cwd=tmp_path)
    one, two = summary_of(tmp_path / "one"), summary_of(tmp_path / "two")
    assert one["val_loss"] == two["val_loss"]
    assert one["links"] == two["links"]


def test_memory_and_gloo_give_the_same_losses_and_bytes(tmp_path: Path) -> None:
    run(*TINY, "--link.transport", "memory", "--out", "memory", cwd=tmp_path)
    run(*TINY, "--link.rate", "none", "--out", "gloo", cwd=tmp_path)
    memory, gloo = summary_of(tmp_path / "memory"), summary_of(tmp_path / "gloo")
    for name in ("train_loss", "val_loss", "val_loss_codec", "links"):
        assert memory[name] == gloo[name]


def test_torchs_own_operations_give_the_loss_of_raw_with_short_batches_too(tmp_path: Path) -> None:
    # 256 samples in batches of 20 leave 16, and 64 leave 4, for 8 micro-batches of up to 3
    short = (*TINY, "--steps", "14", "--train.batch", "20")
    run(*short, "--forward", "off", "--backward", "off", "--out", "off", cwd=tmp_path)
    raw = ("--forward", "raw", "--backward", "raw", "--link.transport", "memory", "--out", "raw")
    run(*short, *raw, cwd=tmp_path)
    off, exact = summary_of(tmp_path / "off"), summary_of(tmp_path / "raw")
    assert off["val_loss"] == pytest.approx(exact["val_loss"], abs=1e-5)
    assert off["tokens"] == exact["tokens"]


def test_json_is_the_only_thing_on_stdout(tmp_path: Path) -> None:
    result = run(*TINY, "--link.transport", "memory", "--json", "--out", "run", cwd=tmp_path)
    assert json.loads(result.stdout) == summary_of(tmp_path / "run")
    assert "validation loss" in result.stderr


def test_a_run_goes_on_where_nobody_reads_its_stdout_any_more(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(*TINY, "--link.transport", "memory", "--json", "--out", "run"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()  # as head does once it has its lines
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0
    assert errors.splitlines()[-1] == "thinwire: stdout is closed; the run goes on, see its folder"
    assert summary_of(tmp_path / "run")["steps"] == 4


def test_compare_makes_three_runs_and_one_comparison(tmp_path: Path) -> None:
    result = run(*TINY, "--link.transport", "memory", "--compare", "--out", "run", cwd=tmp_path)
    for name in ("compressed", "fp32", "bf16"):
        assert summary_of(tmp_path / "run" / name)["steps"] == 4
    comparison = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert comparison["against_fp32"]["traffic_ratio"] > 3
    assert "as fast as fp32" in result.stdout


def test_four_stages_of_a_v_schedule_train_with_a_tied_head(tmp_path: Path) -> None:
    options = ("--pipeline.schedule", "ZBV", "--model.tied", "true", "--forward", "raw")
    run(*TINY, *options, "--backward", "raw", "--out", "zbv", cwd=tmp_path)
    reference = ("--model.tied", "true", "--forward", "raw", "--backward", "raw")
    run(*TINY, *reference, "--link.transport", "memory", "--out", "plain", cwd=tmp_path)
    zbv, plain = summary_of(tmp_path / "zbv"), summary_of(tmp_path / "plain")
    assert zbv["val_loss"] == pytest.approx(plain["val_loss"], abs=1e-4)


def test_frozen_blocks_are_neither_computed_nor_sent_again(tmp_path: Path) -> None:
    # 256 samples in batches of 64: the fifth step begins the second epoch
    options = (*TINY, "--steps", "12", "--train.batch", "64", "--train.frozen", "2")
    exact = ("--forward", "delta(int4,first=raw,ref=fp32)", "--link.rate", "none")
    result = run(*options, *exact, "--out", "on", cwd=tmp_path)
    memory = ("--link.transport", "memory")
    run(*options, *exact, *memory, "--skip-frozen", "false", "--out", "off", cwd=tmp_path)
    on, off = summary_of(tmp_path / "on"), summary_of(tmp_path / "off")
    for name in ("train_loss", "val_loss", "val_loss_codec"):
        assert on[name] == off[name]
    forward, backward = on["links"]
    assert (forward["messages"], forward["rested"]) == (4 * 8, 8 * 8)
    assert forward["hit_rate"] == pytest.approx(2 / 3)
    assert forward["kinds"].keys() == {"first"}
    assert (backward["messages"], backward["payload_bytes"], backward["header_bytes"]) == (0, 0, 0)
    assert (off["links"][0]["messages"], off["links"][0]["rested"]) == (12 * 8, 0)
    assert "2 of 4 blocks frozen" in result.stdout
    assert "Of 96 messages forward 64 were neither computed nor sent" in result.stdout


@pytest.mark.parametrize("options", [(), ("--model.tied", "true"), ("--pipeline.schedule", "ZBV")])
def test_the_head_alone_can_be_trained(tmp_path: Path, options: tuple[str, ...]) -> None:
    memory = ("--link.transport", "memory", "--link.rate", "none")
    run(*TINY, "--train.frozen", "4", *options, *memory, "--out", "run", cwd=tmp_path)
    records = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").open()]
    assert all(r["grad_norm"] > 0 for r in records if "grad_norm" in r)


def test_dropout_in_frozen_blocks_keeps_them_running_and_is_said(tmp_path: Path) -> None:
    options = (*TINY, "--steps", "6", "--train.batch", "64", "--train.frozen", "2")
    options += ("--forward", "delta(int4)", "--link.transport", "memory", "--link.rate", "none")
    result = run(*options, "--model.dropout", "0.1", "--out", "run", cwd=tmp_path)
    assert summary_of(tmp_path / "run")["links"][0]["rested"] == 0
    assert "stage 0 is frozen, but its forward draws random numbers" in result.stderr


def test_a_network_on_images_trains_in_processes_and_tells_its_accuracy(tmp_path: Path) -> None:
    words = ["--model.kind=resnet8", "--data.path", idx_in(tmp_path), "--train.batch=16"]
    words += ["--pipeline.cuts=layer2", "--threads=1", "--steps=3", "--json"]
    result = run(*words, "--out", "run", cwd=tmp_path)
    summary = json.loads(result.stdout)
    assert summary == summary_of(tmp_path / "run")
    numbers = {"images", "images_per_s", "val_accuracy", "test_loss_codec", "test_accuracy_codec"}
    assert summary.keys() >= SUMMARY_KEYS - {"tokens", "tokens_per_s"} | numbers
    assert [link["values"] for link in summary["links"]] == [48 * 32 * 4 * 4] * 2
    shown = inspection.describe(tmp_path / "run")
    assert (shown["step"], shown["complete"], shown["stages"]) == (3, True, 2)
    Path(words[2], "train-labels-idx1-ubyte").unlink()
    with pytest.raises(ConfigError, match="train-images-idx3-ubyte, but no labels beside it"):
        launch.train(read_arguments([*words, "--out", str(tmp_path / "other")]))
    assert not (tmp_path / "other").exists()


def test_torchrun_launches_the_same_run(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "-m", "thinwire", "train", *TINY, "--out", "run"],
        cwd=tmp_path,
        capture_output=True,
        timeout=100,
        check=True,
    )
    run(*TINY, "--out", "own", cwd=tmp_path)
    assert summary_of(tmp_path / "run")["val_loss"] == summary_of(tmp_path / "own")["val_loss"]


def test_a_loss_that_is_not_finite_ends_the_run_with_one_line(tmp_path: Path) -> None:
    result = run(*TINY, "--train.lr", "1e30", "--train.clip", "0", cwd=tmp_path, code=1)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("thinwire: error: rank ")
    assert "stage" in last
    assert "Traceback" not in result.stderr


LONG = ("--steps", "100000", "--model.dim", "32")


def start_long_run(cwd: Path, *options: str) -> subprocess.Popen[str]:
    """A run that has done some steps and would go on for long."""
    words = options if "--resume" in options else (*(options or LONG), "--out", "run")
    process = subprocess.Popen(
        command(*words),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    metrics = cwd / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def workers_of(parent: int) -> list[int]:
    """The process ids of the children of ``parent``, in the order of their start."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    if not children.exists():
        pytest.skip("no /proc/PID/task/TID/children on this system")
    return [int(pid) for pid in children.read_text().split()]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers are left over"
        time.sleep(0.1)


def test_a_killed_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    process = start_long_run(tmp_path)
    workers = workers_of(process.pid)
    os.kill(workers[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.strip().splitlines()[-1] == "thinwire: error: rank 1 was ended by SIGKILL"
    wait_until_gone(workers, 1)


@pytest.mark.parametrize(("number", "by"), [(signal.SIGINT, ""), (signal.SIGHUP, " by SIGHUP")])
def test_what_a_terminal_sends_stops_a_run_that_can_be_resumed_and_ends_all_workers(
    number: int, by: str, tmp_path: Path
) -> None:
    process = start_long_run(tmp_path)
    workers = workers_of(process.pid)
    for pid in (*workers, process.pid):  # the workers are in its group
        os.kill(pid, number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    last = errors.splitlines()[-1]
    assert last.startswith(f"thinwire: stopped{by} at step ")
    assert last.endswith(" of 100000; go on with: thinwire train --resume run")
    assert "Traceback" not in errors
    wait_until_gone(workers, 1)


def inspected(cwd: Path) -> Any:
    words = [sys.executable, "-m", "thinwire", "inspect", "run", "--json"]
    return json.loads(subprocess.run(words, cwd=cwd, check=True, capture_output=True).stdout)


def test_a_run_that_goes_on_is_not_resumed_a_second_time(tmp_path: Path) -> None:
    process = start_long_run(tmp_path)
    result = run("--resume", "run", cwd=tmp_path, code=2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("thinwire: error: rank 0: ")
    assert line.endswith(" is in use by a run that goes on; wait until it ends, or stop it")
    assert process.poll() is None
    assert inspected(tmp_path)["running"]
    process.kill()
    process.communicate(timeout=30)
    time.sleep(1)
    assert not inspected(tmp_path)["running"]
    (tmp_path / "run" / "metrics.jsonl").unlink()
    again = start_long_run(tmp_path, "--resume", "run")
    again.kill()
    again.communicate(timeout=30)


def test_workers_do_not_outlive_a_killed_starter(tmp_path: Path) -> None:
    process = start_long_run(tmp_path)
    workers = workers_of(process.pid)
    process.kill()
    process.communicate(timeout=30)
    wait_until_gone(workers, 10)
