"""What is asked of a codec's values: any shape and dtype, no NaN that nobody sees, no bad payload
that does more than raise."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

import thinwire as tw
from thinwire.codecs import Codec
from thinwire.contract.data import (
    FLOATS,
    SHAPES,
    encoded,
    normal,
    relative_error,
    round_trip,
    seeds,
    told,
)
from thinwire.contract.requirement import Broken, NotApplicable, need, need_spec, on, requirement

_POWERS = range(-60, 61, 6)
_ROUNDING = 0.02  # that a shorter dtype may add to the relative error


@requirement("spec", "its string, parsed, gives an equal codec with the same string")
def spec(codec: Codec) -> str | None:
    need_spec(codec, "codec", tw.codec)
    return None


@requirement("shapes", "any shape comes back, finite: none, empty, odd")
def shapes(codec: Codec) -> str | None:
    for shape in SHAPES:
        x = normal(*shape)
        with on(told(x)):
            payload = encoded(codec, x)
            need(
                payload.dtype == torch.uint8 and payload.dim() == 1,
                f"a payload of {payload.dtype} {tuple(payload.shape)}",
                "a payload that is 1-D uint8",
            )
            _check_tensor(codec.decode(payload, x.shape, x.dtype), x)
    x = normal(4, 6, 10)
    for rows in (1, 24):
        with on(told(x, rows=rows)):
            cut, alike = codec.encode(x.clone(), rows=rows), x.reshape(rows, -1)
            need(torch.equal(cut, encoded(codec, alike)), f"other bytes than of {told(alike)}")
            y = codec.decode(cut, x.shape, x.dtype, rows=rows)
            need(torch.equal(y.view_as(alike), round_trip(codec, alike)), "other values")
    return None


def _check_tensor(y: Tensor, x: Tensor) -> None:
    what = f"{y.dtype} {tuple(y.shape)}"
    need(y.shape == x.shape and y.dtype == x.dtype, what, told(x))
    need(bool(torch.isfinite(y).all()), "values that are not finite", "finite values")


@requirement("dtypes", "bfloat16, float16 and float64 come back as such, as near as float32")
def dtypes(codec: Codec) -> str | None:
    values = normal(3, 90)
    usual = relative_error(values, round_trip(codec, values))
    for dtype in FLOATS:
        x = values.to(dtype)
        with on(told(x)):
            y = round_trip(codec, x)
            _check_tensor(y, x)
            error = relative_error(x, y)
            need(
                error <= usual + _ROUNDING,
                f"a relative error of {error:.3g}, of float32 it is {usual:.3g}",
            )
    x = torch.tensor([[65504.0, -65504.0, 1.0, 65504.0] * 40], dtype=torch.float16)
    with on(f"{told(x)} with its largest values"):
        _check_tensor(round_trip(codec, x), x)
    return None


def takes_bytes(codec: Codec) -> bool:
    """Whether it carries the bytes of any dtype, which it does not look at."""
    try:
        codec.check_dtype(torch.int64)
    except ValueError:
        return False
    return True


@requirement("nonfinite", "NaN and infinity raise NonFiniteError, which names the index")
def nonfinite(codec: Codec) -> str | None:
    if takes_bytes(codec):
        raise NotApplicable("it carries the bytes of any dtype as they are")
    for shape, index in (((1, 1), (0, 0)), ((2, 3, 4), (1, 0, 3)), ((3, 10, 26), (2, 9, 25))):
        for value in (math.nan, math.inf, -math.inf):
            x = normal(*shape)
            x[index] = value
            with on(f"{told(x)} with {value} at {index}"):
                _check_refused(codec, x, index)
    x = normal(2, 30)
    x[0, 20:], x[1, 4] = torch.nan, torch.inf
    with on(f"{told(x, lengths=[20, 30])} with inf at (1, 4)"):
        _check_refused(codec, x, (1, 4), [20, 30])
    return None


def _check_refused(
    codec: Codec, x: Tensor, index: tuple[int, ...], lengths: list[int] | None = None
) -> None:
    try:
        encoded(codec, x, lengths)
    except tw.NonFiniteError as error:
        need(str(index) in str(error), f"NonFiniteError: {error}", f"the index {index} in its text")
    else:
        raise Broken("it was encoded")


@requirement("payloads", "a damaged payload raises ValueError, or decodes to a tensor of the shape")
def payloads(codec: Codec) -> str | None:
    for shape, lengths in (((1, 1), None), ((1, 8), None), ((3, 50), None), ((3, 50), [50, 7, 0])):
        x = normal(*shape)
        payload = encoded(codec, x, lengths, seeds(shape[0]))
        for what, bad in _damaged(payload):
            with on(f"{told(x, lengths=lengths)}, its payload {what}"):
                try:
                    y = codec.decode(bad, x.shape, x.dtype, None, lengths)
                except ValueError:
                    continue
                need(y.shape == x.shape, f"a tensor of {tuple(y.shape)}")
    return None


def _damaged(payload: Tensor) -> Iterator[tuple[str, Tensor]]:
    size = payload.numel()
    for cut in sorted({0, 1, size // 2, size - 1} & set(range(size))):
        yield f"cut to {cut} bytes", payload[:cut]
    for more in (1, 4, 1000):
        yield f"with {more} bytes more", torch.cat([payload, payload.new_zeros(more)])
    generator = torch.Generator().manual_seed(0)
    for value in (0, 255):
        yield f"of bytes {value}", torch.full_like(payload, value)
    for turn in range(20):
        noise = torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
        yield f"of random bytes ({turn})", noise
    for turn in range(20):
        flipped, at = payload.clone(), turn * size // 20
        flipped[at] ^= 1 << turn % 8
        yield f"with bit {turn % 8} of byte {at} flipped", flipped


@requirement("scales", "tiny and huge values come back finite, or raise NonFiniteError")
def scales(codec: Codec) -> str | None:
    x = normal(2, 64)
    errors: dict[int, float] = {}
    for power in sorted(_POWERS, key=abs):
        scaled = x * 2.0**power
        with on(f"{told(x)} times 2^{power}"):
            try:
                payload = encoded(codec, scaled)
            except tw.NonFiniteError:
                need(power != 0, "standard normal values are refused")
                continue
            y = codec.decode(payload, x.shape, x.dtype)
            need(bool(torch.isfinite(y).all()), "values that are not finite")
            errors[power] = relative_error(scaled, y)
    refused = [power for power in _POWERS if power not in errors]
    least, worst = min(errors.values()), max(errors, key=lambda power: errors[power])
    notes = []
    if errors[worst] > 1.01 * least + 1e-6:
        at = next(
            power for power in sorted(errors, key=abs) if errors[power] <= 1.01 * least + 1e-6
        )
        notes.append(
            f"the relative error is {errors[at]:.3g} at 2^{at}, {errors[worst]:.3g} at 2^{worst}"
        )
    if refused:
        notes.append(f"refused are {', '.join(f'2^{power}' for power in refused)}")
    return "; ".join(notes) or None


@requirement("direction", "decoded values do not point away from what was encoded")
def direction(codec: Codec) -> str | None:
    x = normal(4, 300)
    with on(told(x)):
        inner = float((x * round_trip(codec, x)).sum())
        need(inner >= 0, f"their inner product is {inner:.3g}: is the sign turned round?")
    return None


@requirement("constant", "rows of equal values come back finite")
def constant(codec: Codec) -> str | None:
    notes: dict[float, str] = {}
    for n in (1, 2, 7, 130):
        for value in (0.0, 1.0, -1.0, 1e-3, 100.0):
            x = torch.full((2, n), value)
            with on(f"{told(x)} of {value:g}"):
                y = round_trip(codec, x)
                need(bool(torch.isfinite(y).all()), "values that are not finite")
                largest = float(y.abs().max())
            if largest > 2 * abs(value):
                notes.setdefault(value, f"{value:g} comes back as up to {largest:.3g} (of {n})")
    return "; ".join(notes.values()) or None


@requirement("pack", "tw.unpack gives what decode gives")
def pack(codec: Codec) -> str | None:
    for shape in ((1,), (3, 5, 7)):
        x = normal(*shape)
        with on(told(x)):
            y = tw.unpack(tw.pack(x.clone(), codec))
            need(torch.equal(y, round_trip(codec, x)), "other values than decode's")
    return None


@requirement("alias", "decoded values are a tensor of their own, not a view of the payload")
def alias(codec: Codec) -> str | None:
    for shape in ((1, 8), (3, 48)):
        x = normal(*shape)
        with on(told(x)):
            payload = encoded(codec, x).clone()
            y = codec.decode(payload, x.shape, x.dtype)
            before, kept = y.clone(), payload.clone()
            payload.fill_(0)
            need(torch.equal(y, before), "the values change with the payload")
            payload.copy_(kept)
            y.fill_(7)
            need(torch.equal(payload, kept), "the payload changes with the values")
    return None


@requirement("device", "a CUDA device decodes to the bit what the CPU decodes, and encodes there")
def device(codec: Codec) -> str | None:
    if not torch.cuda.is_available():
        raise NotApplicable("there is no CUDA device here")
    note = None
    for shape in ((1, 1), (3, 5, 7), (4, 500)):
        x = normal(*shape)
        with on(f"{told(x)} on CUDA"):
            payload = encoded(codec, x, seed=seeds(shape[0]))
            y = codec.decode(payload.cuda(), x.shape, x.dtype)
            need(y.is_cuda, f"values on {y.device}")
            same = torch.equal(y.cpu(), codec.decode(payload, x.shape, x.dtype))
            need(same, "other values than on the CPU")
            there = encoded(codec, x.cuda(), seed=seeds(shape[0]))
            need(there.is_cuda, f"a payload on {there.device}")
            if not torch.equal(there.cpu(), payload):
                note = f"{told(x)} has other bytes than on the CPU"
    return note


REQUIREMENTS = (
    spec,
    shapes,
    dtypes,
    nonfinite,
    payloads,
    scales,
    direction,
    constant,
    pack,
    alias,
    device,
)
