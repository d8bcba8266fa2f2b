"""Schemes of a user's own: registered from outside, and kept from breaking a link."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests import test_edge as edge
from thinwire.boundary import MicroBatch

pytestmark = pytest.mark.usefixtures("registry")

Sections = list[tw.Section]


def plain(sections: Sections) -> Any:
    return sections


def straight(y: Tensor) -> Any:
    return y


def own(
    sent: Callable[[Sections], Any] = plain,
    received: Callable[[Tensor], Any] = straight,
    row_nbytes: int = 4 * edge.POSITIONS * edge.WIDTH,
) -> edge.Link:
    """A link with a scheme that sends float32, and does something to it at either end."""
    value = tw.Value(tw.codec("raw"))

    class Sends(tw.Sender):
        inner = value.sender()

        def encode(
            self, x: Tensor, microbatch: int, visit: tw.Visit, out: Tensor | None = None
        ) -> Sections:
            found: Sections = sent(self.inner.encode(x, microbatch, visit))
            return found

    class Receives(tw.Receiver):
        inner = value.receiver()

        def decode(self, sections: Sections, microbatch: int, visit: tw.Visit) -> Tensor:
            y: Tensor = received(self.inner.decode(sections, microbatch, visit))
            return y

    @tw.register_scheme("own")
    @dataclasses.dataclass(frozen=True)
    class Own(tw.Scheme):
        def sender(self) -> tw.Sender:
            return Sends()

        def receiver(self) -> tw.Receiver:
            return Receives()

        def stateless(self) -> tw.Scheme:
            return value

        def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
            return row_nbytes

    return edge.Link("own")


def test_a_scheme_that_keeps_its_word_is_used_like_any_other() -> None:
    link, x = own(), edge.normal(0)
    assert link.step(x).equal(x)
    assert str(link.sender.scheme) == "own"
    assert tw.Plan(forward="own", backward="own").schemes(0) is not None


def with_(**changes: Any) -> Callable[[Sections], Sections]:
    return lambda sections: [dataclasses.replace(sections[0], **changes)]


def halves(first: list[int], second: list[int]) -> Callable[[Sections], Sections]:
    return lambda s: [dataclasses.replace(s[0], rows=rows) for rows in (first, second)]


TOO_MUCH = torch.zeros(edge.ROWS * 4 * edge.POSITIONS * edge.WIDTH + 1, dtype=torch.uint8)
WRONG: dict[str, tuple[Callable[[Sections], Any], str]] = {
    "more bytes than declared": (
        with_(payload=TOO_MUCH),
        "its sender returned 1153 payload bytes; by its row_nbytes at most 1152",
    ),
    "nothing": (lambda sections: [], "its sender returned 0 sections, not 1 to 9"),
    "many sections": (
        lambda sections: sections * 10,
        "its sender returned 10 sections, not 1 to 9",
    ),
    "no list": (lambda sections: sections[0], "its sender returned Section, not a list"),
    "no sections": (
        lambda sections: [b"bytes"],
        "its sender returned list, not a list of sections",
    ),
    "other floats": (with_(payload=torch.zeros(3)), "no contiguous 1-D uint8: torch.float32"),
    "a matrix": (with_(payload=TOO_MUCH[:4].view(2, 2)), "a payload that is no contiguous 1-D"),
    "strides": (with_(payload=TOO_MUCH[:9:2]), "a payload that is no contiguous 1-D uint8"),
    "an abort": (with_(kind=tw.Kind.ABORT), "a section of kind ABORT"),
    "no kind": (with_(kind=77), "a section of kind 77"),
    "another shape": (with_(shape=(2, 6)), r"a section of kind VALUE and shape \(2, 6\)"),
    "rows twice": (halves([0], [1, 1]), r"a section of the rows \[1, 1\] of 2"),
    "rows out of order": (halves([0], [1, 0]), r"a section of the rows \[1, 0\] of 2"),
    "rows that are not there": (halves([0], [2]), r"a section of the rows \[2\] of 2"),
    "versions": (with_(versions=[1, 2, 3]), "its sender returned 3 versions of 2 rows"),
    "versions twice": (
        lambda sections: with_(versions=[1, 2])(sections) * 2,
        "its sender returned 4 versions of 2 rows",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_sender_may_not_return_is_an_error_that_names_its_scheme(what: str) -> None:
    sent, message = WRONG[what]
    link = own(sent)
    link.begin(MicroBatch(edge.ROWS, (4, 9)))
    with pytest.raises(
        ValueError, match=f"here: scheme own, activation of micro-batch 0, step 1: .*{message}"
    ):
        link.move(edge.normal(0))
    assert link.wire.sent == []


def test_a_row_is_bounded_by_what_is_declared_of_the_longest() -> None:
    link = own(row_nbytes=100)
    link.begin(MicroBatch(edge.ROWS, (4, 9)))
    with pytest.raises(
        ValueError, match="returned 1152 payload bytes; by its row_nbytes at most 200"
    ):
        link.move(edge.normal(0))


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (lambda y: y[0], r"its receiver returned shape \(6, 24\), not a tensor of \(2, 6, 24\)"),
        (lambda y: None, "its receiver returned NoneType"),
    ],
)
def test_what_a_receiver_may_not_return_is_an_error_that_names_its_scheme(
    received: Callable[[Tensor], Any], message: str
) -> None:
    link = own(received=received)
    with pytest.raises(tw.LinkError, match=f"scheme own: {message}"):
        link.step(edge.normal(0))
