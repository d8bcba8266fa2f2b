"""``predicted``: what both ends expect is left out, and both learn the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.schemes.links import Link, full
from thinwire.errors import FrameError, SpecError
from thinwire.frame import Kind
from thinwire.predict import Part, sources
from thinwire.schemes import Visit, scheme

ROWS, POSITIONS, WIDTH, TOKENS = 4, 16, 32, 20
CENTRES = torch.randn(TOKENS + 1, WIDTH, generator=torch.Generator().manual_seed(8))


def batch(seed: int, scale: float = 1.0) -> tuple[Tensor, Visit]:
    """Values that a token tells much of, and what both ends know of them."""
    generator = torch.Generator().manual_seed(seed)
    token = torch.randint(TOKENS, (ROWS, POSITIONS), generator=generator)
    noise = torch.randn(ROWS, POSITIONS, WIDTH, generator=generator)
    x = scale * (CENTRES[token] + 0.2 * noise)
    there = full(range(ROWS), POSITIONS * WIDTH)
    return x, there._replace(context={"token": token, "target": token}, scale=scale)


def train(link: Link, steps: int, scale: float = 1.0) -> list[Tensor]:
    found = []
    for step in range(steps):
        x, there = batch(step, scale)
        link.begin(there)
        found.append(link.move(x, 0, there))
        link.sender.end_step()
        link.receiver.end_step()
        assert len(set(link.digests)) == 1
    return found


def expected(end: Any, there: Visit, shape: Sequence[int]) -> Tensor:
    """What an end expects of a micro-batch."""
    part = Part(0, 0, range(shape[0]), tuple(shape), there.context, there.scale, None)
    end.learned.begin()
    found: Tensor = end.learned.rows(end.learned.guess(part, None), part)
    return found


def error(link: Link, seed: int = 99) -> float:
    x, there = batch(seed)
    link.begin(there)
    return float((link.move(x, 0, there) - x).norm() / x.norm())


@pytest.mark.parametrize("by", ["token", "token+previous", "target+token", "position+token+mean"])
def test_what_is_expected_makes_the_rest_small(by: str) -> None:
    link = Link(f"predicted(int3,by={by})")
    before = error(link)
    assert link.kinds == [Kind.VALUE]
    train(link, 10)
    assert error(link) < before / 2.5
    assert link.kinds == [Kind.VALUE]


def test_gradients_are_expected_in_the_scale_of_their_batch() -> None:
    link, small = Link("predicted(int3,by=token)"), Link("predicted(int3,by=token)")
    one, other = train(link, 5), train(small, 5, scale=2.0**-14)
    for large, little in zip(one, other, strict=True):
        assert torch.equal(large * 2.0**-14, little)


def test_a_step_that_does_not_count_teaches_nothing() -> None:
    link, other = Link("predicted(int4,by=token)"), Link("predicted(int4,by=token)")
    train(link, 3)
    train(other, 3)
    x, there = batch(50)
    link.begin(there)
    link.move(x, 0, there)
    assert link.digests == other.digests
    train(link, 1)
    train(other, 1)
    assert link.digests == other.digests


def test_the_order_of_micro_batches_does_not_matter() -> None:
    links = [Link("predicted(int4,by=token)") for _ in range(2)]
    for link, order in zip(links, ([0, 1, 2], [2, 0, 1]), strict=True):
        for step in range(4):
            parts = [batch(10 * step + k) for k in range(3)]
            link.begin(*[there for _, there in parts])
            for k in order:
                link.move(parts[k][0], k, parts[k][1])
            link.sender.end_step()
            link.receiver.end_step()
    assert len({*links[0].digests, *links[1].digests}) == 1


def test_a_value_that_is_not_as_expected_is_sent_as_it_is() -> None:
    link, plain = Link("predicted(int4,by=token)"), Link("int4")
    train(link, 5)
    x, there = batch(7)
    link.begin(there)
    plain.begin(there)
    assert torch.equal(link.move(-x, 0, there), plain.move(-x, 0, there))


@pytest.mark.parametrize("factor", [0.05, 0.5, 3.0])
def test_a_row_of_another_size_is_expected_in_its_size(factor: float) -> None:
    link = Link("predicted(int3,by=token)")
    train(link, 10)
    x, there = batch(30)
    link.begin(there)
    y = link.move(factor * x, 0, there)
    assert (y - factor * x).norm() < 0.08 * factor * x.norm()


def test_positions_far_beyond_the_others_teach_nothing() -> None:
    link, spoiled = Link("predicted(bf16,by=token)"), Link("predicted(bf16,by=token)")
    for step in range(6):
        for one in (link, spoiled):
            x, there = batch(step)
            if one is spoiled:
                x[0, 0] *= 1000
            one.begin(there)
            one.move(x, 0, there)
            one.sender.end_step()
            one.receiver.end_step()
    x, there = batch(60)
    for one in (link, spoiled):
        one.begin(there)
        left = x.flatten(1) - expected(one.sender, there, x.shape)
        assert left.norm() < 0.4 * x.norm()


def test_images_have_positions_and_channels() -> None:
    link = Link("predicted(int3,by=position)")
    pattern = torch.randn(1, 8, 5, 5, generator=torch.Generator().manual_seed(1))
    there = full(range(ROWS), 200)
    for step in range(6):
        noise = torch.randn(ROWS, 8, 5, 5, generator=torch.Generator().manual_seed(step))
        link.begin(there)
        link.move(pattern + 0.1 * noise, 0, there)
        link.sender.end_step()
        link.receiver.end_step()
    found = expected(link.receiver, full(range(1), 200), (1, 8, 5, 5))
    assert torch.allclose(found.view(8, 5, 5), pattern[0], atol=0.3)


def test_rows_may_have_other_lengths_and_padding_teaches_nothing() -> None:
    link = Link("predicted(int8,by=token)")
    for step in range(5):
        x, there = batch(step)
        lengths = tuple(WIDTH * n for n in (POSITIONS, 3, 0, 9))
        there = there._replace(lengths=lengths, padded=True)
        for row, size in enumerate(lengths):
            x.flatten(1)[row, size:] = torch.nan
        link.begin(there)
        y = link.move(x, 0, there)
        for row, size in enumerate(lengths):
            assert not y.flatten(1)[row, size:].any()
            assert torch.allclose(y.flatten(1)[row, :size], x.flatten(1)[row, :size], atol=0.1)
        link.sender.end_step()
        link.receiver.end_step()
        assert len(set(link.digests)) == 1
    assert link.kinds == [Kind.VALUE]


def test_dense_steps_teach_what_is_exact() -> None:
    link = Link("predicted(int3,by=token)")
    for step in range(4):
        x, there = batch(step)
        link.begin(there, dense=True)
        assert torch.equal(link.move(x, 0, there), x)
        assert link.kinds == [Kind.DENSE]
        link.sender.end_step()
        link.receiver.end_step()
    assert len(set(link.digests)) == 1
    error(link)
    assert link.kinds == [Kind.VALUE]


def test_both_ends_go_on_from_their_state() -> None:
    link, again = Link("predicted(int4,by=target+token)"), Link("predicted(int4,by=target+token)")
    train(link, 5)
    again.sender.load_state_dict(link.sender.state_dict())
    again.receiver.load_state_dict(link.receiver.state_dict())
    assert again.digests == link.digests
    assert [torch.equal(a, b) for a, b in zip(train(again, 3), train(link, 3), strict=True)]
    assert again.digests == link.digests


def test_an_end_that_knows_nothing_refuses_what_is_predicted() -> None:
    link = Link("predicted(int4,by=token)")
    train(link, 4)
    link.receiver.learned.forget()
    x, there = batch(3)
    link.begin(there)
    with pytest.raises(FrameError, match="expects"):
        link.move(x, 0, there)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (
            "predicted(int4,by=tokens)",
            "nothing is predicted by 'tokens'; known: activation, drift, mean",
        ),
        ("predicted(int4,by=)", "expected"),
        ("delta(int4,by=tokens)", "nothing is predicted by 'tokens'"),
        ("delta(int4,by=token+token)", "token stands there twice"),
        ("delta(int4,by=off+token)", "nothing is predicted by 'off'"),
        ("predicted(int4,by=token+drift)", "drift is of changes"),
        ("predicted(topk:0.1,mask=shared)", "another link's frames"),
    ],
)
def test_what_cannot_be_predicted_by_is_told(spec: str, why: str) -> None:
    with pytest.raises(SpecError) as caught:
        scheme(spec)
    assert why in str(caught.value)


def test_a_scheme_says_what_it_takes() -> None:
    assert scheme("predicted(int4,by=target+token+previous)").takes == {"target", "token"}
    assert scheme("predicted(int4,by=position)").takes == frozenset()
    assert str(scheme("predicted(int4)").stateless()) == "int4"


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (lambda context, rows, positions: context["token"].add_(1), "changes its context"),
        (
            lambda context, rows, positions: torch.randint(1 << 40, (rows, positions)),
            "has other ids each time",
        ),
        (
            lambda context, rows, positions: exec("raise SystemExit('one\\ntwo')"),
            "SystemExit: one two",
        ),
    ],
)
def test_a_source_that_cannot_be_the_same_at_both_ends_is_told(
    ids: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = Link("predicted(int4,by=token)").sender.learned
    assert learned is not None
    monkeypatch.setattr(sources("token").ids[0], "ids", ids, raising=False)
    context = {"token": torch.zeros(ROWS, POSITIONS, dtype=torch.int64)}
    with pytest.raises(ValueError, match=why):
        learned.try_out(context, (ROWS, POSITIONS, 8))


def test_a_source_of_ones_own_is_known_by_its_name() -> None:
    text = (Path(__file__).parents[2] / "docs" / "prediction.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code, {})
    link = Link("predicted(int4,by=half+token)")
    assert link.scheme.takes == {"token"}
    ids = sources("half").ids[0].ids({}, 2, 5)
    assert ids.tolist() == [[0, 0, 0, 1, 1]] * 2
    train(link, 3)
    assert link.kinds == [Kind.VALUE]


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(ROWS, POSITIONS + 1, dtype=torch.int64),
        torch.zeros(ROWS, POSITIONS),
        torch.zeros(ROWS, dtype=torch.int64),
        [[0]],
    ],
)
def test_ids_that_are_none_are_told(ids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link("predicted(int4,by=token)")
    monkeypatch.setattr(sources("token").ids[0], "ids", lambda *_: ids, raising=False)
    x, there = batch(0)
    link.begin(there)
    with pytest.raises(ValueError, match=r"source Token: ids must be int64 of \(4, 16\), not"):
        link.move(x, 0, there)
