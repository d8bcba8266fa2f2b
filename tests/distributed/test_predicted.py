"""Predictions between processes: learned alike, compared, and learned anew where they are not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.distributed import setup
from tests.distributed.pool import Pool
from tests.distributed.setup import Case, build
from thinwire.pipeline import learned
from thinwire.predict import fit

SPEC = "predicted(int4,by=token)"


@dataclasses.dataclass(frozen=True)
class Found:
    losses: list[float]
    kinds: list[list[str]]
    digests: dict[str, int]
    lines: list[str]
    repairs: int


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    _, tokens, targets = setup.batch(number)
    return tokens, targets, {"token": tokens, "target": targets}


def pipeline_of(rank: int, world_size: int, plan: tw.Plan) -> tw.Pipeline:
    """A stage on each rank."""
    made, schedule, _ = build(rank, world_size, Case("1F1B", world_size))
    return tw.Pipeline(schedule, made, plan, deadline=20)


def train(
    rank: int,
    world_size: int,
    steps: int = 6,
    folder: str | None = None,
    spoil: str = "",
    context_of: int = 0,
    every: int = 100,
) -> Found:
    """Some steps; with ``folder`` a checkpoint after them is restored by another pipeline, which
    goes on. ``spoil``: what is done to rank 0's state before."""
    vars(learned)["COMPARE_EVERY"] = every
    case = Case("1F1B", world_size)
    made, schedule, _ = build(rank, world_size, case)
    pipeline = tw.Pipeline(schedule, made, tw.Plan(SPEC, SPEC), deadline=20)
    losses = []

    def go(first: int) -> None:
        for number in range(first, first + steps):
            x, y, context = batch(number)
            if rank == 1 and context_of:
                context = batch(number + context_of)[2]
            inputs = (x,) if rank == 0 else ()
            losses.append(pipeline.step(*inputs, target=y, context=context).loss)

    go(0)
    lines: list[str] = []
    if folder is not None:
        mine = Path(folder) / str(rank)
        saved = pipeline.checkpoint(mine)
        if spoil == "file" and rank == 0:
            next(mine.glob("learned-*")).write_bytes(b"nothing")
        if spoil == "other" and rank == 0:
            for file in mine.glob("learned-0-forward-*"):
                file.write_bytes((Path(folder) / "other").read_bytes())
        lines = pipeline.restore(mine, saved)
    if spoil == "state" and rank == 0:
        pipeline._learned._held[0].state.values.tables._tables[0]._sums += 1
    go(steps)
    links = [link for link in pipeline.link_reports() if link["direction"] != "control"]
    found = Found(
        losses,
        [sorted(link["kinds"]) for link in links],
        pipeline.state_digests(),
        lines,
        pipeline._learned.repairs,
    )
    pipeline.close()
    return found


def test_both_ends_learn_the_same(pool: Pool) -> None:
    one, other = pool.run(train, world_size=2)
    assert one.losses == other.losses
    assert one.kinds == [["value"], ["value"]]
    for link in ("edge 0 forward 0", "edge 0 backward 0"):
        ends = [v for found in (one, other) for k, v in found.digests.items() if k.startswith(link)]
        assert len(ends) == 2
        assert len(set(ends)) == 1


def test_a_checkpoint_has_what_was_learned(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(train, world_size=2)
    cut = pool.run(train, folder=str(tmp_path), world_size=2)
    assert [one.losses for one in cut] == [one.losses for one in whole]
    assert [one.digests for one in cut] == [one.digests for one in whole]
    assert not cut[0].lines


def test_what_cannot_be_read_is_learned_anew_by_both(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(train, folder=str(tmp_path), spoil="file", world_size=2)
    assert any("is learned anew" in line for line in found[0].lines)
    assert found[0].lines == found[1].lines
    ends = [v for one in found for k, v in one.digests.items() if k.startswith("edge 0 forward")]
    assert len(set(ends)) == 1


def test_ends_that_differ_are_found_and_begin_anew(pool: Pool) -> None:
    found = pool.run(train, spoil="state", every=8, world_size=2)
    assert [one.repairs for one in found] == [1, 1]
    assert found[0].losses == found[1].losses
    ends = [v for one in found for k, v in one.digests.items() if "0 0" in k or "d 0" in k]
    assert len(set(ends)) <= 2


def test_ranks_that_are_given_other_contexts_are_told(pool: Pool) -> None:
    for error in pool.run(train, context_of=3, world_size=2, raises=False):
        assert error.type_name == "ValueError"
        assert "rank 1 was given another context than the first stage's rank" in error.message


def cut_short(rank: int, world_size: int) -> float:
    """A step whose context has too few positions, then one that is right; its loss."""
    pipeline = pipeline_of(rank, world_size, tw.Plan(SPEC, SPEC))
    x, y, context = batch(0)
    inputs = (x,) if rank == 0 else ()
    with pytest.raises(
        ValueError, match=r"context of \['token'\] at edge 0: source Token: ids must be int64"
    ):
        pipeline.step(*inputs, target=y, context={"token": x[:, :5]})
    loss = pipeline.step(*inputs, target=y, context=context).loss
    pipeline.close()
    return loss


def test_a_context_of_other_positions_is_refused_before_anything_is_sent(pool: Pool) -> None:
    one, other = pool.run(cut_short, world_size=2)
    assert one == other


class InPlace(torch.nn.Module):
    """A stage that hides some of its tokens where they stand."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, ::3] = 0
        y: torch.Tensor = self.inner(x.clone())
        return y


def hiding(rank: int, world_size: int) -> dict[str, int]:
    made, schedule, _ = build(rank, world_size, Case("1F1B", world_size))
    if rank == 0:
        made[0].submod = InPlace(made[0].submod)
    pipeline = tw.Pipeline(schedule, made, tw.Plan(SPEC, SPEC), deadline=20)
    for number in range(4):
        x, y, _ = batch(number)
        pipeline.step(*((x,) if rank == 0 else ()), target=y, context={"token": x})
    found = pipeline.state_digests()
    pipeline.close()
    return found


def test_what_becomes_of_the_tokens_is_no_matter(pool: Pool) -> None:
    one, other = pool.run(hiding, world_size=2)
    for name, digest in one.items():
        there = name.replace("sender", "receiver") if "sender" in name else name[:-8] + "sender"
        assert other[there] == digest


def of_one_rank(rank: int, world_size: int) -> float:
    """A context of an evaluation that the first stage's rank has not, then one that all have."""
    pipeline = pipeline_of(rank, world_size, tw.Plan(SPEC, SPEC))
    for number in range(3):
        x, y, context = batch(number)
        inputs = (x,) if rank == 0 else ()
        pipeline.step(*inputs, target=y, context=context)
    with pytest.raises(ValueError, match="rank 1 was given another context"):
        pipeline.eval(*inputs, target=y, context=context if rank == 1 else None)
    loss = pipeline.eval(*inputs, target=y, context=context).loss
    pipeline.close()
    return loss


def test_a_context_of_another_rank_alone_is_refused(pool: Pool) -> None:
    one, other = pool.run(of_one_rank, world_size=2)
    assert one == other


def without_a_map(rank: int, world_size: int, forward: str) -> list[float]:
    """Gradients by activations of which not both ends hold what travelled."""
    plan = tw.Plan(forward, "predicted(int4,by=token+activation)")
    pipeline = pipeline_of(rank, world_size, plan)
    losses = []
    for number in range(12):
        ids, x, y = setup.batch(number % 3)
        inputs, known = ((x,) if rank == 0 else ()), {"token": x}
        losses.append(pipeline.step(*inputs, target=y, sample_ids=ids, context=known).loss)
    pipeline.close()
    return losses


@pytest.mark.parametrize("forward", ["ef(topk:0.1)", "efmixed(topk:0.2)", "ef(int4)"])
def test_what_one_end_alone_holds_predicts_nothing(forward: str, pool: Pool) -> None:
    one, other = pool.run(without_a_map, forward, world_size=2)
    assert one == other


def without(rank: int, world_size: int, context: Any, why: str) -> None:
    made, schedule, _ = build(rank, world_size, Case("1F1B", world_size))
    pipeline = tw.Pipeline(schedule, made, tw.Plan("raw", SPEC), deadline=20)
    x, y, _ = batch(0)
    with pytest.raises(ValueError, match=re.escape(why)):
        pipeline.step(*((x,) if rank == 0 else ()), target=y, context=context)
    setup.barrier()
    pipeline.close()


@pytest.mark.parametrize(
    ("context", "why"),
    [
        (None, "plan raw / predicted(int4,by=token) needs context with token"),
        ({"token": torch.zeros(8)}, "must be int64 of shape (8,) or (8, positions)"),
        ({"token": torch.zeros(7, dtype=torch.int64)}, "not torch.int64 of shape (7,)"),
        ([1], "context must be a dictionary of tensors, not a list"),
    ],
)
def test_a_context_that_does_not_fit_is_one_line(context: Any, why: str, pool: Pool) -> None:
    pool.run(without, context, why, world_size=2)


def both_ways(rank: int, world_size: int, steps: int) -> Found:
    """Changes and gradients by maps, over samples that come again; the last step is measured."""
    vars(fit)["_SHARE"] = 0
    made, schedule, _ = build(rank, world_size, Case("1F1B", world_size))
    plan = tw.Plan("delta(int2,first=int4,by=token+drift)", "predicted(int3,by=token+activation)")
    pipeline = tw.Pipeline(schedule, made, plan, deadline=20)
    losses = []
    for number in range(steps):
        ids, x, y = setup.batch(number % 4)
        result = pipeline.step(
            *((x,) if rank == 0 else ()),
            target=y,
            sample_ids=ids,
            context={"token": x},
            measure=number == steps - 1,
        )
        losses.append(result.loss)
    told = [sorted(one["gain_db"]) for one in pipeline.fidelity_reports()]
    links = [link for link in pipeline.link_reports() if link["direction"] != "control"]
    assert [sorted(link["gain_db"]) for link in links] == told
    kinds = [sorted(link["kinds"]) for link in links]
    found = Found(losses, kinds + told, pipeline.state_digests(), [], pipeline._learned.repairs)
    pipeline.close()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_both_directions_are_predicted_by_maps(pool: Pool, world_size: int) -> None:
    everyone = pool.run(both_ways, 40, world_size=world_size)
    links = 2 * (world_size - 1)
    for one in everyone:
        assert one.losses == everyone[0].losses
        assert one.kinds[0] == ["change", "first", "map"]
        assert one.kinds[links // 2] == ["map", "value"]
        assert one.kinds[links:] in (
            [["change"]] * (links // 2) + [["value"]] * (links // 2),
            [["change"], ["value"]] * (links // 2),
        )
    ends: dict[str, set[int]] = {}
    for one in everyone:
        for name, digest in one.digests.items():
            ends.setdefault(name.rsplit(" ", 1)[0], set()).add(digest)
    assert len(ends) >= links
    assert all(len(digests) == 1 for digests in ends.values()), ends


def evaluated(rank: int, world_size: int) -> tuple[list[float], list[dict[str, int]], list[Any]]:
    """Losses exact, by the codec alone, by tables, twice; digests before and after; kinds."""
    made, schedule, _ = build(rank, world_size, Case("1F1B", world_size))
    plan = tw.Plan("predicted(int2,by=token+position)", "int8")
    pipeline = tw.Pipeline(schedule, made, plan, deadline=20)
    for number in range(12):
        x, y, context = batch(number)
        pipeline.step(*((x,) if rank == 0 else ()), target=y, context=context)
    x, y, context = batch(12)
    inputs, digests = ((x,) if rank == 0 else ()), [pipeline.state_digests()]
    losses = [
        pipeline.eval(*inputs, target=y, codec=codec, context=context if known else None).loss
        for codec, known in ((False, False), (True, False), (True, True), (True, True))
    ]
    digests.append(pipeline.state_digests())
    with pytest.raises(ValueError, match="needs context with token"):
        pipeline.eval(*inputs, target=y, context={})
    links = [link for link in pipeline.link_reports() if link["direction"] == "forward"]
    counted = [(link["evaluation_messages"], link["evaluation_bytes"]) for link in links]
    x, y, context = batch(13)
    losses.append(pipeline.step(*inputs, target=y, context=context).loss)
    pipeline.close()
    return losses, digests, counted


def test_evaluation_predicts_and_learns_nothing(pool: Pool) -> None:
    found = pool.run(evaluated, world_size=2)
    for losses, digests, _ in found:
        exact, plain, by_tables, again, _ = losses
        assert by_tables == again
        assert len({exact, plain, by_tables}) == 3
        assert digests[0] == digests[1]
    assert found[0][0] == found[1][0]


def adopted(rank: int, world_size: int, folder: str, scheme: str) -> tuple[list[str], float, float]:
    """What a pipeline that only evaluates says where it is to expect what another had learned,
    which was of ``scheme``, and its loss; the other's."""
    plan = tw.Plan("delta(int2,first=int2,by=token+drift)", "raw")
    made, schedule, _ = build(rank, world_size, Case("1F1B", world_size))
    pipeline = tw.Pipeline(schedule, made, plan, deadline=20)
    for number in range(6):
        ids, x, y = setup.batch(number)
        given = {"token": x}
        pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids, context=given)
    mine = Path(folder) / str(rank)
    saved = pipeline.checkpoint(mine)
    inputs = (x,) if rank == 0 else ()
    before = pipeline.eval(*inputs, target=y, context=given).loss
    pipeline.close()
    for one in saved["learned"]:
        one["scheme"] = scheme or one["scheme"]
    made, schedule, _ = build(rank, world_size, Case("1F1B", world_size))
    other = tw.Pipeline(schedule, made, tw.Plan("predicted(int2,by=token)", "raw"), deadline=20)
    lines = other.expect({mine: saved})
    after = other.eval(*inputs, target=y, context=given).loss
    other.close()
    return lines, before, after


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        ("", ""),
        ("predicted(int2,by=position)", "it was of predicted(int2,by=position)"),
        ("nonsense", "unknown codec or scheme 'nonsense'"),
    ],
)
def test_another_pipeline_expects_what_was_learned(
    scheme: str, why: str, pool: Pool, tmp_path: Path
) -> None:
    for lines, before, after in pool.run(adopted, str(tmp_path), scheme, world_size=2):
        if not why:
            assert not lines
            assert after == before
        else:
            assert len(lines) == 1
            assert lines[0].startswith("link forward 0→1 expects nothing (")
            assert why in lines[0]
            assert after != before
