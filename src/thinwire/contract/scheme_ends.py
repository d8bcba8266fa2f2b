"""What is asked of the ends of a scheme: what they send, what they return, and what they leave."""

from __future__ import annotations

import torch
from torch import Tensor

import thinwire as tw
from thinwire.contract.codec_bytes import generators_now
from thinwire.contract.data import FEATURES, POSITIONS, WIDTH, normal, shown, steps, visit
from thinwire.contract.ends import Ends, equal, on_the_wire
from thinwire.contract.requirement import Broken, need, need_spec, on, requirement
from thinwire.frame import MAX_SECTIONS
from thinwire.schemes import Scheme

_SOME = 8


@requirement("spec", "its string, parsed, gives an equal scheme with the same string")
def spec(scheme: Scheme) -> str | None:
    need_spec(scheme, "scheme", tw.scheme)
    return None


@requirement("shapes", "a receiver returns finite floats of the shape that was sent")
def shapes(scheme: Scheme) -> str | None:
    ends = Ends(scheme)
    for step in steps(_SOME):
        _, received = ends.step(step)
        for (there, x), y in zip(step, received, strict=True):
            with on(shown(there, x)):
                need(isinstance(y, Tensor), f"a {type(y).__name__}")
                fits = y.shape == x.shape and y.dtype.is_floating_point
                need(fits, f"{y.dtype} {tuple(y.shape)}")
                need(bool(torch.isfinite(y).all()), "values that are not finite")
    return None


@requirement("direction", "what is received does not point away from what was sent")
def direction(scheme: Scheme) -> str | None:
    ends, inner = Ends(scheme), 0.0
    for step in steps(_SOME):
        _, received = ends.step(step)
        for (there, x), y in zip(step, received, strict=True):
            rows = len(there.lengths)
            given, found = (each.reshape(rows, -1).double() for each in (x, y))
            inner += sum(float(given[r, :n] @ found[r, :n]) for r, n in enumerate(there.lengths))
    need(inner >= 0, f"their inner product is {inner:.3g}: is a sign turned round?")
    return None


@requirement("dtypes", "bfloat16, float16 and float64 are coded as float32 is")
def dtypes(scheme: Scheme) -> str | None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        ends = Ends(scheme)
        for step in steps(_SOME):
            given = [(there, x.to(dtype)) for there, x in step]
            _, received = ends.step(given)
            for (there, x), y in zip(given, received, strict=True):
                with on(shown(there, x)):
                    need(y.numel() == x.numel(), f"{y.numel()} values")
                    need(bool(torch.isfinite(y).all()), "values that are not finite")
    return None


@requirement("padding", "values beyond a row's length change no byte and are received as zeros")
def padding(scheme: Scheme) -> str | None:
    ends, other = Ends(scheme), Ends(scheme)
    for step in steps(_SOME):
        padded = []
        for there, x in step:
            x = x.flatten(1).clone()
            for row, size in enumerate(there.lengths):
                x[row, size:] = 1e6
            padded.append((there, x.view(-1, POSITIONS, FEATURES)))
        (sent, received), (others, _) = ends.step(step), other.step(padded)
        for k, (there, x) in enumerate(step):
            with on(shown(there, x)):
                need(sent[k] == others[k], "the bytes depend on what is beyond the length")
                for row, size in enumerate(there.lengths):
                    rest = received[k].reshape(len(there.lengths), WIDTH)[row, size:]
                    need(not rest.any(), f"row {row} has values beyond its length")
    return None


@requirement("sizes", "at most row_nbytes are sent of a row, and longer rows never need fewer")
def sizes(scheme: Scheme) -> str | None:
    ends = Ends(scheme)
    for step in map(ends.own, steps(_SOME)):
        ends.begin(step)
        for k, (there, x) in enumerate(step):
            with on(shown(there, x)):
                sections = ends.sender.encode(x.clone(), k, there)
                total = sum(section.payload.numel() for section in sections)
                most = len(there.lengths) * scheme.row_nbytes(WIDTH, torch.float32)
                need(total <= most, f"{total} payload bytes, {most} by row_nbytes")
                found = len(sections)
                need(1 <= found <= MAX_SECTIONS, f"{found} sections", f"1 to {MAX_SECTIONS}")
                ends.receiver.decode(sections, k, there)
        ends.end()
    before = 0
    for n in (*range(70), 127, 128, 129, 1000):
        with on(f"row_nbytes({n}, torch.float32)"):
            size = scheme.row_nbytes(n, torch.float32)
            need(type(size) is int and size >= 0, f"{size!r} is no number of bytes")
            need(size >= before, f"{size}, but {before} for a shorter row")
            before = size
    return None


@requirement("out", "the bytes are the same where `out` has room for them")
def out(scheme: Scheme) -> str | None:
    ends, other = Ends(scheme), Ends(scheme)
    for step in map(ends.own, steps(_SOME)):
        ends.begin(step)
        other.begin(step)
        for k, (there, x) in enumerate(step):
            most = len(there.lengths) * scheme.row_nbytes(WIDTH, torch.float32)
            with on(shown(there, x)):
                expected = other.send(x, k, there)
                # what takes more than it says fails elsewhere
                room = torch.full((max(most, len(expected)) + 40,), 171, dtype=torch.uint8)
                sent = ends.send(x, k, there, room[20:-20])
                need(sent == expected, "other bytes than without it")
                around = torch.cat([room[:20], room[-20:]])
                need(bool((around == 171).all()), "bytes around it were written")
                ends.take(sent, k, there)
                other.take(sent, k, there)
        ends.end()
        other.end()
    return None


@requirement("keys", "without sample ids it works, or, if it says needs_keys, raises ValueError")
def keys(scheme: Scheme) -> str | None:
    ends, there = Ends(scheme), visit(None, [WIDTH])
    x = normal(1, POSITIONS, FEATURES)
    with on(shown(there, x)):
        if not scheme.needs_keys:
            ends.step([(there, x)])
            return None
        try:
            ends.step([(there, x)])
        except ValueError:
            return None
        raise Broken("it was coded, though needs_keys is true")


@requirement("repeatable", "two senders that are given the same send the same")
def repeatable(scheme: Scheme) -> str | None:
    ends, other = Ends(scheme), Ends(scheme)
    for number, step in enumerate(steps(2 * _SOME)):
        found, expected = ends.step(step, shuffled=number), other.step(step, shuffled=number)
        with on(shown(*step[0])):
            need(equal(found, expected), "other bytes or values")
    return None


@requirement("generators", "the global generators of torch, numpy and Python are left alone")
def generators(scheme: Scheme) -> str | None:
    ends = Ends(scheme)
    for step in steps(_SOME):
        before = generators_now()
        ends.step(step)
        with on(shown(*step[0])):
            moved = [name for name, state in generators_now().items() if state != before[name]]
            need(not moved, f"the generator of {', '.join(moved)} has moved")
    return None


@requirement("input", "a sender neither changes nor keeps the tensor that it is given")
def unchanged(scheme: Scheme) -> str | None:
    ends, other = Ends(scheme), Ends(scheme)
    for step in map(ends.own, steps(_SOME)):
        ends.begin(step)
        other.begin(step)
        for k, (there, x) in enumerate(step):
            with on(shown(there, x)):
                given = x.clone()
                sent = on_the_wire(ends.sender.encode(given, k, there))
                need(torch.equal(given, x), "it was changed")
                given.zero_()
                need(sent == other.send(x, k, there), "what was sent depends on later changes")
                ends.take(sent, k, there)
                other.take(sent, k, there)
        ends.end()
        other.end()
        with on(shown(*step[0])):
            need(equal(ends.states, other.states), "the state has changed with it, afterwards")
    return None


@requirement("alias", "what a receiver returns is no part of its state")
def alias(scheme: Scheme) -> str | None:
    ends, other = Ends(scheme), Ends(scheme)
    for step in steps(_SOME):
        found, expected = ends.step(step), other.step(step)
        with on(shown(*step[0])):
            need(equal(found, expected), "the state has changed with what was returned")
        for y in found[1]:
            y.fill_(7)
    return None


REQUIREMENTS = (
    spec,
    shapes,
    direction,
    dtypes,
    padding,
    sizes,
    out,
    keys,
    repeatable,
    generators,
    unchanged,
    alias,
)
