"""What is asked of a codec's bytes: that they follow from the values, and from nothing else."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.contract.data import FLOATS, encoded, normal, round_trip, seeds, told
from thinwire.contract.requirement import NotApplicable, need, on, requirement

_LENGTHS = ([0, 1], [5, 2], [1, 40], [40, 17, 0])
_LONG = 40_000  # values, which torch's reductions share out among threads


@requirement("rows", "each row has the bytes and the values that it has alone, whatever others do")
def rows(codec: Codec) -> str | None:
    if codec.together:
        raise NotApplicable("it says that it codes rows together")
    for count, n in ((2, 1), (2, 9), (3, 40), (5, 300), (20, 5)):
        x = normal(count, n) * torch.logspace(-3, 3, count)[:, None]
        with on(told(x)):
            whole = encoded(codec, x, seed=seeds(count))
            _same(whole, _alone(codec, x, [n] * count))
            y = codec.decode(whole, x.shape, x.dtype)
            for row in range(count):
                one = slice(row, row + 1)
                alone = round_trip(codec, x[one], seed=seeds(count)[one])
                need(torch.equal(y[one], alone), f"row {row} decodes to other values than alone")
    for lengths in _LENGTHS:
        x = normal(len(lengths), max(lengths))
        with on(told(x, lengths=lengths)):
            whole = encoded(codec, x, lengths, seeds(len(lengths)))
            _same(whole, _alone(codec, x, lengths))
    x = normal(2, _LONG)
    if torch.equal(encoded(codec, x), torch.cat([encoded(codec, row[None]) for row in x])):
        return None
    return f"of rows of {_LONG:,} values the last bits depend on the batch, as torch's sums do"


def _alone(codec: Codec, x: Tensor, lengths: list[int]) -> Tensor:
    """The payloads of the rows, each cut to its length and coded alone."""
    own = seeds(len(lengths))
    parts = [(x[i : i + 1, :size], own[i : i + 1]) for i, size in enumerate(lengths)]
    return torch.cat([encoded(codec, row, seed=seed) for row, seed in parts])


def _same(found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape:
        need(False, f"{found.numel()} bytes, {expected.numel()} alone")
    unlike = torch.nonzero(found != expected)
    where = int(unlike[0]) if len(unlike) else 0
    need(not len(unlike), f"byte {where} is another one alone; compute nothing across rows")


@requirement("lengths", "values beyond a row's length cost nothing and decode to zero")
def lengths(codec: Codec) -> str | None:
    for sizes in _LENGTHS:
        x = normal(len(sizes), max(sizes))
        padded = x.clone()
        for row, size in enumerate(sizes):
            padded[row, size:] = torch.nan
        own = seeds(len(sizes))
        with on(told(x, lengths=sizes)):
            one, other = (encoded(codec, each, sizes, own) for each in (x, padded))
            need(torch.equal(one, other), "the bytes depend on what is beyond the length")
            y = codec.decode(one, x.shape, x.dtype, None, sizes)
            for row, size in enumerate(sizes):
                need(not y[row, size:].any(), f"row {row} has values beyond its length")
                if codec.together:
                    continue
                alone = round_trip(codec, x[row : row + 1, :size], seed=own[row : row + 1])
                what = f"row {row} decodes to other values than alone"
                need(torch.equal(y[row : row + 1, :size], alone), what)
    return None


@requirement(
    "sizes", "a payload has max_nbytes, or less if not fixed_size; a longer row takes no less"
)
def sizes(codec: Codec) -> str | None:
    for count, n in ((1, 0), (1, 1), (2, 9), (3, 300)):
        x = normal(count, n)
        with on(told(x)):
            most, found = codec.max_nbytes(x.shape, x.dtype), encoded(codec, x).numel()
            fits = found == most if codec.fixed_size else found <= most
            need(fits, f"{found} bytes, {most} by max_nbytes")
        for size in (0, n // 2, n):
            with on(told(x, lengths=[size] * count)):
                part = encoded(codec, x, [size] * count).numel()
                bound = count * codec.most_row_nbytes(n, x.dtype)
                need(part <= bound, f"{part} bytes, {bound} by most_row_nbytes")
    for dtype in FLOATS:
        before = 0
        for n in (*range(70), *range(120, 140), 255, 256, 257, 1000, 1023, 1024, 1025):
            with on(f"{n} values of {dtype}"):
                size, most = codec.row_nbytes(n, dtype), codec.most_row_nbytes(n, dtype)
                need(type(size) is int and size >= 0, f"{size!r} is no number of bytes")
                before = max(before, size)
                need(most >= before, f"{most} by most_row_nbytes, but {before} for a shorter row")
    return None


@requirement("strides", "the bytes do not depend on how the tensor lies in memory")
def strides(codec: Codec) -> str | None:
    x = normal(2, 6, 5, 4)
    expected = encoded(codec, x)
    every_other = torch.empty(2, 6, 5, 8)[..., ::2].copy_(x)
    views = {
        "transposed": x.transpose(1, 3).contiguous().transpose(1, 3),
        "every other value": every_other,
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "at an offset": torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x),
        "a negated view": torch._neg_view(-x),
    }
    for name, view in views.items():
        with on(f"{told(x)}, {name}"):
            need(torch.equal(codec.encode(view), expected), "other bytes than of a contiguous copy")
    row = normal(1, 6).expand(3, 6)
    with on(f"{told(row)}, one row expanded"):
        need(torch.equal(codec.encode(row), encoded(codec, row)), "other bytes than of a copy")
    return None


@requirement("input", "encoding leaves its input as it is, and takes no part in the backward pass")
def unchanged(codec: Codec) -> str | None:
    for dtype in FLOATS:
        for sizes in (None, [50, 20, 0]):
            x = normal(3, 50).to(dtype).requires_grad_()
            before = x.detach().clone()
            with on(told(x, lengths=sizes)):
                payload = codec.encode(x, lengths=sizes)
                need(torch.equal(x.detach(), before), "the input was changed")
                need(x.requires_grad and x.grad is None, "the input's gradient was touched")
                need(not payload.requires_grad, "the payload requires a gradient")
    return None


@requirement("out", "payloads and values go into `out` where it is given, and nowhere else")
def out(codec: Codec) -> str | None:
    x = normal(3, 50)
    expected = encoded(codec, x)
    for offset in (0, 1, 3):
        room = torch.full((codec.max_nbytes(x.shape, x.dtype) + 20,), 171, dtype=torch.uint8)
        with on(f"{told(x)}, encoded into bytes {offset} and on of a buffer"):
            view = codec.encode(x.clone(), out=room[offset:])
            need(view.data_ptr() == room.data_ptr() + offset, "the payload is elsewhere")
            need(torch.equal(view, expected), "other bytes than without it")
            end = offset + codec.max_nbytes(x.shape, x.dtype)
            around = torch.cat([room[:offset], room[end:]])
            need(bool((around == 171).all()), "bytes around were written")
    values = codec.decode(expected, x.shape, x.dtype)
    rooms = {
        "contiguous": torch.full((3, 50), torch.nan),
        "transposed": torch.full((50, 3), torch.nan).t(),
        "at an offset": torch.full((151,), torch.nan)[1:].view(3, 50),
    }
    for name, into in rooms.items():
        with on(f"{told(x)}, decoded into a {name} tensor"):
            y = codec.decode(expected, x.shape, x.dtype, out=into)
            need(y is into, "what is returned is another tensor")
            need(torch.equal(into, values), "other values than without it")
    return None


@requirement("address", "a payload may lie at any address, and in any stride")
def address(codec: Codec) -> str | None:
    for shape in ((1, 8), (3, 50)):
        x = normal(*shape)
        payload = encoded(codec, x)
        expected = codec.decode(payload, x.shape, x.dtype)
        for offset in (1, 2, 3):
            moved = torch.empty(payload.numel() + offset, dtype=torch.uint8)[offset:]
            with on(f"{told(x)}, its payload at byte {offset}"):
                y = codec.decode(moved.copy_(payload), x.shape, x.dtype)
                need(torch.equal(y, expected), "other values than at byte 0")
        strided = torch.empty(2 * payload.numel(), dtype=torch.uint8)[::2].copy_(payload)
        with on(f"{told(x)}, its payload every other byte"):
            y = codec.decode(strided, x.shape, x.dtype)
            need(torch.equal(y, expected), "other values than of contiguous bytes")
    return None


@requirement("repeatable", "the same values and seeds give the same bytes, these the same values")
def repeatable(codec: Codec) -> str | None:
    for n in (10, 1500):
        x = normal(3, n)
        with on(told(x)):
            payload = encoded(codec, x, seed=seeds(3))
            y = codec.decode(payload, x.shape, x.dtype)
            for _ in range(3):
                again = encoded(codec, x, seed=seeds(3))
                need(torch.equal(payload, again), "other bytes the next time")
                need(
                    torch.equal(y, codec.decode(payload, x.shape, x.dtype)),
                    "other values the next time",
                )
    return None


@requirement("generators", "the global generators of torch, numpy and Python are left alone")
def generators(codec: Codec) -> str | None:
    x = normal(4, 300)
    before = generators_now()
    with on(told(x, seed=3)):
        round_trip(codec, x, seed=3)
        moved = [name for name, state in generators_now().items() if state != before[name]]
        need(not moved, f"the generator of {', '.join(moved)} has moved")
    return None


def generators_now() -> dict[str, object]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, object] = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "Python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["CUDA"] = torch.cuda.get_rng_state().tolist()
    return states


@requirement("seeds", "the bytes depend on a row's seed if the codec is stochastic, else on none")
def seeded(codec: Codec) -> str | None:
    x = normal(2, 400)
    with on(told(x, seed="1 and 2")):
        differ = not torch.equal(encoded(codec, x, seed=1), encoded(codec, x, seed=2))
        if codec.stochastic:
            need(differ, "the same bytes for other seeds, though it is stochastic")
        else:
            need(not differ, "other bytes for other seeds, though it is not stochastic")
    with on(told(x, seed="9, and 9 for each row")):
        each = torch.full((2,), 9, dtype=torch.int64)
        one = encoded(codec, x, seed=9)
        need(torch.equal(one, encoded(codec, x, seed=each)), "one seed is not that of all rows")
    return None


REQUIREMENTS = (
    rows,
    lengths,
    sizes,
    strides,
    unchanged,
    out,
    address,
    repeatable,
    generators,
    seeded,
)
