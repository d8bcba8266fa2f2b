"""What is asked of a scheme's state: one at both ends, moved by training alone, never aliased."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

import thinwire as tw
from thinwire.contract.codec_values import takes_bytes
from thinwire.contract.data import FEATURES, POSITIONS, WIDTH, Step, normal, shown, steps, visit
from thinwire.contract.ends import Ends, equal, off_the_wire, on_the_wire
from thinwire.contract.requirement import Broken, NotApplicable, need, on, requirement
from thinwire.frame import Section
from thinwire.schemes import Scheme, Value
from thinwire.train.words import counted

_MANY, _SOME = 24, 8


@requirement("agree", "both ends have one digest after every step, whatever the order of its parts")
def agree(scheme: Scheme) -> str | None:
    ends = Ends(scheme)
    for number, step in enumerate(steps(_MANY)):
        ends.step(step, shuffled=number)
        with on(_told(number, step)):
            one, other = ends.digests
            need(one == other, f"digests {one:x} and {other:x}")
    return None


def _told(number: int, step: Step) -> str:
    parts = counted(len(step), "micro-batch")
    return f"step {number + 1}, {parts}, the first {shown(*step[0])}"


@requirement("evaluation", "stateless() codes without begin_step and samples, and moves no state")
def evaluation(scheme: Scheme) -> str | None:
    ends, still = Ends(scheme), Ends(scheme)
    for number, step in enumerate(map(ends.own, steps(_SOME))):
        ends.begin(step)
        still.begin(step)
        before = ends.states
        with on(f"{shown(visit(None, [WIDTH] * 2), normal(2, POSITIONS, FEATURES))}, evaluated"):
            need(_evaluated(scheme) == _evaluated(scheme), "other bytes the next time")
            need(equal(ends.states, before), "the state of the training ends has moved")
        with on(_told(number, step)):
            need(_moved(ends, step) == _moved(still, step), "other bytes than without evaluation")
    return None


def _moved(ends: Ends, step: Step) -> list[bytes]:
    """The messages of a step that has begun, which are received too."""
    sent = [ends.send(x, k, there) for k, (there, x) in enumerate(step)]
    for k, (data, (there, _)) in enumerate(zip(sent, step, strict=True)):
        ends.take(data, k, there)
    ends.end()
    return sent


def _evaluated(scheme: Scheme) -> bytes:
    """What is sent in evaluation."""
    x, there = normal(2, POSITIONS, FEATURES), visit(None, [WIDTH] * 2)
    plain = scheme.stateless()
    sent = on_the_wire(plain.sender().encode(x, 0, there))
    y = plain.receiver().decode(off_the_wire(sent), 0, there)
    need(y.shape == x.shape and bool(torch.isfinite(y).all()), f"{y.dtype} {tuple(y.shape)}")
    return sent


@requirement("nonfinite", "NaN and infinity raise NonFiniteError and leave the state as it is")
def nonfinite(scheme: Scheme) -> str | None:
    if isinstance(scheme, Value) and takes_bytes(scheme.codec):
        raise NotApplicable("the link itself looks for what is not finite before raw")
    ends = Ends(scheme)
    for step in map(ends.own, steps(_SOME)):
        ends.begin(step)
        for k, (there, x) in enumerate(step):
            for value in (torch.nan, torch.inf):
                if not there.lengths[-1]:
                    continue
                bad = x.flatten(1).clone()
                bad[-1, 0] = value
                before = ends.states
                with on(f"{shown(there, x)}, {value} in the last row"):
                    _check_refused(ends, bad.view(x.shape), k, there)
                    need(equal(ends.states, before), "the state has moved")
        _moved(ends, step)
    return None


def _check_refused(ends: Ends, x: Tensor, k: int, there: tw.Visit) -> None:
    try:
        ends.sender.encode(x, k, there)
    except tw.NonFiniteError:
        return
    raise Broken("it was encoded")


@requirement("damage", "sections that do not fit raise ValueError and leave the state as it is")
def damage(scheme: Scheme) -> str | None:
    ends = Ends(scheme)
    for step in map(ends.own, steps(_SOME)):
        ends.begin(step)
        for k, (there, x) in enumerate(step):
            sent = ends.send(x, k, there)
            for what, bad in _damaged(off_the_wire(sent)):
                before = ends.states
                with on(f"{shown(there, x)}, {what}"):
                    try:
                        ends.receiver.decode(bad, k, there)
                    except ValueError:
                        pass
                    else:
                        raise Broken("it was decoded")
                    need(equal(ends.states, before), "the state has moved")
            with on(shown(there, x)):
                ends.take(sent, k, there)
        ends.end()
    return None


def _damaged(sections: list[Section]) -> Iterator[tuple[str, list[Section]]]:
    *others, last = sections
    size = last.payload.numel()
    if size:
        yield "a payload cut by a byte", [*others, _with(last, last.payload[:-1])]
    longer = torch.cat([last.payload, torch.zeros(1, dtype=torch.uint8)])
    yield "a payload with a byte more", [*others, _with(last, longer)]
    short = (last.shape[0] - 1, *last.shape[1:])
    yield "a row less in its shape", [dataclasses.replace(s, shape=short) for s in sections]


def _with(section: Section, payload: Tensor) -> Section:
    return dataclasses.replace(section, payload=payload)


@requirement("state", "state_dict() has plain tensors, and ends that load it go on the same way")
def state(scheme: Scheme) -> str | None:
    ends, loaded = Ends(scheme), Ends(scheme)
    for number, step in enumerate(steps(_SOME)):
        if number:
            with on(f"the state after {counted(number, 'step')}"):
                loaded = _loaded(ends)
        found, expected = loaded.step(step), ends.step(step)
        with on(f"{_told(number, step)}, after loading"):
            need(equal(found, expected), "other bytes or values than of ends that never stopped")
            need(loaded.digests == ends.digests, "other digests than of ends that never stopped")
    return None


def _loaded(ends: Ends) -> Ends:
    """Fresh ends with the state of ``ends``."""
    fresh = Ends(ends.scheme)
    for old, new in ((ends.sender, fresh.sender), (ends.receiver, fresh.receiver)):
        kept = old.state_dict()
        wrong = [name for name, value in kept.items() if type(value) is not Tensor]
        need(not wrong, f"{', '.join(map(repr, wrong))} is no plain tensor")
        new.load_state_dict(kept)
    return fresh


@requirement("dense", "dense steps carry values as they are, and both ends agree after them")
def dense(scheme: Scheme) -> str | None:
    ends = Ends(scheme)
    for number, step in enumerate(steps(_SOME)):
        as_they_are = number % 4 < 2
        _, received = ends.step(step, dense=as_they_are)
        with on(_told(number, step)):
            one, other = ends.digests
            need(one == other, f"digests {one:x} and {other:x}")
        for (there, x), y in zip(step, received, strict=True):
            with on(f"step {number + 1}, {shown(there, x)}"):
                rows = zip(x.flatten(1), y.reshape(len(x), -1), there.lengths, strict=True)
                same = all(torch.equal(row[:n], found[:n]) for row, found, n in rows)
                need(same or not as_they_are, "other values in a dense step")
    return None


REQUIREMENTS = (agree, evaluation, nonfinite, damage, state, dense)
