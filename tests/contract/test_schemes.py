"""The same for schemes: each requirement fails for one that is wrong in this alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.blocks import loaded
from thinwire.contract.requirement import Result
from thinwire.contract.suite import OF_SCHEMES, examine

BUILT_IN = [
    "delta(int4)",
    "delta(int2,first=int4)",
    "delta(int3:round=stochastic,first=fp16)",
    "delta(int4,first=raw,ref=fp32)",
    "delta(topk:0.2,first=int4,ref=bf16)",
    "delta(int2,second=int5,ref=fp32)",
    "delta(int4:zstd,first=tile,ref=int4)",
    "ef(topk:0.1)",
    "ef(int3:round=stochastic,residual=int8)",
    "ef(tile,key=slot)",
    "efmixed(topk:0.2/tile)",
    "ef21(topk:0.1)",
    "ef21(int4,key=slot,ref=bf16)",
    "predicted(int4,by=position+mean)",
    "delta(int2,first=int4,by=position+mean+drift)",
    "delta(int3:round=stochastic,first=fp16,ref=int4,by=position)",
    "predicted(int2,by=target+previous)",
    "delta(int2,by=token+drift)",
]


@pytest.mark.parametrize("spec", BUILT_IN)
def test_built_in_schemes_do_all_that_is_asked(spec: str) -> None:
    assert [r for r in examine(spec).results if r.status != "passed"] == []


@pytest.fixture
def last(registry: None, tmp_path: Path) -> ModuleType:
    """The scheme of the documentation."""
    return loaded("last", tmp_path)


@pytest.mark.usefixtures("last")
@pytest.mark.parametrize("spec", ["last(int4)", "last(int8:round=stochastic)", "last(bf16)"])
def test_the_scheme_of_the_documentation_does_all_that_is_asked(spec: str) -> None:
    assert [r for r in examine(spec).results if r.status != "passed"] == []


Methods = dict[str, Any]


def made(last: Any, scheme: Methods, both: Methods, sender: Methods, receiver: Methods) -> None:
    """Register ``wrong``: ``last`` with other methods, of the scheme, of both ends, and of each."""
    ends = [
        type("End", (cls,), both | own)
        for cls, own in ((last.LastSender, sender), (last.LastReceiver, receiver))
    ]
    factories = {
        "sender": lambda self: ends[0](self.codec),
        "receiver": lambda self: ends[1](self.codec),
    }
    cls = type("Wrong", (last.Last,), factories | scheme | {"__module__": __name__})
    tw.register_scheme("wrong")(dataclasses.dataclass(frozen=True)(cls))


def after(name: str, change: Callable[..., Any]) -> Methods:
    """A method that does ``change`` to what the inherited one returns."""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        inherited = getattr(super(type(self), self), name)
        return change(self, inherited(*args, **options), *args)

    return {name: method}


def before(name: str, act: Callable[..., Any]) -> Methods:
    """A method that does ``act`` first."""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        act(self, *args)
        return getattr(super(type(self), self), name)(*args, **options)

    return {name: method}


def filled(self: Any, y: torch.Tensor, sections: Any, microbatch: int, visit: tw.Visit) -> Any:
    for row, n in enumerate(visit.lengths):
        y.flatten(1)[row, n:] = 1
    return y


def in_place(self: Any, sections: Any, x: torch.Tensor, *args: Any) -> Any:
    if len(x) == 1:
        x.detach().zero_()
    return sections


def shown_in_state(self: Any, sections: Any, x: torch.Tensor, *args: Any) -> Any:
    self.given = x.detach()
    return sections


def counted(self: Any, *args: Any) -> None:
    self.last[-9] = self.last.get(-9, torch.zeros(1)) + 1


def counted_after(self: Any, result: Any, *args: Any) -> Any:
    counted(self)
    return result


def uncloned(self: Any, sections: Any, microbatch: int, visit: tw.Visit) -> torch.Tensor:
    change = self.receiving.decode(sections, microbatch, visit)
    y: torch.Tensor = change.flatten(1) + self.expected(change.flatten(1), microbatch, visit)
    for row, (key, n) in enumerate(zip(visit.keys or (), visit.lengths, strict=True)):
        if (microbatch, row) in self.moving:
            self.last[key] = y[row, :n]
    return y.view(change.shape)


def every_row_moves(self: Any, visits: list[tw.Visit], dense: bool = False) -> None:
    self.dense = dense
    for coding in (self.sending, self.receiving):
        coding.begin_step(visits, dense)
    if visits[0].keys is None:
        raise ValueError("no keys")
    self.moving = {(k, row) for k, visit in enumerate(visits) for row in range(len(visit.lengths))}


class Evaluated(tw.Value):
    """Counts its calls in a place that the training ends look at."""

    calls = [0]  # noqa: RUF012

    def sender(self) -> tw.Sender:
        self.calls[0] += 1
        return super().sender()


def numpy_of(self: Any, x: torch.Tensor, *args: Any) -> None:
    x.detach().numpy()


def nudged(self: Any, x: torch.Tensor, microbatch: int, visit: tw.Visit, out: Any = None) -> Any:
    y = x if out is None else x + 0.01
    return super(type(self), self).encode(y, microbatch, visit, out)


NUMBERS = itertools.count()


def late_number(self: Any, *args: Any) -> None:
    self.steps = getattr(self, "steps", 0) + 1
    if self.steps == 10:
        self.last[-9] = torch.full((24,), 0.001 * (next(NUMBERS) // 2))  # one for both ends


def keys_of_its_own(self: Any, change: torch.Tensor, *args: Any) -> Any:
    return change + (self.last[-9].sum() if -9 in self.last else 0)


def never_dense(self: Any, visits: list[tw.Visit], dense: bool = False) -> None:
    super(type(self), self).begin_step(visits)


def doubled(self: Any) -> None:
    object.__setattr__(self, "scale", 2 * self.scale)


#: Of each requirement a scheme that is wrong in it: methods of the scheme, of both ends, of the
#: sender and of the receiver, and what is found.
WRONG: dict[str, tuple[Methods, Methods, Methods, Methods, str]] = {
    "spec": (
        {"__annotations__": {"scale": float}, "scale": 1.0, "__post_init__": doubled},
        *({}, {}, {}),
        "is not Wrong(",
    ),
    "shapes": (
        *({}, {}, {}),
        after("decode", lambda self, y, *args: y.squeeze(0)),
        "torch.float32 (6, 4)",
    ),
    "direction": (
        *({}, {}, {}),
        after("decode", lambda self, y, *args: y if self.dense else -y),
        "their inner product is -",
    ),
    "dtypes": ({}, {}, before("encode", numpy_of), {}, "TypeError: Got unsupported ScalarType"),
    "padding": ({}, {}, {}, after("decode", filled), "row 0 has values beyond its length"),
    "sizes": (
        after("row_nbytes", lambda self, size, n, dtype: size + 8 * (n % 2)),
        *({}, {}, {}),
        "but",
    ),
    "out": ({}, {}, {"encode": nudged}, {}, "other bytes than without it"),
    "keys": ({"needs_keys": False}, {}, {}, {}, "ValueError: last needs sample_ids"),
    "repeatable": (
        {},
        before("begin_step", late_number) | after("expected", keys_of_its_own),
        *({}, {}),
        "other bytes or values",
    ),
    "generators": (
        {},
        before("begin_step", lambda self, *args: torch.rand(1)),
        {},
        {},
        "of torch has",
    ),
    "input": ({}, {}, after("encode", in_place), {}, "it was changed"),
    "alias": ({}, {}, {}, {"receive": uncloned}, "the state has changed with what was returned"),
    "agree": ({}, {"begin_step": every_row_moves}, {}, {}, "digests"),
    "evaluation": (
        {"stateless": lambda self: Evaluated(self.codec)},
        after("digest", lambda self, found: found + Evaluated.calls[0]),
        *({}, {}),
        "the state of the training ends has moved",
    ),
    "nonfinite": (
        *({}, {}),
        before("encode", counted),
        after("decode", counted_after),
        "the state has moved",
    ),
    "damage": (
        *({}, {}),
        after("encode", counted_after),
        before("decode", counted),
        "the state has moved",
    ),
    "state": ({}, {"load_state_dict": lambda self, state: None}, {}, {}, "than of ends that never"),
    "dense": ({}, {"begin_step": never_dense}, {}, {}, "other values in a dense step"),
    "pipeline": (
        *({}, {}, {}),
        after("decode", lambda self, y, *args: y if self.dense else torch.zeros_like(y)),
        "stage 0 has not learned anything",
    ),
}
KEEPS: tuple[Methods, Methods, Methods, Methods, str] = (
    {},
    {},
    after("encode", shown_in_state)
    | after("state_dict", lambda self, kept: kept | {"0": getattr(self, "given", torch.zeros(1))}),
    {},
    "the state has changed with it, afterwards",
)


def failures(last: ModuleType, *methods: Methods) -> list[Result]:
    made(last, *methods)
    return [result for result in examine("wrong(int8)").results if result.status == "failed"]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_fails_the_requirement_that_asks_for_it_and_no_other(
    name: str, last: ModuleType
) -> None:
    *methods, found = WRONG[name]
    (result,) = failures(last, *methods)
    assert result.requirement == name
    assert found in (result.found or "")
    assert result.given
    assert result.expected


def test_a_sender_that_keeps_what_it_was_given_is_found(last: ModuleType) -> None:
    *methods, found = KEEPS
    assert ("input", found) in [(r.requirement, r.found) for r in failures(last, *methods)]


def test_fewer_bytes_than_are_sent_fail_in_a_pipeline_too(last: ModuleType) -> None:
    few = after("row_nbytes", lambda self, size, n, dtype: size // 2)
    sizes, pipeline = failures(last, few, {}, {}, {})
    assert (sizes.requirement, pipeline.requirement) == ("sizes", "pipeline")
    assert "30 payload bytes, 15 by row_nbytes" in (sizes.found or "")
    assert "scheme wrong(int8), " in (pipeline.found or "")
    assert "payload bytes; by its row_nbytes at most" in (pipeline.found or "")


def test_a_scheme_that_lets_nan_pass_is_found(last: ModuleType) -> None:
    found = {result.requirement: result for result in examine("last(raw)").results}
    assert found["nonfinite"].found == "it was encoded"
    assert found["nonfinite"].given == (
        "float32 (1, 6, 4), samples [4], lengths whole, nan in the last row"
    )


def test_a_scheme_that_does_all_that_is_asked_fails_nothing(last: ModuleType) -> None:
    assert failures(last, {}, {}, {}, {}) == []


def test_each_requirement_has_a_scheme_that_fails_it() -> None:
    assert set(WRONG) == {one.name for one in OF_SCHEMES}
