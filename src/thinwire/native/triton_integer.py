# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"
"""The arithmetic of the integer codecs in Triton, one operation at a time as in ``reference``.

Programs that call these must be launched without floating-point fusion. Division and square root
are ``div_rn`` and ``sqrt_rn``, and nothing is floored by ``tl.floor``: Triton's ``/`` rounds
coarsely and its ``floor`` flushes subnormals. tests/native/test_triton.py reads the compiled code.

MODE: bit 0 symmetric, bit 1 std. STEP: of the std quantizer from 3 bits on.
"""

import triton
import triton.language as tl

from thinwire.native import noise, reference

BLOCK = tl.constexpr(256)
INFINITY = tl.constexpr(0x7F800000)
_SIGNLESS = tl.constexpr(0x7FFFFFFF)
_BF16_MAX_BITS = tl.constexpr(reference._BF16_MAX_BITS)
_TINY = tl.constexpr(reference._TINY)
_LIFT = tl.constexpr(reference._LIFT)
_LEAST_SQUARES = tl.constexpr(reference._LEAST_SQUARES)
_MOST_SQUARES = tl.constexpr(reference._MOST_SQUARES)
_LLOYD_1 = tl.constexpr(reference.LLOYD_1)
_LLOYD_2_INNER = tl.constexpr(reference.LLOYD_2[0])
_LLOYD_2_OUTER = tl.constexpr(reference.LLOYD_2[1])
_LLOYD_2_THRESHOLD = tl.constexpr(reference.LLOYD_2_THRESHOLD)
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to the nearest even integer
_MAGIC_BITS = tl.constexpr(0x4B400000)
_M1 = tl.constexpr(noise._M1)
_M2 = tl.constexpr(noise._M2 % 2**32)
_GOLDEN = tl.constexpr(noise._GOLDEN)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def finite(x):
    return (bits_of(x) & _SIGNLESS) < INFINITY


@triton.jit
def bf16_bits(x):
    """Finite float32 to bfloat16, nearest even, in the low half; overflow becomes an infinity."""
    bits = bits_of(x)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _round_up_bf16(x):
    bits = (bits_of(x) + 0xFFFF) & -0x10000
    return float_of(tl.minimum(bits, _BF16_MAX_BITS))


@triton.jit
def fold(v, ROWS: tl.constexpr, WIDTH: tl.constexpr, UNTIL: tl.constexpr):
    """v [ROWS * WIDTH]: each row's upper half is added to its lower one, until UNTIL are left."""
    for level in tl.static_range(16):
        if WIDTH >> level > UNTIL:
            v = tl.sum(tl.reshape(v, (ROWS, 2, WIDTH >> (level + 1))), axis=1)
    return tl.reshape(v, (ROWS * UNTIL,))


@triton.jit
def value_of(code, scale, offset, BITS: tl.constexpr, MODE: tl.constexpr, STEP: tl.constexpr):
    """What integer codes stand for."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    level = code.to(tl.float32)
    if MODE & 2 == 0:
        if MODE & 1:
            level = level - (HALF - 1.0)
    elif BITS == 1:
        level = tl.where(code > 0, _LLOYD_1, -_LLOYD_1)
    elif BITS == 2:
        outer = (code == 0) | (code == 3)
        level = tl.where(outer, _LLOYD_2_OUTER, _LLOYD_2_INNER)
        level = tl.where(code < 2, -level, level)
    else:
        level = (level - (HALF - 0.5)) * STEP
    value = level * scale
    if MODE & 1 == 0:
        value = value + offset
    return value


@triton.jit
def decodable(scale, offset, BITS: tl.constexpr, MODE: tl.constexpr, STEP: tl.constexpr):
    """Whether every code of a group stands for a finite value."""
    code = tl.zeros_like(bits_of(scale))
    bottom = value_of(code, scale, offset, BITS, MODE, STEP)
    top = value_of(code + ((1 << BITS) - 1), scale, offset, BITS, MODE, STEP)
    return finite(bottom) & finite(top) & (scale >= 0)


@triton.jit
def extremes(v, lane, count):
    """(lo, hi, greatest magnitude as bits) of each row of v [K, G], the first count [K] of it."""
    there = lane[None, :] < count[:, None]
    lo = tl.min(tl.where(there, v, float("inf")), axis=1) + 0.0
    hi = tl.max(tl.where(there, v, float("-inf")), axis=1) + 0.0
    peak = tl.max(tl.where(there, bits_of(v) & _SIGNLESS, 0), axis=1)
    return lo, hi, peak


@triton.jit
def _moments(v, there, inverse, size, K: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr):
    """(mean, sum of squares about it) of each row of v [K, G] * inverse."""
    v = v * inverse[:, None]
    mean = tl.zeros_like(size)
    if MODE & 1 == 0:
        mean = tl.div_rn(fold(v, K, G, 1), size)
    centred = tl.where(there, v - mean[:, None], 0.0)
    return mean, fold(centred * centred, K, G, 1)


@triton.jit
def _is_extreme(squares):
    return ((squares >= _LEAST_SQUARES) & (squares <= _MOST_SQUARES)) == 0


@triton.jit
def parameters(
    lo,
    hi,
    peak,
    mean,
    squares,
    unit,
    count,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    STEP: tl.constexpr,
):
    """(scale, offset) of groups from their extremes and moments; ``peak``: the greatest magnitude,
    as bits. The scale is NaN where the group cannot be coded."""
    TOP: tl.constexpr = (1 << (BITS - (MODE & 1))) - 1.0
    if MODE & 2:
        size = count.to(tl.float32)
        scale = _round_up_bf16(tl.sqrt_rn(tl.div_rn(squares, size)) * unit)
        offset = mean * unit + 0.0
    elif MODE & 1:
        peak_value = tl.abs(tl.maximum(hi, -lo))
        scale = _round_up_bf16(tl.div_rn(peak_value, tl.full(lo.shape, TOP, tl.float32)))
        offset = tl.zeros_like(lo)
    else:
        scale = _round_up_bf16(tl.div_rn(hi - lo, tl.full(lo.shape, TOP, tl.float32)))
        offset = lo
    fits = (peak < INFINITY) & finite(hi - lo) & decodable(scale, offset, BITS, MODE, STEP)
    return tl.where(fits, scale, float("nan")), offset


@triton.jit
def measure(
    v,
    count,
    K: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    STEP: tl.constexpr,
):
    """(scale, offset) [K] of the groups v [K, G], zero beyond the first count [K] of each."""
    lane = tl.arange(0, G)
    lo, hi, peak = extremes(v, lane, count)
    mean = tl.zeros_like(lo)
    squares = tl.zeros_like(lo)
    unit = tl.full(lo.shape, 1.0, tl.float32)
    if MODE & 2:
        there = lane[None, :] < count[:, None]
        size = tl.maximum(count, 1).to(tl.float32)
        mean, squares = _moments(v, there, unit, size, K, G, MODE)
        extreme = _is_extreme(squares)
        if tl.max(extreme.to(tl.int32), 0) > 0:
            exponent = bits_of(tl.maximum(hi, -lo)) & INFINITY
            unit = tl.where(extreme & (exponent > 0), float_of(exponent), unit)
            inverse = tl.div_rn(tl.full(unit.shape, 1.0, tl.float32), unit)
            mean, squares = _moments(v, there, inverse, size, K, G, MODE)
    return parameters(lo, hi, peak, mean, squares, unit, tl.maximum(count, 1), BITS, MODE, STEP)


@triton.jit
def step_of(scale, MODE: tl.constexpr, STEP: tl.constexpr):
    if MODE & 2:
        scale = scale * STEP
    return scale


@triton.jit
def reciprocal(step):
    """(lift, inverse): x / step is x * lift * inverse, 0 where step is 0."""
    lift = tl.where(step < _TINY, _LIFT, 1.0)
    step = step * lift
    return lift, tl.where(step > 0, tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step), 0.0)


@triton.jit
def _mix(x, key):
    """`noise.mix` on uint32; 0 is no key."""
    x = x ^ (x >> 16)
    x = x * _M1
    x = x ^ (x >> 15) ^ key
    x = x * _M2
    return x ^ (x >> 16)


@triton.jit
def noise_at(seed, i):
    """`noise.uniform` at positions i."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32) ^ _GOLDEN
    first = _mix(low ^ _mix(high, 0), 0)
    second = _mix(first ^ high, 0)
    h = _mix(i.to(tl.uint32) ^ first, second)
    return (h >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def quantize(
    v,
    scale,
    offset,
    lift,
    inverse,
    random,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Integer codes of v; lift and inverse are those of the step."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    if MODE & 2:
        d = v - offset
        positive = (bits_of(d) >= 0).to(tl.int32)
        if BITS == 1:
            code = positive
        else:
            d = float_of(bits_of(d) & _SIGNLESS)
            if BITS == 2:
                cell = (d > scale * _LLOYD_2_THRESHOLD).to(tl.int32)
            else:
                cell = tl.minimum(d * lift * inverse, HALF - 1.0).to(tl.int32)
            code = cell ^ (positive + (HALF - 1))
    else:
        BIAS: tl.constexpr = (HALF - 1) * (MODE & 1)
        TOP: tl.constexpr = (HALF if MODE & 1 else 2 * HALF) - 1
        if MODE & 1 == 0:
            v = v - offset
        t = v * lift * inverse
        if STOCHASTIC:
            t = t + random
        t = tl.minimum(tl.maximum(t, -BIAS * 1.0), TOP * 1.0)
        if STOCHASTIC:
            code = t.to(tl.int32)  # towards zero
            code = code - (code.to(tl.float32) > t).to(tl.int32) + BIAS
        else:
            code = bits_of(t + _MAGIC) - _MAGIC_BITS + BIAS
    return code


@triton.jit
def block_size(length, block):
    """Codes in a block, with those that fill it up to a multiple of 8."""
    return tl.minimum(tl.maximum(length - block * BLOCK + 7, 0) // 8 * 8, BLOCK)


@triton.jit
def field_of(code, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """The bits of codes that go into the plane of WIDTH bits; wider planes hold the lower bits."""
    SHIFT: tl.constexpr = BITS & ~(2 * WIDTH - 1)
    return (code >> SHIFT) & ((1 << WIDTH) - 1)


@triton.jit
def plane_start(size, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Bytes before the plane in a block of ``size`` codes."""
    SHIFT: tl.constexpr = BITS & ~(2 * WIDTH - 1)
    return size // 8 * SHIFT


@triton.jit
def plane_bytes(code, BLOCKS: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """The bytes [BLOCKS, 32 * WIDTH] of the plane of whole blocks."""
    field = tl.reshape(field_of(code, BITS, WIDTH), (BLOCKS, 8 // WIDTH, 32 * WIDTH))
    shift = tl.arange(0, 8 // WIDTH) * WIDTH
    return tl.sum(field << shift[None, :, None], axis=1).to(tl.uint8)


@triton.jit
def read_field(codes, local, size, mask, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """The bits of the codes at ``local`` in blocks of ``size`` that the plane of WIDTH bits has."""
    stride = size // 8 * WIDTH
    part = tl.zeros_like(local)
    for p in tl.static_range(1, 8 // WIDTH):
        part += (local >= stride * p).to(tl.int32)
    at = plane_start(size, BITS, WIDTH) + local - part * stride
    byte = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
    SHIFT: tl.constexpr = BITS & ~(2 * WIDTH - 1)
    return ((byte >> (part * WIDTH)) & ((1 << WIDTH) - 1)) << SHIFT
