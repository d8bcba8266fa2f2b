# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"
"""The GPU programs of the integer codecs and of the AQ-SGD step, which ``triton_kernels`` launches.

A row has ``length`` values in groups of GROUP; ``i``, ``group`` and ``block`` count within it.
``table`` [rows, 2] holds each row's length and first byte where they vary. bfloat16 values come and
go as int16. ``scales`` and ``offsets`` [rows, groups] hold parameters as float32, a NaN scale where
a group cannot be coded. What goes wrong is left in ``status``, which is FINE elsewhere: [0] the
place (row * n + i) of the first value of the first bad group, [1] the first row with a sum that
cannot be kept, [2] 0 if the payload is invalid.

KEPT says how references are kept: 0 none, 1 float32, 2 bfloat16, at the addresses ``before`` and,
once moved, ``after``.
"""

import triton
import triton.language as tl

from thinwire.native.triton_integer import (
    BLOCK,
    bf16_bits,
    bits_of,
    block_size,
    extremes,
    field_of,
    finite,
    float_of,
    fold,
    measure,
    noise_at,
    parameters,
    plane_bytes,
    plane_start,
    quantize,
    reciprocal,
    step_of,
    value_of,
)

FINE = tl.constexpr(2**63 - 1)

#: Arguments whose values need no program of their own; a stride tells whether rows are aligned.
SIZES = ("n", "nbytes", "groups", "tiles", "batches", "parts", "blocks", "rows")


@triton.jit
def load_values(pointer, mask):
    """Values as float32, 0 where masked."""
    v = tl.load(pointer, mask=mask, other=0)
    if pointer.dtype.element_ty == tl.int16:
        v = float_of(v.to(tl.int32) << 16)
    return v.to(tl.float32)


@triton.jit
def row_of(row, length, nbytes, table, VARYING: tl.constexpr):
    """(values, first byte) of a row."""
    if VARYING:
        length = tl.load(table + 2 * row).to(tl.int32)
        start = tl.load(table + 2 * row + 1)
    else:
        start = row * nbytes
    return length, start


@triton.jit
def reference_of(addresses, row, KEPT: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to a row's reference."""
    address = tl.load(addresses + row)
    if KEPT == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _source(x, stride, before, row, i, mask, KEPT: tl.constexpr, ALIGNED: tl.constexpr):
    """What is coded: x, or x - m."""
    v = load_values(x + row * stride + i, mask)
    if KEPT:
        v = v - load_values(reference_of(before, row, KEPT, ALIGNED) + i, mask)
    return v


@triton.jit
def move(pointer, i, y, mask, row, status, KEPT: tl.constexpr):
    """y into the reference, if that can hold it; else into the status."""
    if KEPT == 2:
        kept = bf16_bits(y)
        fits = (kept & 0x7F80) != 0x7F80
        tl.store(pointer + i, kept.to(tl.int16), mask=mask)
    else:
        fits = finite(y)
        tl.store(pointer + i, y, mask=mask)
    unfit = tl.max((mask & (fits == 0)).to(tl.int32), 0)
    tl.atomic_min(status + 1, row, mask=unfit > 0)


@triton.jit
def _put_parameters(
    out,
    scales,
    offsets,
    status,
    scale,
    offset,
    group,
    there,
    row,
    groups,
    count,
    place,
    MODE: tl.constexpr,
):
    """Scales and offsets [K] of the groups that are `there`: bytes of the row of `count` groups at
    `out`, floats in the scratch rows of `groups`. `place`: of each group's first value."""
    at = row * groups + group
    tl.store(scales + at, scale, mask=there)
    tl.store(offsets + at, offset, mask=there)
    bits = bits_of(scale)
    for k in tl.static_range(2):
        tl.store(out + 2 * group + k, (bits >> (16 + 8 * k)).to(tl.uint8), mask=there)
    if MODE & 1 == 0:
        bits = bits_of(offset)
        for k in tl.static_range(4):
            tl.store(out + 2 * count + 4 * group + k, (bits >> (8 * k)).to(tl.uint8), mask=there)
    first = tl.min(tl.where(there & (scale != scale), place, FINE), 0)
    tl.atomic_min(status, first, mask=first < FINE)


@triton.jit
def _random(seeds, row, i, STOCHASTIC: tl.constexpr):
    """What stochastic rounding adds at positions i."""
    random = 0.0
    if STOCHASTIC:
        random = noise_at(tl.load(seeds + row), i)
    return random


@triton.jit
def _put_whole_blocks(codes, code, first, whole, BLOCKS: tl.constexpr, BITS: tl.constexpr):
    """The planes of BLOCKS blocks from ``first`` on, as far as the row has ``whole`` ones."""
    block = first + tl.arange(0, BLOCKS)[:, None]
    for k in tl.static_range(4):
        if BITS & (8 >> k):
            at = block * (32 * BITS) + plane_start(256, BITS, 8 >> k)
            at += tl.arange(0, 32 * (8 >> k))[None, :]
            tl.store(codes + at, plane_bytes(code, BLOCKS, BITS, 8 >> k), mask=block < whole)


@triton.jit(do_not_specialize=SIZES)
def measure_groups(
    x,
    stride,
    n,
    nbytes,
    table,
    groups,
    batches,
    out,
    scales,
    offsets,
    before,
    status,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    VARYING: tl.constexpr,
    KEPT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Parameters of K groups, each of at most WIDTH values."""
    row = (tl.program_id(0) // batches).to(tl.int64)
    length, start = row_of(row, n, nbytes, table, VARYING)
    group = tl.program_id(0) % batches * K + tl.arange(0, K)
    count = tl.minimum(tl.maximum(length - group * GROUP, 0), GROUP)
    lane = tl.arange(0, WIDTH)
    i = group[:, None] * GROUP + lane[None, :]
    v = _source(x, stride, before, row, i, lane[None, :] < count[:, None], KEPT, ALIGNED)
    scale, offset = measure(v, count, K, WIDTH, BITS, MODE, STEP)
    _put_parameters(
        out + start, scales, offsets, status, scale, offset, group, count > 0, row, groups,
        tl.cdiv(length, GROUP), row * n + group * GROUP, MODE,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def part_extremes(
    x,
    stride,
    n,
    nbytes,
    table,
    groups,
    parts,
    before,
    lows,
    highs,
    peaks,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    VARYING: tl.constexpr,
    KEPT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Extremes of TILE values into lows, highs, peaks [rows, groups, parts]."""
    at = tl.program_id(0).to(tl.int64)
    row = at // parts // groups
    length, _ = row_of(row, n, nbytes, table, VARYING)
    group = (at // parts % groups).to(tl.int32)
    first = (at % parts).to(tl.int32) * TILE
    end = tl.minimum(length - group * GROUP, GROUP)
    lane = tl.arange(0, TILE)
    i = group * GROUP + first + lane
    v = _source(x, stride, before, row, i, first + lane < end, KEPT, ALIGNED)
    lo, hi, peak = extremes(v[None, :], lane, tl.full((1,), 0, tl.int32) + (end - first))
    one = at + tl.arange(0, 1)
    tl.store(lows + one, lo)
    tl.store(highs + one, hi)
    tl.store(peaks + one, peak)


@triton.jit(do_not_specialize=SIZES)
def part_sums(
    x,
    stride,
    n,
    nbytes,
    table,
    groups,
    parts,
    before,
    means,
    units,
    wanted,
    sums,
    GROUP: tl.constexpr,
    HEIGHT: tl.constexpr,
    LANES: tl.constexpr,
    VARYING: tl.constexpr,
    KEPT: tl.constexpr,
    ALIGNED: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """The first levels of the halving sums of values, or of squares about the mean, of groups that
    are wanted: sums [rows, groups, parts * LANES], each of HEIGHT values that far apart."""
    at = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + at // parts) == 0:
        return
    row = at // parts // groups
    length, _ = row_of(row, n, nbytes, table, VARYING)
    group = (at // parts % groups).to(tl.int32)
    end = tl.minimum(length - group * GROUP, GROUP)
    flat = tl.arange(0, HEIGHT * LANES)
    lane = flat // LANES * (parts * LANES) + (at % parts).to(tl.int32) * LANES + flat % LANES
    there = lane < end
    v = _source(x, stride, before, row, group * GROUP + lane, there, KEPT, ALIGNED)
    v = v * tl.div_rn(1.0, tl.load(units + at // parts))
    if SQUARES:
        v = tl.where(there, v - tl.load(means + at // parts), 0.0)
        v = v * v
    tl.store(sums + at * LANES + tl.arange(0, LANES), fold(v, 1, HEIGHT * LANES, LANES))


@triton.jit(do_not_specialize=SIZES)
def finish_groups(
    lows,
    highs,
    peaks,
    means,
    squares,
    units,
    n,
    nbytes,
    table,
    groups,
    batches,
    out,
    scales,
    offsets,
    status,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    VARYING: tl.constexpr,
):
    """Parameters of K groups from their extremes and moments [rows, groups]."""
    row = (tl.program_id(0) // batches).to(tl.int64)
    length, start = row_of(row, n, nbytes, table, VARYING)
    group = tl.program_id(0) % batches * K + tl.arange(0, K)
    there = group < tl.cdiv(length, GROUP)
    count = tl.minimum(length - tl.where(there, group, 0) * GROUP, GROUP)
    at = row * groups + group
    lo = tl.load(lows + at, mask=there, other=0)
    hi = tl.load(highs + at, mask=there, other=0)
    peak = tl.load(peaks + at, mask=there, other=0)
    mean = tl.load(means + at, mask=there, other=0)
    sum_of_squares = tl.load(squares + at, mask=there, other=0)
    unit = tl.load(units + at, mask=there, other=1)
    scale, offset = parameters(
        lo, hi, peak, mean, sum_of_squares, unit, tl.maximum(count, 1), BITS, MODE, STEP
    )
    _put_parameters(
        out + start, scales, offsets, status, scale, offset, group, there, row, groups,
        tl.cdiv(length, GROUP), row * n + group * GROUP, MODE,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def encode_tiles(
    x,
    stride,
    n,
    nbytes,
    table,
    seeds,
    groups,
    tiles,
    out,
    scales,
    offsets,
    before,
    after,
    status,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    VARYING: tl.constexpr,
    KEPT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """TILE values in groups of a power of two that divides it: parameters, and the codes of whole
    blocks of 256, whose references move. The rest of a row is left to encode_blocks."""
    K: tl.constexpr = TILE // GROUP
    row = (tl.program_id(0) // tiles).to(tl.int64)
    length, start = row_of(row, n, nbytes, table, VARYING)
    tile = tl.program_id(0) % tiles
    i = tile * TILE + tl.arange(0, TILE)
    v = load_values(x + row * stride + i, i < length)
    if KEPT:
        m = load_values(reference_of(before, row, KEPT, ALIGNED) + i, i < length)
        v = v - m
    v = tl.reshape(v, (K, GROUP))
    group = tile * K + tl.arange(0, K)
    count = tl.minimum(tl.maximum(length - group * GROUP, 0), GROUP)
    scale, offset = measure(v, count, K, GROUP, BITS, MODE, STEP)
    all_groups = tl.cdiv(length, GROUP)
    _put_parameters(
        out + start, scales, offsets, status, scale, offset, group, count > 0, row, groups,
        all_groups, row * n + group * GROUP, MODE,
    )  # fmt: skip
    lift, inverse = reciprocal(step_of(scale, MODE, STEP))
    random = _random(seeds, row, tl.reshape(i, (K, GROUP)), STOCHASTIC)
    scale, offset = scale[:, None], offset[:, None]
    code = quantize(
        v, scale, offset, lift[:, None], inverse[:, None], random, BITS, MODE, STOCHASTIC
    )
    whole = length // BLOCK
    codes = out + start + all_groups * (2 if MODE & 1 else 6)
    _put_whole_blocks(codes, code, tile * (TILE // BLOCK), whole, TILE // BLOCK, BITS)
    if KEPT:
        y = m + tl.reshape(value_of(code, scale, offset, BITS, MODE, STEP), (TILE,))
        coded = tl.reshape(tl.broadcast_to(scale == scale, (K, GROUP)), (TILE,))
        mask = coded & (i < whole * BLOCK)
        move(reference_of(after, row, KEPT, ALIGNED), i, y, mask, row, status, KEPT)


@triton.jit(do_not_specialize=SIZES)
def encode_blocks(
    x,
    stride,
    n,
    nbytes,
    table,
    seeds,
    groups,
    blocks,
    out,
    scales,
    offsets,
    before,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    VARYING: tl.constexpr,
    KEPT: tl.constexpr,
    ALIGNED: tl.constexpr,
    LAST: tl.constexpr,
):
    """The codes of one block, of groups whose parameters are known; LAST: of the row's last block,
    if it is not whole (``blocks`` is 1). Each plane gathers its values from where they lie."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    length, start = row_of(row, n, nbytes, table, VARYING)
    block = length // BLOCK if LAST else tl.program_id(0) % blocks
    size = block_size(length, block)
    codes = out + start + tl.cdiv(length, GROUP) * (2 if MODE & 1 else 6) + block * (32 * BITS)
    for k in tl.static_range(4):
        if BITS & (8 >> k):
            # byte j of the plane has the fields of values j, j + hop, j + 2 hop, …
            hop = size // 8 * (8 >> k)
            part = tl.arange(0, 1 << k)[:, None]
            j = tl.arange(0, 32 * (8 >> k))
            i = block * BLOCK + j[None, :] + part * hop
            there = (j < hop)[None, :] & (i < length)
            v = _source(x, stride, before, row, i, there, KEPT, ALIGNED)
            at = row * groups + i // GROUP
            scale = tl.load(scales + at, mask=there, other=0)
            offset = tl.load(offsets + at, mask=there, other=0)
            lift, inverse = reciprocal(step_of(scale, MODE, STEP))
            random = _random(seeds, row, i, STOCHASTIC)
            code = quantize(v, scale, offset, lift, inverse, random, BITS, MODE, STOCHASTIC)
            byte = tl.sum(field_of(tl.where(there, code, 0), BITS, 8 >> k) << (part * (8 >> k)), 0)
            at = codes + plane_start(size, BITS, 8 >> k) + j
            tl.store(at, byte.to(tl.uint8), mask=j < hop)
