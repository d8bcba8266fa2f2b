"""Positions far beyond the others travel apart: they spoil neither the codes beside them nor what
both ends learn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.schemes.links import Link, full, normal, visit
from thinwire.errors import FrameError
from thinwire.frame import Kind, Section
from thinwire.schemes import Visit
from thinwire.schemes.closed_loop.apart import Apart, most

ROWS, POSITIONS, WIDTH, TOKENS = 4, 32, 16, 10
SHAPE = ROWS, POSITIONS, WIDTH
CENTRES = normal(TOKENS, WIDTH, seed=8)
SINKS = [(0, 0), (2, 0)]  # two of 128 positions: as many as may
SPECS = [
    "predicted(int3:group=row,by=token)",
    "delta(int3:group=row,first=int8:group=row,ref=fp32,by=token+drift)",
    "delta(int4,first=int8,by=token)",
]


def batch(number: int) -> tuple[Tensor, Visit]:
    """The same samples in each step, moved a little, with two sinks."""
    token = torch.randint(TOKENS, SHAPE[:2], generator=torch.Generator().manual_seed(1))
    x = CENTRES[token] + 0.3 * normal(*SHAPE, seed=2) + 0.01 * number * normal(*SHAPE, seed=3)
    for row, position in SINKS:
        x[row, position] *= 400
    return x, full(range(ROWS), POSITIONS * WIDTH)._replace(context={"token": token})


def train(link: Link, steps: int, first: int = 0) -> tuple[Tensor, Tensor]:
    for number in range(first, first + steps):
        x, there = batch(number)
        link.begin(there)
        y = link.move(x, 0, there)
        link.sender.end_step()
        link.receiver.end_step()
        assert len(set(link.digests)) == 1
        assert Kind.APART in link.kinds
    return x, y


def ordinary(x: Tensor) -> Tensor:
    return torch.cat([x[0, 1:], x[1], x[2, 1:], x[3]])


@pytest.mark.parametrize("spec", SPECS)
def test_sinks_arrive_and_leave_the_others_alone(spec: str) -> None:
    link = Link(spec)
    x, y = train(link, 8)
    for sink in SINKS:
        assert torch.equal(y[sink], x[sink].bfloat16().float())
    error = (ordinary(x) - ordinary(y)).norm() / ordinary(x).norm()
    assert error < 0.08
    known = link.sender.learned.values.tables._tables[0].values
    assert float(known.abs().amax()) < 10


@pytest.mark.parametrize("spec", SPECS)
def test_what_the_sender_says_that_arrives_has_them_too(spec: str) -> None:
    link = Link(spec)
    train(link, 3)
    link.sender.measuring = True
    _, y = train(link, 1, first=3)
    assert torch.equal(link.sender.sent.view(y.shape), y)


def test_what_is_remembered_has_them() -> None:
    link = Link("delta(int4,first=int8,ref=fp32,by=token)")
    _, y = train(link, 3)
    for end in (link.sender, link.receiver):
        assert torch.equal(end.store.read([0])[0].view(POSITIONS, WIDTH), y[0])


def test_rows_with_few_positions_and_padding_have_none_that_are_not_theirs() -> None:
    link = Link("predicted(int4,by=token)")
    for number in range(5):
        x, _ = batch(number)
        lengths = [WIDTH * n for n in (32, 5, 0, 17)]
        x.flatten(1)[1, lengths[1] :] = torch.nan
        x[3, 20] = 1e6  # beyond the row's end
        there = visit(None, lengths, POSITIONS * WIDTH)
        there = there._replace(context={"token": torch.zeros(ROWS, POSITIONS, dtype=torch.int64)})
        link.begin(there)
        y = link.move(x, 0, there)
        assert torch.equal(y[0, 0], x[0, 0].bfloat16().float())
        for row, size in enumerate(lengths):
            assert not y.flatten(1)[row, size:].any()
        link.sender.end_step()
        link.receiver.end_step()
        assert len(set(link.digests)) == 1


def test_there_are_never_too_many_of_them() -> None:
    x = normal(*SHAPE)
    x[:, :2] *= 100
    found = Apart.of(x.flatten(1), SHAPE)
    assert found is None  # so many are nothing out of the ordinary
    x = normal(*SHAPE)
    x[:3, 0] *= torch.tensor([1e3, 1e2, 1e4])[:, None]
    found = Apart.of(x.flatten(1), SHAPE)
    assert found is not None
    assert len(found.places) == most(SHAPE) == 2
    assert found.places.tolist() == [0, 2 * POSITIONS]
    assert Apart.of(x.flatten(1), (ROWS, WIDTH, 4, 8)) is None
    assert Apart.of(torch.zeros(ROWS, POSITIONS * WIDTH), SHAPE) is None
    x[0, 0, 0] = torch.inf
    assert (
        Apart.of(x.flatten(1), SHAPE) is None
        or torch.isfinite(
            Apart.of(x.flatten(1), SHAPE).vectors  # type: ignore[union-attr]
        ).all()
    )


def test_a_payload_that_does_not_fit_is_refused() -> None:
    link = Link(SPECS[0])
    train(link, 3)
    x, there = batch(4)
    link.begin(there)
    sections = link.sender.encode(x, 0, there)
    (value,) = [s for s in sections if s.kind != Kind.APART]
    good = Apart.of(x.flatten(1), SHAPE)
    assert good is not None
    places = [[2 * POSITIONS, 0], [0, ROWS * POSITIONS], [-1, 5], [3, 3]]
    payloads = [Apart(torch.tensor(one), good.vectors).payload for one in places]
    payloads += [good.payload[:-1], good.payload[:0], torch.cat([good.payload] * 2)]
    payloads.append(Apart(good.places, good.vectors * torch.nan).payload)
    for payload in payloads:
        forged = Section(Kind.APART, "", x.dtype, SHAPE, payload, rows=[])
        with pytest.raises(FrameError, match="positions that travel apart"):
            link.receiver.decode([value, forged], 0, there)
    forged = Section(Kind.APART, "", x.dtype, SHAPE, good.payload, rows=[])
    with pytest.raises(FrameError, match="beside the rows that are none"):
        link.receiver.decode([value, forged, forged], 0, there)
    link.receiver.decode(sections, 0, there)
