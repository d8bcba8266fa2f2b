"""What both ends of a link remember: bounded, on disk, lost, and agreed on without a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.distributed.pool import Pool
from tests.distributed.setup import (
    BATCH,
    DIM,
    LENGTH,
    SAMPLES,
    Case,
    Outcome,
    batch,
    build,
    merged,
    parameter_hash,
)
from thinwire.codecs.keeping import KEEPINGS
from thinwire.store.slots import slot_size

ROW = KEEPINGS["int8"].nbytes(LENGTH * DIM)
SLOT = slot_size(ROW)
EPOCH = SAMPLES // BATCH


def epoch_batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batches of epochs in which each sample comes once."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step // EPOCH))
    ids = order[step % EPOCH * BATCH :][:BATCH]
    tokens = torch.stack([_tokens(int(i)) for i in ids])
    return ids, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _tokens(sample: int) -> torch.Tensor:
    return torch.randint(40, (LENGTH + 1,), generator=torch.Generator().manual_seed(sample))


def run(
    rank: int,
    world_size: int,
    case: Case,
    folder: str | None = None,
    ram: list[int | None] | None = None,
    disk: int | None = None,
    announce: bool = True,
    harm: Any = None,
    ragged: bool = False,
) -> tuple[Outcome, dict[str, Any]]:
    """Train over epochs; ``harm(rank, step, pipeline)`` comes between steps."""
    stages, schedule, _ = build(rank, world_size, case)
    transport = tw.MemoryTransport() if case.transport == "memory" else None
    storage = tw.Storage(
        None if ram is None else ram[rank],
        None if folder is None else Path(folder, str(rank)),
        disk,
    )
    plan = tw.Plan(case.forward, case.backward)
    pipeline = tw.Pipeline(
        schedule, stages, plan, transport=transport, deadline=20, references=storage
    )
    parameters = [p for s in stages for p in s.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=case.lr)
    losses = []
    first = any(s.is_first for s in stages)
    for step in range(case.steps):
        ids, x, y = epoch_batch(step)
        following = epoch_batch(step + 1)[0] if announce else None
        result = pipeline.step(
            *((x,) if first else ()),
            target=y,
            sample_ids=ids,
            lengths=1 + ids % LENGTH if ragged else None,
            next_sample_ids=following,
        )
        losses.append(result.loss)
        optimizer.step()
        optimizer.zero_grad()
        if harm is not None:
            harm(rank, step, pipeline)
    links = pipeline.link_reports()
    facts = {
        "repairs": pipeline._remembered.repairs,
        "held": {name: len(store) for name, store in pipeline._remembered.stores},
        "nbytes": {name: store.nbytes for name, store in pipeline._remembered.stores},
        "disk": sum(f.stat().st_size for f in storage.folder.glob("*.rows"))
        if storage.folder
        else 0,
        "late": sum(s.tier.traffic.late for _, s in pipeline._remembered.stores if s.tier),
    }
    outcome = Outcome(
        losses,
        {s.stage_index: parameter_hash(s.submod) for s in stages},
        links,
        pipeline.state_digests(),
    )
    pipeline.close()
    return outcome, facts


def digests_agree(outcomes: list[Outcome]) -> bool:
    """Whether both ends of each link hold the same."""
    found: dict[str, set[int]] = {}
    for outcome in outcomes:
        for name, digest in outcome.digests.items():
            found.setdefault(name.rsplit(" ", 1)[0], set()).add(digest)
    return all(len(digests) == 1 for digests in found.values())


CASE = Case(forward="delta(int4)", backward="int8", steps=4 * EPOCH)


@pytest.mark.parametrize("ref", ["fp32", "bf16", "int8", "int4"])
def test_a_disk_changes_nothing_but_where_references_lie(
    pool: Pool, tmp_path: Path, ref: str
) -> None:
    case = Case(forward=f"delta(int4,ref={ref})", backward="int8", steps=3 * EPOCH)
    plain = pool.run(run, case, world_size=2)
    ram = 3 * BATCH * KEEPINGS[ref].nbytes(LENGTH * DIM)
    tiered = pool.run(run, case, str(tmp_path), [ram, None], world_size=2)
    assert [o.losses for o, _ in tiered] == [o.losses for o, _ in plain]
    assert merged([o for o, _ in tiered]) == merged([o for o, _ in plain])
    assert [o.digests for o, _ in tiered] == [o.digests for o, _ in plain]
    assert [f["late"] for _, f in tiered] == [0, 0]


def test_four_ranks_with_different_rooms_hold_the_same_within_the_smallest(
    pool: Pool, tmp_path: Path
) -> None:
    case = Case(forward="delta(int4)", backward="int8", num_stages=4, steps=4 * EPOCH)
    ram = [10 * SLOT, 24 * SLOT, 40 * SLOT, None]
    found = pool.run(run, case, None, ram, world_size=4)
    outcomes = [o for o, _ in found]
    assert digests_agree(outcomes)
    held = {name: count for _, f in found for name, count in f["held"].items()}
    # ranks 1 and 2 have two links each, ranks 0 and 3 one
    expected = {0: 10, 1: 12, 2: 20}
    for name, count in held.items():
        assert count == expected[int(name.split()[1])], name
    for link in outcomes[0].links:
        if link["direction"] == "forward":
            values = {k: v["values"] // (LENGTH * DIM) for k, v in link["kinds"].items()}
            kept = expected[link["edge"]]
            # members come again as changes in each of three epochs, the others as plain values
            assert values.get("change", 0) + values.get("reseed", 0) == 3 * kept
            assert values["first"] == kept
            assert values["value"] == 4 * (SAMPLES - kept)


def test_the_budgets_on_disk_is_kept(pool: Pool, tmp_path: Path) -> None:
    ram = 3 * BATCH * ROW
    found = pool.run(run, CASE, str(tmp_path), [ram, ram], 16 * SLOT, world_size=2)
    assert digests_agree([o for o, _ in found])
    assert all(held == 16 for _, f in found for held in f["held"].values())
    assert all(f["disk"] <= 16 * SLOT for _, f in found)


def save_often(rank: int, step: int, pipeline: tw.Pipeline) -> None:
    """Pins more slots than the disk has room for, and sees that its files keep to that."""
    folder = pipeline._remembered.storage.folder
    assert folder is not None
    pipeline.checkpoint(folder / f"step-{step}")
    if step >= 2:
        pipeline.release(folder / f"step-{step - 2}")
    assert sum(file.stat().st_size for file in folder.glob("*.rows")) <= 16 * SLOT


def test_checkpoints_and_rows_of_all_lengths_cost_first_visits_not_the_budget(
    pool: Pool, tmp_path: Path
) -> None:
    ram = 3 * BATCH * ROW
    case = Case(forward="delta(int4)", backward="int8", steps=6 * EPOCH)
    arguments = (case, str(tmp_path), [ram, 2 * ram], 16 * SLOT, True, save_often, True)
    found = pool.run(run, *arguments, world_size=2)
    assert digests_agree([o for o, _ in found])
    assert any(f["repairs"] > 0 for _, f in found)


def test_too_little_ram_for_the_steps_under_way_is_the_same_error_everywhere(
    pool: Pool, tmp_path: Path
) -> None:
    found = pool.run(run, CASE, str(tmp_path), [ROW, None], world_size=2, raises=False)
    for error in found:
        assert error.type_name == "ValueError"
        assert "rank 0: " in error.message
        assert "too few" in error.message


def lose(rank: int, step: int, pipeline: tw.Pipeline) -> None:
    """One end forgets some samples, as if it had been restarted, while nobody has agreed."""
    if step == 2 * EPOCH - 1 and rank == 1:
        for _, store in pipeline._remembered.stores:
            store.drop([0, 5, 17])


def lose_all(rank: int, step: int, pipeline: tw.Pipeline) -> None:
    if step == 2 * EPOCH - 1 and rank == 0:
        for _, store in pipeline._remembered.stores:
            store.drop(list(store.lengths))


@pytest.mark.parametrize(("harm", "lost"), [(lose, 3), (lose_all, SAMPLES)])
def test_an_end_that_has_lost_samples_gets_them_anew(pool: Pool, harm: Any, lost: int) -> None:
    found = pool.run(run, CASE, announce=False, harm=harm, world_size=2)
    assert digests_agree([o for o, _ in found])
    link = next(k for k in found[0][0].links if k["direction"] == "forward")
    assert link["kinds"]["repair"]["values"] == lost * LENGTH * DIM
    assert all(facts["repairs"] == lost for _, facts in found)


def damage(rank: int, step: int, pipeline: tw.Pipeline) -> None:
    """Bytes of one end's disk turn over."""
    if step == 2 * EPOCH and rank == 1:
        for _, store in pipeline._remembered.stores:
            assert store.tier is not None
            store.tier.written(wait=True)
            for held in store.everyone:
                if held.row is None:
                    assert held.slot is not None
                    store.tier.files.write(held.slot, memoryview(b"\xff" * ROW))


def test_rows_damaged_on_disk_are_found_before_they_are_needed_and_sent_anew(
    pool: Pool, tmp_path: Path
) -> None:
    ram = 3 * BATCH * ROW
    found = pool.run(run, CASE, str(tmp_path), [ram, ram], harm=damage, world_size=2)
    assert digests_agree([o for o, _ in found])
    link = next(k for k in found[0][0].links if k["direction"] == "forward")
    assert link["kinds"]["repair"]["values"] > 0
    assert found[0][1]["repairs"] == found[1][1]["repairs"] > 0


def flip(rank: int, step: int, pipeline: tw.Pipeline) -> None:
    """A bit of RAM flips: versions agree, contents do not."""
    if step == 2 and rank == 1:
        for _, store in pipeline._remembered.stores:
            row = store.rows([sorted(store.lengths)[0]])[0]
            row.view(torch.uint8)[-1] ^= 1


def test_a_periodic_digest_finds_contents_that_differ(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(forward="delta(int4)", backward="int8", steps=110)
    found = pool.run(run, case, harm=flip, world_size=2)
    assert digests_agree([o for o, _ in found])
    assert found[0][1]["repairs"] >= 1


def flip_all(rank: int, step: int, pipeline: tw.Pipeline) -> None:
    if step == 97 and rank == 1:
        for _, store in pipeline._remembered.stores:
            for row in store.rows(list(store.lengths)):
                row.view(torch.uint8)[-1] ^= 1


def test_what_many_links_hold_otherwise_can_be_told(pool: Pool) -> None:
    both = "delta(int4)"
    case = Case(forward=both, backward=both, num_stages=20, steps=102)
    found = pool.run(run, case, harm=flip_all, world_size=2)
    assert digests_agree([o for o, _ in found])
    assert found[0][1]["repairs"] > 38 * SAMPLES // 2


WRONG: dict[str, Any] = {
    "ram": -1,
    "disk": 2.5,
    "copies": 0,
    "folder": 7,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_storage_that_makes_no_sense_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}="):
        tw.Storage(**{name: WRONG[name]})


def test_a_storage_may_have_its_folder_as_text() -> None:
    assert tw.Storage(folder="rows").folder == Path("rows")  # type: ignore[arg-type]


def in_one_folder(rank: int, world_size: int, folder: str) -> None:
    stages, schedule, _ = build(rank, world_size, Case(forward="delta(int4)"))
    tw.Pipeline(
        schedule, stages, tw.Plan("delta(int4)"), references=tw.Storage(folder=Path(folder))
    )


def test_two_ranks_with_one_folder_are_refused(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(in_one_folder, str(tmp_path), world_size=2, raises=False)
    for error in found:
        assert error.type_name == "ValueError"
        assert f"{tmp_path} is in use: each rank of each pipeline needs a folder" in error.message


def test_both_ends_in_one_process_agree_too(pool: Pool, tmp_path: Path) -> None:
    case = Case(
        forward="delta(int4)", backward="int8", num_stages=2, transport="memory", steps=3 * EPOCH
    )
    two = pool.run(run, Case(forward="delta(int4)", backward="int8", steps=3 * EPOCH), world_size=2)
    one = pool.run(run, case, str(tmp_path), [2 * 3 * BATCH * ROW], world_size=1)
    assert one[0][0].losses == two[0][0].losses
    assert one[0][1]["late"] == 0


def augmented(rank: int, world_size: int) -> Any:
    """The same samples with two augmentation seeds."""
    stages, schedule, _ = build(rank, world_size, Case())
    pipeline = tw.Pipeline(schedule, stages, tw.Plan("delta(int4)", "int8"), deadline=20)
    ids, x, y = batch(0)
    for seed in (1, 2, 1):
        pairs = torch.stack([ids, torch.full_like(ids, seed)], 1)
        pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=pairs)
    kinds = pipeline.link_reports()[0]["kinds"]
    return {k: v["values"] // (LENGTH * DIM) for k, v in kinds.items()}


def test_a_sample_augmented_otherwise_is_another_sample(pool: Pool) -> None:
    assert pool.run(augmented, world_size=2)[0] == {"first": 2 * BATCH, "change": BATCH}
