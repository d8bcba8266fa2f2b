"""``delta(…, by=…)``: what both ends expect of a value, or of how it has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.schemes.links import Link, full, mixed_step, normal, on_the_wire, visits_of
from thinwire.errors import FrameError
from thinwire.frame import Kind, Section
from thinwire.predict import Map, Part, fit
from thinwire.schemes import Visit

ROWS, POSITIONS, WIDTH, TOKENS = 4, 16, 32, 20
SAMPLES = 32
CENTRES = normal(TOKENS, WIDTH, seed=8)
TURN = torch.linalg.qr(normal(WIDTH, WIDTH, seed=9)).Q
SPEC = "delta(int3,first=int4,by=token+drift)"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps are sent whenever they may be."""
    monkeypatch.setattr(fit, "_SHARE", 0)


def sample(key: int, epoch: int) -> tuple[Tensor, Tensor]:
    """A sample's tokens and its values, which all turn a little in each epoch."""
    generator = torch.Generator().manual_seed(key)
    token = torch.randint(TOKENS, (POSITIONS,), generator=generator)
    own = 0.5 * torch.randn(POSITIONS, WIDTH, generator=generator)
    value = CENTRES[token] + own
    for _ in range(epoch):
        value = 0.9 * value + 0.3 * value @ TURN
    return token, value + 0.02 * normal(POSITIONS, WIDTH, seed=1000 * epoch + key)


def batch(number: int) -> tuple[Tensor, Visit]:
    """The next samples in order, epoch after epoch."""
    epoch, first = divmod(ROWS * number, SAMPLES)
    keys = range(first, first + ROWS)
    found = [sample(key, epoch) for key in keys]
    there = full(keys, POSITIONS * WIDTH)
    there = there._replace(context={"token": torch.stack([token for token, _ in found])})
    return torch.stack([value for _, value in found]), there


def train(link: Link, first: int, last: int, counts: bool = True) -> list[float]:
    """Steps from ``first`` up to ``last``; the relative error of each."""
    errors = []
    for number in range(first, last):
        x, there = batch(number)
        link.begin(there)
        errors.append(float((link.move(x, 0, there) - x).norm() / x.norm()))
        if counts:
            link.sender.end_step()
            link.receiver.end_step()
            assert len(set(link.digests)) == 1
    return errors


def test_changes_that_all_samples_share_are_expected() -> None:
    by = {spec: Link(spec) for spec in ("delta(int3,first=int4)", SPEC)}
    errors = {spec: train(link, 0, 40) for spec, link in by.items()}
    plain, predicted = errors.values()
    for first, last, factor in ((4, 8, 1.5), (20, 24, 2), (36, 40, 2)):  # within an epoch of eight
        assert sum(predicted[first:last]) < sum(plain[first:last]) / factor


def test_a_map_tells_more_of_changes_than_tables() -> None:
    tables = train(Link("delta(int3,first=int4,by=token)"), 0, 40)
    both = train(Link(SPEC), 0, 40)
    assert sum(both[20:24]) < 0.7 * sum(tables[20:24])


def test_maps_travel_beside_the_rows_and_count_when_the_step_does() -> None:
    link = Link(SPEC)
    train(link, 0, 8)
    kinds = []
    for number in range(8, 24):
        train(link, number, number + 1)
        kinds.append(link.kinds)
    assert [Kind.CHANGE, Kind.MAP] in kinds
    link.sender.learned.changes.found = Map.of(TURN)
    before = link.digests
    train(link, 24, 25, counts=False)
    assert link.kinds == [Kind.CHANGE, Kind.MAP]
    link.begin(batch(25)[1])
    train(link, 25, 26)
    assert link.kinds == [Kind.CHANGE, Kind.MAP]
    assert link.digests != before
    train(link, 26, 27)
    assert link.kinds == [Kind.CHANGE]


@pytest.mark.parametrize("codec", ["int2", "topk:0.2", "int4:round=stochastic", "tile"])
def test_without_sources_the_frames_are_those_of_the_plain_scheme(codec: str) -> None:
    plain, off = Link(f"delta({codec})"), Link(f"delta({codec},by=off)")
    value, predicted = Link(codec), Link(f"predicted({codec},by=off)")
    for number in range(12):
        x, there = batch(number)
        for one, other in ((plain, off), (value, predicted)):
            for link in (one, other):
                link.begin(there)
            frames = [on_the_wire(link.sender.encode(x, 0, there)) for link in (one, other)]
            assert frames[0] == frames[1]


def test_of_what_nothing_is_expected_the_reference_is_expected() -> None:
    """A gain of zero is AQ-SGD: the same bytes beside the gains."""
    plain, link = Link("delta(int3,ref=fp32)"), Link("delta(int3,ref=fp32,by=token)")
    for one in (plain, link):
        train(one, 0, 8)
    there = batch(8)[1]
    values = torch.stack([link.receiver.store.read([key])[0] for key in there.keys or ()])
    plain.sender.store.put(there.keys, list(values.clone()), [POSITIONS * WIDTH] * ROWS)
    x = values.view(ROWS, POSITIONS, WIDTH) + 0.1 * normal(ROWS, POSITIONS, WIDTH, seed=3)
    train(link, 8, 9)
    link.sender.store.put(there.keys, list(values.clone()), [POSITIONS * WIDTH] * ROWS)
    for one in (plain, link):
        one.sender.begin_step([there])
    expected = link.sender.learned.changes.tables(
        link.sender.learned.guess(_part(there), None, change=True).ids
    )
    x = values.view(ROWS, POSITIONS, WIDTH) - 0.5 * expected.view(ROWS, POSITIONS, WIDTH)
    (section,) = link.sender.encode(x, 0, there)
    (simple,) = plain.sender.encode(x, 0, there)
    assert section.predicted
    assert not section.payload[:ROWS].any()
    assert torch.equal(section.payload[ROWS:], simple.payload)


def _part(there: Visit) -> Any:
    shape = ROWS, POSITIONS, WIDTH
    return Part(0, Kind.CHANGE, range(ROWS), shape, there.context, 1.0, None)


@pytest.mark.parametrize("by", ["token", "token+position+drift", "drift"])
@pytest.mark.parametrize(
    "codecs", ["int2,first=int4", "int3,second=int4,ref=int4", "topk:0.3,ref=fp32"]
)
def test_both_ends_stay_equal_through_mixed_traffic(by: str, codecs: str) -> None:
    link = Link(f"delta({codecs},by={by})")
    kinds: set[Kind] = set()
    for number in range(120):
        step = mixed_step(number)
        visits = visits_of(number, step)
        link.begin(*visits, dense=40 <= number < 44)
        for k in sorted(range(len(visits)), key=lambda k: (k + number) % len(visits)):
            link.move(step[1][k], k, visits[k])
            kinds |= set(link.kinds)
        if number % 7:
            link.sender.end_step()
            link.receiver.end_step()
        assert len(set(link.digests)) == 1
    assert {Kind.VALUE, Kind.FIRST, Kind.CHANGE, Kind.RESEED, Kind.DENSE} <= kinds


def test_both_ends_go_on_from_their_state() -> None:
    link, again = Link(SPEC), Link(SPEC)
    train(link, 0, 18)
    assert link.sender.learned.changes.fit is not None
    again.sender.load_state_dict(link.sender.state_dict())
    again.receiver.load_state_dict(link.receiver.state_dict())
    assert again.digests == link.digests
    assert train(again, 18, 40) == train(link, 18, 40)
    assert again.digests == link.digests


def test_a_map_that_does_not_fit_is_refused_with_nothing_changed() -> None:
    link = Link(SPEC)
    train(link, 0, 9)
    x, there = batch(9)
    link.begin(there)
    sections = link.sender.encode(x, 0, there)
    before = link.receiver.digest()
    good = Map.of(TURN).payload
    number = torch.tensor([1], dtype=torch.uint8)
    low = good.clone()
    low[40] = 0x80
    for payload, why in (
        (good[:0], "a map of something"),
        (torch.cat([number + 1, good]), "a map of something"),
        (torch.cat([number - 1, good]), "a map of something"),
        (torch.cat([number, good[:-1]]), "a map of 32 to 32"),
        (torch.cat([number, low]), "coefficients that are none"),
        (torch.cat([number, torch.full_like(good, 127)]), "coefficients that are none"),
    ):
        forged = Section(Kind.MAP, "", x.dtype, tuple(x.shape), payload, rows=[])
        with pytest.raises(FrameError, match=why):
            link.receiver.decode([*sections, forged], 0, there)
    for rows, end in (([0], link), ([], Link("delta(int3)"))):
        forged = Section(Kind.MAP, "", x.dtype, tuple(x.shape), good, rows=rows)
        if end is not link:
            end.begin(there)
            sections = end.sender.encode(x, 0, there)
        with pytest.raises(FrameError, match="beside the rows"):
            end.receiver.decode([*sections, forged], 0, there)
    assert link.receiver.digest() == before


def test_an_end_that_has_lost_what_it_expects_refuses_what_is_predicted() -> None:
    link = Link(SPEC)
    train(link, 0, 12)
    link.receiver.learned.forget()
    x, there = batch(12)
    link.begin(there)
    with pytest.raises(FrameError, match="the other end expects something of it, this one nothing"):
        link.move(x, 0, there)
    link.sender.learned.forget()
    for end in (link.sender, link.receiver):
        end.repair(there.keys)
    train(link, 12, 20)


def test_what_was_expected_is_measured() -> None:
    link = Link(SPEC)
    train(link, 0, 30)
    link.sender.measuring = True
    train(link, 30, 31)
    ((kind, plain, left),) = link.sender.gained
    assert kind == Kind.CHANGE
    assert left < plain / 4
    x, there = batch(31)
    link.begin(there)
    y = link.move(x, 0, there)
    assert torch.equal(link.sender.sent.view(x.shape), y)


def test_a_change_that_is_just_as_expected_is_not_taken_for_none() -> None:
    """Of bf16 values little is left beyond what is expected: the reference alone would be stale."""
    link, x = Link("delta(int4,ref=fp32,by=token)"), normal(ROWS, POSITIONS, WIDTH).abs() + 3
    there = batch(0)[1]._replace(context={"token": torch.zeros(ROWS, POSITIONS, dtype=torch.int64)})
    for number in range(12):
        moved = (x + 0.1 * number).bfloat16()
        link.begin(there)
        y = link.move(moved, 0, there)
        link.sender.end_step()
        link.receiver.end_step()
        assert len(set(link.digests)) == 1
    assert (y.float() - moved.float()).abs().max() < 0.05
