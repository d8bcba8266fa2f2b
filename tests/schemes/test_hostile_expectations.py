"""What both ends expect survives shapes that change, frames that are refused, and damaged state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.schemes.links import Link, full, normal
from thinwire.errors import FrameError
from thinwire.frame import Kind, Section
from thinwire.predict import Map, fit, sources
from thinwire.schemes import Visit, scheme

SPECS = ["predicted(int4,by=token)", "delta(int4,first=int8,by=token+drift)"]


def settle(*links: Link) -> None:
    for link in links:
        link.sender.end_step()
        link.receiver.end_step()
        assert len(set(link.digests)) == 1


def visit(x: Tensor) -> Visit:
    rows = len(x)
    token = torch.arange(rows, dtype=torch.int64) % 5
    return full(range(rows), x[0].numel())._replace(context={"token": token})


def step(link: Link, x: Tensor) -> Tensor:
    link.begin(visit(x))
    y = link.move(x, 0, visit(x))
    settle(link)
    return y


@pytest.mark.parametrize("spec", SPECS)
def test_shapes_may_change_from_step_to_step(spec: str) -> None:
    link, plain = Link(spec), Link("int4")
    shapes = [
        (4, 8, 32),
        (4, 8, 1),
        (4, 8, 32),
        (4, 16, 16),
        (4, 1, 256),
        (4, 256),
        (4,),
        (4, 0, 3),
    ]
    for number, shape in enumerate([*shapes, *shapes]):
        x = normal(*shape, seed=number)
        there = full(range(4), x[0].numel())._replace(context={"token": torch.arange(4)})
        for one in (link, plain):
            one.begin(there)
        assert link.move(x, 0, there).shape == plain.move(x, 0, there).shape
        settle(link)


@pytest.mark.parametrize("spec", SPECS)
def test_micro_batches_of_a_step_may_have_other_widths(spec: str) -> None:
    link = Link(spec)
    for number in range(6):
        parts = [normal(4, 8, width, seed=number) for width in (16, 8, 16)]
        visits = [
            full(range(4 * k, 4 * k + 4), 8 * x.shape[2])._replace(
                context={"token": torch.arange(4)}
            )
            for k, x in enumerate(parts)
        ]
        link.begin(*visits)
        for k, (x, there) in enumerate(zip(parts, visits, strict=True)):
            link.move(x, k, there)
        settle(link)


@pytest.mark.parametrize(
    "backward", ["predicted(int4,by=token+activation)", "delta(int4,by=activation)"]
)
def test_a_refused_gradient_leaves_no_trace(backward: str) -> None:
    ahead, back = Link("int4"), Link(backward)
    back.sender.activations, back.receiver.activations = ahead.receiver, ahead.sender
    ahead.sender.keeps = ahead.receiver.keeps = True
    for number in range(14):
        x = normal(4, 8, 32, seed=number)
        for link in (ahead, back):
            link.begin(visit(x))
        ahead.move(x, 0, visit(x))
        sections = back.sender.encode(0.1 * x, 0, visit(x))
        section = sections[0]
        broken = Section(**{**vars(section), "payload": section.payload[:-1]})
        with pytest.raises(FrameError):
            back.receiver.decode([broken], 0, visit(x))
        for shape in ((4, 8, 8), (4, 4, 16), (4, 16, 32), (4, 0, 16)):
            wrong = Section(**{**vars(section), "shape": shape})
            with pytest.raises((FrameError, ValueError)):
                back.receiver.decode([wrong], 0, visit(x))
        back.receiver.decode(sections, 0, visit(x))
        settle(ahead, back)


def test_of_several_maps_all_are_taken_or_none() -> None:
    link = Link(SPECS[1])
    for number in range(4):
        step(link, normal(4, 8, 32, seed=number))
    x = normal(4, 8, 32, seed=5)
    link.begin(visit(x))
    sections = link.sender.encode(x, 0, visit(x))
    good = torch.cat([torch.tensor([1], dtype=torch.uint8), Map.of(torch.eye(32)).payload])
    told = [Section(Kind.MAP, "", x.dtype, (4, 8, 32), p, rows=[]) for p in (good, good[:-1])]
    for beside in (told, [told[0], told[0]]):
        with pytest.raises(FrameError, match="map"):
            link.receiver.decode([*sections, *beside], 0, visit(x))
    link.receiver.decode(sections, 0, visit(x))
    settle(link)


def test_more_positions_than_are_learned_at_once_may_come_in_any_order() -> None:
    link = Link("predicted(int4,by=token)")
    for number in range(3):
        parts = [normal(4, 1024, 8, seed=3 * number + k) for k in range(3)]
        visits = [visit(x) for x in parts]
        link.begin(*visits)
        sent = [link.sender.encode(x, k, visits[k]) for k, x in enumerate(parts)]
        for k in (2, 0, 1):
            link.receiver.decode(sent[k], k, visits[k])
        settle(link)


@pytest.mark.parametrize("shrinks", [0.5, 0.93])
def test_what_has_shrunk_is_loaded_as_it_was_saved(shrinks: float) -> None:
    link = Link("predicted(int4,by=token)")
    base = normal(4, 64, 8)
    for number in range(150):
        step(link, base * max(shrinks**number, 1e-6))
        if number % 30 == 0:
            again = scheme("predicted(int4,by=token)").sender()
            assert link.sender.learned is not None
            assert again.learned is not None
            again.learned.load_state_dict(link.sender.learned.state_dict())
            assert again.learned.digest() == link.sender.learned.digest()


Damage = Callable[[dict[str, Tensor]], Any]
DAMAGED: dict[str, Damage] = {
    "no rows": lambda s: s.update(
        {
            "values.0.sums": torch.zeros(0, 32, dtype=torch.int32),
            "values.0.counts": s["values.0.counts"][:0],
        }
    ),
    "no width": lambda s: s.update({"values.0.sums": s["values.0.sums"][:, :0]}),
    "three dimensions": lambda s: s.update({"values.0.sums": s["values.0.sums"][None]}),
    "another dtype": lambda s: s.update({"values.0.sums": s["values.0.sums"].float()}),
    "a unit that is none": lambda s: s.update({"values.0.unit": torch.tensor([0.5])}),
    "a unit beyond all": lambda s: s.update({"values.0.unit": torch.tensor([400])}),
    "counts below zero": lambda s: s["values.0.counts"].fill_(-3),
    "counts beyond memory": lambda s: s["values.0.counts"].fill_(1 << 30),
    "values beyond all": lambda s: s.update(
        {
            "values.0.sums": s["values.0.sums"].fill_((1 << 31) - 1),
            "values.0.unit": torch.tensor([100]),
        }
    ),
    "more ids than there are": lambda s: s.update(
        {
            "values.0.sums": torch.zeros((1 << 17) + 1, 32, dtype=torch.int32),
            "values.0.counts": torch.zeros((1 << 17) + 1, dtype=torch.int32),
        }
    ),
    "a narrow map": lambda s: s.update({"changes.map.codes": torch.ones(32, 1, dtype=torch.int8)}),
    "a map where none belongs": lambda s: s.update(
        {
            "values.map.codes": s["changes.map.codes"],
            "values.map.exponents": s["changes.map.exponents"],
        }
    ),
    "sums of a fit that are not finite": lambda s: s["changes.fit.inner"].fill_(torch.nan),
    "sums of a fit of another dtype": lambda s: s.update(
        {"changes.fit.outer": s["changes.fit.outer"].to(torch.int8)}
    ),
    "counts of a fit below zero": lambda s: s["changes.fit.counts"].fill_(-1),
    "a table less": lambda s: s.pop("changes.0.sums"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_state_is_refused_and_nothing_of_it_is_kept(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "_SHARE", 0)
    link = Link(SPECS[1])
    base = normal(4, 8, 32)
    for number in range(16):
        step(link, base + 0.1 * number * base.roll(1, 2))
    learned = link.sender.learned
    state = {name: tensor.clone() for name, tensor in learned.state_dict().items()}
    assert "changes.map.codes" in state
    DAMAGED[what](state)
    with pytest.raises(ValueError, match="what was saved is not of this link"):
        learned.load_state_dict(state)
    assert learned.digest() == scheme(SPECS[1]).sender().learned.digest()  # type: ignore[union-attr]


@pytest.mark.parametrize("nonsense", ["raises", "meta", "sparse"])
def test_a_source_that_returns_nonsense_is_named(
    nonsense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ids(context: Any, rows: int, positions: int) -> Tensor:
        if nonsense == "raises":
            raise ZeroDivisionError("by zero")
        found = torch.zeros(rows, positions, dtype=torch.int64)
        return found.to("meta") if nonsense == "meta" else found.to_sparse()

    monkeypatch.setattr(sources("token").ids[0], "ids", ids, raising=False)
    link, x = Link(SPECS[0]), normal(4, 8, 32)
    link.begin(visit(x))
    with pytest.raises(ValueError, match="source Token: "):
        link.move(x, 0, visit(x))
