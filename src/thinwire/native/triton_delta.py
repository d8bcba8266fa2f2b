# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"
"""The GPU programs that decode, alone or onto references, and that take the energies of changes.

Names are those of ``triton_programs``, which encodes.
"""

import triton
import triton.language as tl

from thinwire.native.triton_integer import (
    BLOCK,
    bf16_bits,
    block_size,
    decodable,
    float_of,
    fold,
    read_field,
    value_of,
)
from thinwire.native.triton_programs import SIZES, load_values, move, reference_of, row_of

_BF16_MAX = tl.constexpr(3.3895313892515355e38)
_FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def _store(pointer, v, mask):
    """Float32 values in the pointer's type, clamped to its range."""
    if pointer.dtype.element_ty == tl.int16:
        v = tl.minimum(tl.maximum(v, -_BF16_MAX), _BF16_MAX)
        tl.store(pointer, bf16_bits(v).to(tl.int16), mask=mask)
    elif pointer.dtype.element_ty == tl.float16:
        v = tl.minimum(tl.maximum(v, -_FP16_MAX), _FP16_MAX)
        tl.store(pointer, v.to(tl.float16), mask=mask)
    else:
        tl.store(pointer, v, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def read_parameters(
    payload,
    n,
    nbytes,
    table,
    groups,
    batches,
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
    """The parameters of K groups as floats, and whether they are valid."""
    row = (tl.program_id(0) // batches).to(tl.int64)
    length, start = row_of(row, n, nbytes, table, VARYING)
    group = tl.program_id(0) % batches * K + tl.arange(0, K)
    count = tl.cdiv(length, GROUP)
    there = group < count
    source = payload + start
    bits = tl.zeros((K,), tl.int32)
    for k in tl.static_range(2):
        byte = tl.load(source + 2 * group + k, mask=there, other=0).to(tl.int32)
        bits = bits | (byte << (16 + 8 * k))
    scale = float_of(bits)
    offset = tl.zeros((K,), tl.float32)
    if MODE & 1 == 0:
        bits = tl.zeros((K,), tl.int32)
        for k in tl.static_range(4):
            byte = tl.load(source + 2 * count + 4 * group + k, mask=there, other=0).to(tl.int32)
            bits = bits | (byte << (8 * k))
        offset = float_of(bits)
    at = row * groups + group
    tl.store(scales + at, scale, mask=there)
    tl.store(offsets + at, offset, mask=there)
    bad = there & (decodable(scale, offset, BITS, MODE, STEP) == 0)
    if tl.max(bad.to(tl.int32), 0) > 0:
        tl.store(status + 2, 0)


@triton.jit(do_not_specialize=SIZES)
def decode_tiles(
    payload,
    n,
    nbytes,
    table,
    groups,
    tiles,
    scales,
    offsets,
    before,
    after,
    y,
    y_stride,
    status,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    VARYING: tl.constexpr,
    KEPT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WRITES: tl.constexpr,
    LAST: tl.constexpr,
):
    """TILE values, or with LAST those of the row's last block if it is not whole (``tiles`` is 1):
    references move, y is written, with zeros beyond the row's length. Nothing is if the payload is
    invalid."""
    if tl.load(status + 2) == 0:
        return
    row = (tl.program_id(0) // tiles).to(tl.int64)
    length, start = row_of(row, n, nbytes, table, VARYING)
    first = length // BLOCK * BLOCK if LAST else tl.program_id(0) % tiles * TILE
    i = first + tl.arange(0, TILE)
    there = i < length
    at = row * groups + i // GROUP
    scale = tl.load(scales + at, mask=there, other=0)
    offset = tl.load(offsets + at, mask=there, other=0)
    block = i // BLOCK
    local = i % BLOCK
    size = block_size(length, block)
    codes = payload + start + tl.cdiv(length, GROUP) * (2 if MODE & 1 else 6)
    codes += block * (32 * BITS)
    code = tl.zeros((TILE,), tl.int32)
    for k in tl.static_range(4):
        if BITS & (8 >> k):
            code |= read_field(codes, local, size, there, BITS, 8 >> k)
    value = value_of(code, scale, offset, BITS, MODE, STEP)
    if KEPT:
        value = load_values(reference_of(before, row, KEPT, ALIGNED) + i, there) + value
        coded = there & (scale == scale)
        move(reference_of(after, row, KEPT, ALIGNED), i, value, coded, row, status, KEPT)
    if WRITES:
        _store(y + row * y_stride + i, tl.where(there, value, 0.0), i < n)


@triton.jit(do_not_specialize=SIZES)
def block_energies(
    x,
    stride,
    n,
    nbytes,
    table,
    rows,
    blocks,
    batches,
    before,
    sums,
    K: tl.constexpr,
    VARYING: tl.constexpr,
    KEPT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Sums of squares of K blocks of 256 values, of x - m and of x, into sums [2, rows, blocks]."""
    row = (tl.program_id(0) // batches).to(tl.int64)
    length, _ = row_of(row, n, nbytes, table, VARYING)
    block = tl.program_id(0) % batches * K + tl.arange(0, K)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = load_values(x + row * stride + i, i < length)
    change = v - load_values(reference_of(before, row, KEPT, ALIGNED) + i, i < length)
    at = row * blocks + block
    tl.store(sums + at, fold(change * change, K, BLOCK, 1), mask=block < blocks)
    tl.store(sums + rows * blocks + at, fold(v * v, K, BLOCK, 1), mask=block < blocks)
