"""``Pipeline.restore`` goes on from what ``Pipeline.checkpoint`` wrote, or says why it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import thinwire as tw
from tests.distributed.pool import Pool
from tests.distributed.setup import Case, barrier, batch, build
from tests.distributed.test_frozen import Trainer

pytestmark = pytest.mark.timeout(100)


def change_a_reference(file: Path) -> None:
    tensors = load_file(file)
    tensors["rows"][0] ^= 1
    save_file(tensors, file)


def forget_a_sample(file: Path) -> None:
    tensors = load_file(file)
    row = len(tensors["rows"]) // len(tensors["keys"])
    columns = {n: t[1:].clone() for n, t in tensors.items() if n not in ("rows", "clock")}
    save_file({**tensors, **columns, "rows": tensors["rows"][row:].clone()}, file)


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "changed": (change_a_reference, ""),
    "one forgotten": (forget_a_sample, "references of forward 0→1 are dropped (1 of "),
    "gone": (Path.unlink, "references of forward 0→1 are dropped ("),
    "no tensors": (lambda file: file.write_bytes(b"7" * 99), "references of forward 0→1 are "),
    "nothing of ours": (lambda file: save_file({}, file), "references of forward 0→1 are dropped"),
}


def differing(rank: int, world_size: int, folder: str, harm: str, room: int | None) -> list[str]:
    """The lines of a pipeline of which one end's references were harmed."""
    case = Case(forward="delta(int4)")
    stages, schedule, _ = build(rank, world_size, case)
    plan = tw.Plan("delta(int4)", "int8")
    pipeline = tw.Pipeline(schedule, stages, plan, deadline=20, references=tw.Storage(room))
    ids, x, y = batch(0)
    for _ in range(2):
        pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
    own = Path(folder, str(rank))
    own.mkdir()
    saved = pipeline.checkpoint(own)
    if rank == 1:
        (file,) = own.iterdir()
        HARMS[harm][0](file)
    lines = pipeline.restore(own, saved)
    pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
    digests = pipeline.state_digests()
    barrier()  # a rank that is done first would close the other's connection
    pipeline.close()
    return [*lines, str(digests[f"edge 0 forward 0 {'receiver' if rank else 'sender'}"])]


@pytest.mark.parametrize("room", [None, 10_000])
@pytest.mark.parametrize("harm", HARMS)
def test_ends_whose_references_differ_both_drop_them(
    harm: str, room: int | None, pool: Pool, tmp_path: Path
) -> None:
    reason = HARMS[harm][1]
    first, second = pool.run(differing, str(tmp_path), harm, room, world_size=2)
    assert first == second
    *reasons, line, _ = first
    assert line == "references that differ at the two ends of a link are dropped"
    assert [found.startswith(reason) for found in reasons] == ([True] if reason else [])


def two_of_a_name(rank: int, world_size: int, folder: str) -> list[Any]:
    """How many samples had to be repaired after going on from the later of two checkpoints."""
    storage = tw.Storage(folder=Path(folder, "rows"))
    case = Case(forward="delta(int4)", num_stages=2, transport="memory")

    def make() -> tw.Pipeline:
        stages, schedule, _ = build(rank, world_size, case)
        plan = tw.Plan("delta(int4)", "int8")
        return tw.Pipeline(
            schedule, stages, plan, transport=tw.MemoryTransport(), references=storage
        )

    ids, x, y = batch(0)
    pipeline = make()
    for step in ("first", "second", "third"):
        pipeline.step(x, target=y, sample_ids=ids)
        own = Path(folder, step, "references")
        own.mkdir(parents=True)
        if step != "third":
            saved, where = pipeline.checkpoint(own), own
    pipeline.release(Path(folder, "first", "references"))
    for _ in range(3):
        pipeline.step(x, target=y, sample_ids=ids)
        pipeline.checkpoint(own)
    pipeline.close()
    pipeline = make()
    lines = pipeline.restore(where, saved)
    pipeline.step(x, target=y, sample_ids=ids)
    lost = sum(one["lost"] for one in pipeline.reference_reports())
    pipeline.close()
    return [*lines, lost]


def test_checkpoints_in_folders_of_the_same_name_are_released_apart(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool.run(two_of_a_name, str(tmp_path), world_size=1) == [[0]]


# Frozen stages.

FROZEN = Case("1F1B", 4, forward="delta(int4)", backward="int8", frozen=2)


def write_to(module: torch.nn.Module) -> None:
    with torch.no_grad():
        next(module.parameters()).add_(1)


def resumed_frozen(rank: int, world_size: int, folder: str, harm: str) -> Any:
    """The lines of a second pipeline, and which of its stages ran for samples that were seen."""
    own = str(Path(folder, str(rank)))
    first = Trainer(rank, world_size, FROZEN)
    first.step(range(8))
    saved = first.pipeline.checkpoint(own)
    first.found()
    if harm == "no hashes" and rank == 0:
        save_file({}, Path(own, "frozen.safetensors"))
    second = Trainer(rank, world_size, FROZEN)
    for index, module in second.modules.items():
        module.stage.load_state_dict(first.modules[index].stage.state_dict())
    if harm == "other weights" and rank == 1:
        write_to(second.modules[1])
    lines = second.pipeline.restore(own, saved)
    if harm == "other weights later" and rank == 1:
        write_to(second.modules[1])
    second.step(range(8))
    return lines, second.found().calls[rank]


def test_after_a_checkpoint_frozen_stages_rest_as_before_it(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(resumed_frozen, str(tmp_path), "", world_size=4)
    assert found == [([], [0]), ([], [0]), ([], [4]), ([], [4])]


def test_samples_whose_inputs_cannot_be_read_run_once_more(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(resumed_frozen, str(tmp_path), "no hashes", world_size=4)
    assert [calls for _, calls in found] == [[4]] * 4
    for (line,), _ in found:
        assert line.startswith("samples run through frozen stages once more (")
        assert "frozen.safetensors: it does not have a hash for each sample" in line


@pytest.mark.parametrize("harm", ["other weights", "other weights later"])
def test_a_frozen_stage_with_other_weights_than_in_the_checkpoint_is_refused(
    pool: Pool, tmp_path: Path, harm: str
) -> None:
    found = pool.run(resumed_frozen, str(tmp_path), harm, world_size=4, raises=False)
    for error in found:
        assert "stage 1 is frozen, and its weights are not those of the checkpoint" in error.message
        assert "load them" in error.message


# What is no checkpoint.


def restored_from(rank: int, world_size: int, folder: str, junk: Any) -> None:
    stages, schedule, _ = build(rank, world_size, Case(forward="delta(int4)"))
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("delta(int4)", "int8"), deadline=20)
    saved = pipeline.checkpoint(Path(folder, str(rank)))
    try:
        pipeline.restore(folder, {**saved, **junk} if isinstance(junk, dict) else junk)
    finally:
        pipeline.close()


@pytest.mark.parametrize(
    ("junk", "what"),
    [
        (None, "all of it"),
        ([], "all of it"),
        ({"step": -1}, "step"),
        ({"counters": [{}]}, "counters"),
        ({"references": {}}, "references"),
        ({"frozen": {"broken": True, "weights": {}, "inputs": 0}}, "frozen.broken"),
    ],
)
def test_what_no_checkpoint_returns_is_refused(
    pool: Pool, tmp_path: Path, junk: Any, what: str
) -> None:
    found = pool.run(restored_from, str(tmp_path), junk, world_size=2, raises=False)
    for error in found:
        assert f"no state of a pipeline: {what} is not what checkpoint returns" in error.message
    assert "ValueError" in {error.type_name for error in found}
