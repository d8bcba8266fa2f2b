"""A run that was stopped or killed and resumed equals one that was not."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests.distributed.pool import Pool
from tests.distributed.runs import (
    TINY,
    Ending,
    assert_equal_runs,
    digests,
    loaded,
    records,
    results,
    run,
    saved,
    text_in,
)
from thinwire.train import disk

NOISY = "int3:round=stochastic"
CASES = {
    "delta(int4)": (2, ""),
    "stochastic, dropout": (2, f"--model.dropout=0.2 --forward=delta({NOISY}) --backward={NOISY}"),
    "memory": (1, "--link.transport=memory --pipeline.stages=2"),
    "four ranks, tied": (4, "--model.tied=true --forward=delta(int4) --backward=delta(int4)"),
    "two stages a rank": (2, "--pipeline.schedule=ZBV --forward=raw --backward=raw"),
    "torch's own operations": (2, "--forward=off --backward=off"),
    "fp32 on disk": (2, "--forward=delta(int4,ref=fp32) --ref.budget=26kb"),
    "bf16 on disk": (2, "--forward=delta(int3,ref=bf16) --ref.budget=14kb"),
    "int8 on disk": (2, "--ref.budget=7kb"),
    "int4 on disk": (2, "--forward=delta(int4,first=int6,ref=int4) --ref.budget=4kb"),
    "bounded on disk": (2, "--ref.budget=7kb --ref.disk=12kb"),
    "four stages on disk": (4, "--backward=delta(int4) --ref.budget=30kb"),
    "in memory, both ways": (
        1,
        "--link.transport=memory --pipeline.stages=2 --forward=delta(int4) --backward=delta(int4)",
    ),
    "frozen": (2, "--train.frozen=2"),
    "frozen, on disk": (2, "--train.frozen=2 --ref.budget=7kb"),
    "frozen, bounded": (2, "--train.frozen=2 --ref.budget=7kb --ref.disk=12kb"),
    "frozen, in memory": (
        1,
        "--link.transport=memory --pipeline.stages=4 --train.frozen=2 --forward=delta(int4)",
    ),
    "frozen, four ranks": (4, "--train.frozen=3 --forward=delta(int3)"),
    "error feedback": (2, "--forward=topk:0.3/int8 --backward=ef(topk:0.1)"),
    "error feedback on disk": (
        4,
        f"--forward=ef21(topk:0.3,ref=int8) --backward=ef({NOISY}) --ref.budget=60kb",
    ),
    "by slot": (2, "--forward=ef21(topk:0.2,key=slot) --backward=efmixed(topk:0.2,key=slot)"),
    "warm start": (2, "--forward=ef21(topk:0.3) --backward=ef(topk:0.2) --plan.dense_steps=5"),
    "shared mask": (2, "--forward=ef(topk:0.3) --backward=topk:0.3/bf16,mask=shared"),
    "predicted": (2, "--forward=predicted(int3,by=token+previous) --backward=predicted(int4)"),
    "predicted, four ranks": (4, "--forward=predicted(int2,by=token) --backward=predicted(int2)"),
    "predicted changes": (
        2,
        "--forward=delta(int2,first=int4,by=token+drift) --backward=predicted(int3,by=activation)",
    ),
    "predicted changes on disk": (
        4,
        "--forward=delta(int2,second=int4,ref=bf16,by=token) --ref.budget=60kb",
    ),
    "in memory, on disk": (1, "--link.transport=memory --pipeline.stages=4 --ref.budget=40kb"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    case: str, pool: Pool, tmp_path: Path
) -> None:
    world_size, more = CASES[case]
    options = [*TINY, "--data.path", text_in(tmp_path), "--checkpoint.every=3", *more.split()]
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    found = pool.run(run, options, whole, world_size=world_size)
    assert {one.how for one in found} == {"complete"}
    found = pool.run(run, options, cut, ending=Ending(stop_at=4), world_size=world_size)
    assert {(one.how, one.step) for one in found} == {("stopped", 4)}  # one rank was asked
    found = pool.run(
        run, [], cut, resumed=True, ending=Ending(crash_after=3), world_size=world_size
    )
    assert {one.how for one in found} == {"crashed"}  # after step 7, with step 6 saved
    found = pool.run(run, [], cut, resumed=True, world_size=world_size)
    assert {one.how for one in found} == {"complete"}, found[0]
    assert "goes on after step 6" in found[0].shown
    assert "dropped" not in found[0].shown
    assert "anew" not in found[0].shown
    assert_equal_runs(Path(whole), Path(cut))
    if "frozen" in case:
        summary = json.loads((Path(cut) / "summary.json").read_text())
        assert sum(link["rested"] for link in summary["links"]) > 0


BUDGETS = {  # of the run, and of its two resumptions
    "to disk, and back": ("", "--ref.budget=7kb", "--ref.budget=1gb"),
    "from disk": ("--ref.budget=7kb", "--ref.budget=none", "--ref.budget=9kb"),
    "within a bound of the disk": ("--ref.disk=4kb", "--ref.budget=7kb", "--ref.budget=1gb"),
    "with checkpoints": ("--checkpoint.every=2", "--ref.budget=7kb", "--ref.budget=none"),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_another_budget_of_ram_in_a_resumed_run_changes_no_result(
    case: str, pool: Pool, tmp_path: Path
) -> None:
    before, *resumed = BUDGETS[case]
    options = [*TINY, "--data.path", text_in(tmp_path), *before.split()]
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    pool.run(run, options, whole, world_size=2)
    pool.run(run, options, cut, ending=Ending(stop_at=4), world_size=2)
    for words, ending in zip(resumed, (Ending(stop_at=3), Ending()), strict=True):
        found = pool.run(run, [words], cut, resumed=True, ending=ending, world_size=2)
        assert "dropped" not in found[0].shown
    assert found[0].how == "complete", found[0]
    assert records(Path(whole)) == records(Path(cut))
    assert results(Path(whole)) == results(Path(cut))
    assert digests(Path(whole), ("model", "optim")) == digests(Path(cut), ("model", "optim"))
    # what no checkpoint needs is not left on the disk
    assert bool([*Path(cut).glob("rank-*/references")]) == ("checkpoint" in before)


@pytest.mark.parametrize("checkpoints", ["", "--checkpoint.every=1"])
def test_files_of_references_keep_to_the_disk_they_may_take_over_all_stops(
    checkpoints: str, pool: Pool, tmp_path: Path
) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), *checkpoints.split()]
    options += ["--train.epochs=6", "--ref.budget=7kb", "--ref.disk=12kb"]
    folder, shown = tmp_path / "run", []
    for turn in range(6):
        words = options if turn == 0 else []
        ending = Ending(stop_at=2) if turn % 2 else Ending(stop_at=3)
        found = pool.run(run, words, str(folder), resumed=turn > 0, ending=ending, world_size=2)
        shown.append(found[0].shown)
        for rank in range(2):
            files = (folder / f"rank-{rank}" / "references").glob("*.rows")
            assert 0 < sum(file.stat().st_size for file in files) <= 12_000
    assert "dropped" not in "".join(shown)


def test_each_rank_with_a_disk_of_its_own_resumes_from_it(pool: Pool, tmp_path: Path) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), "--checkpoint.every=4"]
    apart = {rank: str(tmp_path / f"machine-{rank}" / "run") for rank in range(2)}
    for rank in range(2):
        (tmp_path / f"machine-{rank}").mkdir()
    whole = str(tmp_path / "whole")
    pool.run(run, options, whole, world_size=2)
    pool.run(run, options, apart, ending=Ending(crash_after=6), world_size=2)
    for rank, folder in apart.items():
        assert [path.name for path in Path(folder).glob("rank-*")] == [f"rank-{rank}"]
        assert (Path(folder) / "config.toml").exists()
    found = pool.run(run, [], apart, resumed=True, world_size=2)
    assert "goes on after step 4" in found[0].shown
    assert records(Path(whole)) == records(Path(apart[0]))
    assert results(Path(whole)) == results(Path(apart[0]))


def flip(file: Path) -> None:
    """Change a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "cut": ("model.safetensors", lambda file: os.truncate(file, file.stat().st_size - 1)),
    "missing": ("optimizer.safetensors", Path.unlink),
    "flipped": ("link-0-forward-0-sender.safetensors", flip),
    "manifest": ("manifest.json", flip),
}


def test_a_damaged_part_is_named_and_the_checkpoint_before_it_is_taken(
    pool: Pool, tmp_path: Path
) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), "--checkpoint.every=2"]
    options += ["--link.transport=memory", "--pipeline.stages=2"]
    whole = tmp_path / "whole"
    pool.run(run, options, str(whole), ending=Ending(crash_after=5), world_size=1)
    for damage, (name, do) in DAMAGES.items():
        folder = tmp_path / damage
        shutil.copytree(whole, folder)
        do(folder / "rank-0" / "step-00000004" / name)
        ((_, shown),) = pool.run(loaded, [], str(folder), world_size=1)
        (line,) = (line for line in shown.splitlines() if "skipped" in line)
        assert line.startswith(f"resume: rank-0/step-00000004: {name} "), damage
        assert "goes on after step 2" in shown


def test_a_run_of_which_every_checkpoint_is_damaged_is_not_begun_anew(
    pool: Pool, tmp_path: Path
) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), "--checkpoint.every=2"]
    folder = tmp_path / "run"
    pool.run(run, options, str(folder), ending=Ending(crash_after=5), world_size=2)
    before = records(folder)
    for file in folder.glob("rank-1/*/model.safetensors"):
        file.write_bytes(b"")
    found = pool.run(run, [], str(folder), resumed=True, world_size=2)
    for one in found:
        assert "no checkpoint is complete on the machines of this run, though step 4 was" in one.how
    assert records(folder) == before


OTHERS = {
    "2 to 4": (2, 4, ["--nproc=4"], "written by 2 stages on 2 processes, now 4 on 4"),
    "4 to 2": (4, 2, ["--nproc=2"], "written by 4 stages on 4 processes, now 2 on 2"),
    "2 to 1": (2, 1, ["--link.transport=memory"], "written by 2 stages on 2 processes, now 2 on 1"),
    "1 stage a rank to 2": (2, 2, ["--pipeline.stages=4"], "now 4 on 2"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_stages_begin_with_the_same_weights_wherever_they_are(
    case: str, pool: Pool, tmp_path: Path
) -> None:
    before, after, others, line = OTHERS[case]
    options = [*TINY, "--data.path", text_in(tmp_path), "--model.tied=true"]
    folder = tmp_path / "run"
    pool.run(run, options, str(folder), ending=Ending(stop_at=5), world_size=before)
    for rank, (found, shown) in enumerate(pool.run(loaded, others, str(folder), world_size=after)):
        assert found.items() <= saved(folder).items(), f"rank {rank}"
        assert f"{line}: the links' counters begin anew and their references are dropped" in shown
        assert "goes on after step 5" in shown
    # each rank on a machine that has some of the parts, or none: the rest is sent
    machines = {rank: str(tmp_path / f"machine-{rank}") for rank in range(after)}
    for rank, machine in machines.items():
        Path(machine).mkdir()
        for name in ("config.toml", "run.json", "metrics.jsonl"):
            shutil.copy(folder / name, machine)
        for writer in range(rank, before, after):
            shutil.copytree(folder / f"rank-{writer}", Path(machine) / f"rank-{writer}")
    for found, _ in pool.run(loaded, others, machines, world_size=after):
        assert found.items() <= saved(folder).items()
    if case != "2 to 4":
        return
    found = pool.run(run, others, machines, resumed=True, world_size=after)
    assert {one.how for one in found} == {"complete"}, found
    steps = [record["step"] for record in records(Path(machines[0])) if "loss" in record]
    assert steps == list(range(1, len(steps) + 1))


def test_another_forward_scheme_drops_the_references_and_says_so(
    pool: Pool, tmp_path: Path
) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path)]
    folder = str(tmp_path / "run")
    pool.run(run, options, folder, ending=Ending(stop_at=5), world_size=2)
    words = ["--forward=delta(int2)"]
    found = pool.run(run, words, folder, resumed=True, world_size=2)
    assert found[0].how == "complete"
    (line,) = (line for line in found[0].shown.splitlines() if "dropped" in line)
    assert line == (
        "resume: references of forward 0→1 are dropped (they were of delta(int4), not of "
        "delta(int2)): samples are sent as first visits"
    )


def test_checkpoints_are_kept_and_found_where_they_should_be(pool: Pool, tmp_path: Path) -> None:
    memory = ["--data.path", text_in(tmp_path), "--link.transport=memory"]
    options = [*TINY, *memory, f"--checkpoint.dir={tmp_path / 'one'}"]
    first, second = tmp_path / "first", tmp_path / "second"
    pool.run(run, options, str(first), ending=Ending(stop_at=4), world_size=1)
    assert [path.name for path in (tmp_path / "one" / "rank-0").glob("s*")] == ["step-00000004"]
    assert not (first / "rank-0").exists()
    (found,) = pool.run(run, options, str(second), world_size=1)
    assert "holds checkpoints of another run in rank-0; name a new folder" in found.how
    (found,) = pool.run(
        run, [*TINY, *memory, f"--checkpoint.dir={__file__}"], str(tmp_path / "x"), world_size=1
    )
    assert "can't keep checkpoints in" in found.how
    words = [f"--checkpoint.dir={tmp_path / 'two'}"]
    (found,) = pool.run(
        run, words, str(first), resumed=True, ending=Ending(crash_after=1), world_size=1
    )
    assert "goes on after step 4" in found.shown
    (found,) = pool.run(run, [], str(first), resumed=True, world_size=1)
    assert "goes on after step 4" in found.shown  # though it is in neither folder of now
    assert [path.name for path in (tmp_path / "two" / "rank-0").glob("s*")] == ["step-00000009"]


def steps_of(folder: Path) -> list[int]:
    return list(disk.step_folders(folder))


def test_a_run_whose_checkpoints_move_to_another_folder_takes_its_rows_along(
    pool: Pool, tmp_path: Path
) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), "--checkpoint.every=2", "--ref.budget=7kb"]
    whole, cut, other = tmp_path / "whole", tmp_path / "cut", tmp_path / "other"
    pool.run(run, options, str(whole), world_size=2)
    pool.run(run, options, str(cut), ending=Ending(crash_after=5), world_size=2)
    words = [f"--checkpoint.dir={other}"]
    found = pool.run(run, words, str(cut), resumed=True, ending=Ending(crash_after=3), world_size=2)
    assert "dropped" not in found[0].shown
    assert steps_of(cut / "rank-0") == [4]  # after step 7, with step 6 in the other folder
    found = pool.run(run, [], str(cut), resumed=True, world_size=2)
    assert "dropped" not in found[0].shown
    assert (records(whole), results(whole)) == (records(cut), results(cut))
    assert digests(whole, ("model", "optimizer")) == digests(other, ("model", "optimizer"))
    for rank in range(2):
        assert steps_of(other / f"rank-{rank}") == [8, 9]
        assert not (cut / f"rank-{rank}").exists()


def test_on_fewer_ranks_the_checkpoint_before_stays_whole_as_long_as_it_may_be_needed(
    pool: Pool, tmp_path: Path
) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), "--checkpoint.every=2"]
    folder = tmp_path / "run"
    pool.run(run, options, str(folder), ending=Ending(crash_after=5), world_size=4)
    words = ["--nproc=2"]
    pool.run(run, words, str(folder), resumed=True, ending=Ending(crash_after=3), world_size=2)
    assert [steps_of(folder / f"rank-{rank}") for rank in range(4)] == [[4, 6], [4, 6], [4], [4]]
    for file in (folder / "rank-0" / "step-00000006").iterdir():
        file.write_bytes(b"")
    found = pool.run(run, [], str(folder), resumed=True, world_size=2)
    assert "goes on after step 4" in found[0].shown
    assert found[0].how == "complete"
    assert [steps_of(folder / f"rank-{rank}") for rank in range(2)] == [[8, 9], [8, 9]]
    assert not (folder / "rank-2").exists()
    assert not (folder / "rank-3").exists()
    # nor are there rows of the ends that rank 1 had of the link to a stage on rank 2
    rows = [rows.name for rows in (folder / "rank-1" / disk.REFERENCES).glob("*.rows")]
    assert {name.rpartition("-")[0] for name in rows} == {"0-forward-0-receiver"}


def test_other_ranks_in_between_leave_what_a_checkpoint_needs_on_disk(
    pool: Pool, tmp_path: Path
) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), "--train.epochs=6", "--checkpoint.every=4"]
    options += ["--ref.budget=7kb"]
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    pool.run(run, options, whole, world_size=2)
    pool.run(run, options, cut, ending=Ending(crash_after=5), world_size=2)
    words = ["--pipeline.stages=4", "--ref.budget=13kb", "--checkpoint.every=50"]
    ending = Ending(crash_after=6)
    found = pool.run(run, words, cut, resumed=True, ending=ending, world_size=4)
    assert "their references are dropped" in found[0].shown
    words = ["--pipeline.stages=2", "--ref.budget=7kb", "--checkpoint.every=4"]
    found = pool.run(run, words, cut, resumed=True, world_size=2)
    assert "goes on after step 4" in found[0].shown
    assert_equal_runs(Path(whole), Path(cut))


def test_a_checkpoint_in_the_folder_that_a_run_returns_to_stays_whole(
    pool: Pool, tmp_path: Path
) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), "--train.epochs=6", "--checkpoint.every=3"]
    options += ["--ref.budget=7kb"]
    whole, cut, away = str(tmp_path / "whole"), str(tmp_path / "cut"), tmp_path / "away"
    pool.run(run, options, whole, world_size=2)
    pool.run(run, options, cut, ending=Ending(crash_after=4), world_size=2)
    words = ["--checkpoint.dir", str(away), "--checkpoint.every=5"]
    ending = Ending(crash_after=4)
    pool.run(run, words, cut, resumed=True, ending=ending, world_size=2)
    words = ["--checkpoint.dir", cut, "--checkpoint.every=50"]
    found = pool.run(run, words, cut, resumed=True, ending=Ending(crash_after=7), world_size=2)
    assert "goes on after step 5" in found[0].shown
    for rank in range(2):
        flip(away / f"rank-{rank}" / "step-00000005" / "model.safetensors")
    found = pool.run(run, ["--checkpoint.every=3"], cut, resumed=True, world_size=2)
    assert "goes on after step 3" in found[0].shown
    assert_equal_runs(Path(whole), Path(cut))


def test_another_folder_and_another_budget_at_once_drop_nothing(pool: Pool, tmp_path: Path) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), "--ref.budget=7kb"]
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    pool.run(run, options, whole, world_size=2)
    pool.run(run, options, cut, ending=Ending(stop_at=4), world_size=2)
    words = ["--ref.budget=none", "--checkpoint.dir", str(tmp_path / "away")]
    found = pool.run(run, words, cut, resumed=True, world_size=2)
    assert "dropped" not in found[0].shown
    assert records(Path(whole)) == records(Path(cut))
    assert results(Path(whole)) == results(Path(cut))


def test_a_damaged_checkpoint_is_none_of_the_two_that_are_kept(pool: Pool, tmp_path: Path) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), "--checkpoint.every=3"]
    folder = tmp_path / "run"
    pool.run(run, options, str(folder), ending=Ending(crash_after=7), world_size=2)
    for rank in range(2):
        flip(folder / f"rank-{rank}" / "step-00000006" / "model.safetensors")
    words = ["--checkpoint.every=1"]
    ending = Ending(crash_after=2)
    found = pool.run(run, words, str(folder), resumed=True, ending=ending, world_size=2)
    assert "goes on after step 3" in found[0].shown
    assert [steps_of(folder / f"rank-{rank}") for rank in range(2)] == [[4, 5], [4, 5]]


def on_a_full_disk(rank: int, world_size: int, options: list[str], folder: str) -> str:
    """How a run ends where rank 1 cannot write its second checkpoint."""
    write = disk.write

    def fails(ranks_own: Path, step: int, fill: Any) -> disk.Part:
        if step == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(ranks_own, step, fill)

    disk.write = fails if rank == 1 else write
    try:
        return run(rank, world_size, options, folder).how
    except (OSError, tw.LinkError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        disk.write = write


def test_a_full_disk_ends_the_run_on_all_ranks_and_the_checkpoint_before_is_left(
    pool: Pool, tmp_path: Path
) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), "--checkpoint.every=2"]
    folder = str(tmp_path / "run")
    first, second = pool.run(on_a_full_disk, options, folder, world_size=2)
    assert second.startswith("OSError: can't write the checkpoint of step 4 to ")
    assert second.endswith("No space left on device")
    assert first == f"LinkError: rank 1: {second.removeprefix('OSError: ')}"
    found = pool.run(loaded, [], folder, world_size=2)
    assert "goes on after step 2" in found[0][1]


REFUSED = {
    "another model": (["--model.dim=32"], "--model.dim can't change in a resumed run"),
    "another batch": (["--train.batch=4"], "--train.batch can't change in a resumed run"),
    "a folder": (["--out=other"], "--out doesn't go with --resume"),
    "fewer steps": (["--train.steps=3"], "3 steps are fewer than its 9"),
    "nothing left": ([], "is complete: all 9 steps are done; raise --train.epochs"),
}


def test_what_would_change_the_run_is_refused_and_longer_training_is_not(
    pool: Pool, tmp_path: Path
) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), "--link.transport=memory"]
    folder = tmp_path / "run"
    pool.run(run, options, str(folder), world_size=1)
    for words, message in REFUSED.values():
        (found,) = pool.run(run, words, str(folder), resumed=True, world_size=1)
        assert message in found.how
        assert "\n" not in found.how
    (found,) = pool.run(run, ["--train.epochs=4"], str(folder), resumed=True, world_size=1)
    assert found.how == "complete"
    assert "note: 12 steps instead of 9" in found.shown
    assert "the checkpoint holds none" in found.shown
    assert json.loads((folder / "summary.json").read_text())["steps"] == 12
    Path(options[options.index("--data.path") + 1]).write_text("other words " * 100)
    (found,) = pool.run(run, ["--train.epochs=5"], str(folder), resumed=True, world_size=1)
    assert "the text is not the one that it was trained on" in found.how
