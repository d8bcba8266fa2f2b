"""The eager twin: what every kernel of the integer codecs must equal, bit for bit.

Only single-operation torch kernels are used (no fused multiply-add, ``addcmul``, ``lerp`` or
``add(alpha=)``, whose results differ between ISAs), and every reduction other than min and max
follows the written halving tree of ``tree_sum``. Results are therefore the same on every ISA.

A row of n values in groups of g (the last may be short) is encoded as

    scales   bfloat16, one a group, rounded up
    offsets  float32, one a group            (affine formats only)
    codes    ``bits`` each, packed as planes  (see ``planes``)

Range scale, affine: offset = min, scale = (max - min) / (2**b - 1), value = offset + code * scale.
Range scale, symmetric: scale = max|x| / (2**(b-1) - 1), value = (code - (2**(b-1) - 1)) * scale.
Std scale: offset = mean (0 if symmetric), scale = the standard deviation (root mean square if
symmetric), value = offset + level(code) * scale, with the Gaussian Lloyd-Max levels at 1 and 2
bits and the best uniform Gaussian quantizer above (J. Max, "Quantizing for minimum distortion",
1960; the constants are recomputed by tests/native/test_reference.py).

With ``hadamard`` it is the rotated groups that are encoded, and what is decoded is rotated back
(see ``hadamard``). No code may then stand for more than 2**(127 - k), for 2**k the largest power
of two within a group: sums of 2**k such values are finite.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from thinwire.native import hadamard, noise, planes

_BF16_MAX_BITS = 0x7F7F0000
#: Groups with a scale below this are multiplied by 2**64 first: 1/scale would overflow.
_TINY = 2.0**-60
_LIFT = 2.0**64
#: Sums of squares within these bounds need no scaling of the values.
_LEAST_SQUARES = 2.0**-60
_MOST_SQUARES = 2.0**100

LLOYD_1 = 0.7978845608028654  # sqrt(2 / pi)
LLOYD_2 = (0.4527800, 1.5104176)
LLOYD_2_THRESHOLD = 0.9815988
#: Step of the best uniform quantizer of a unit Gaussian, by bits.
UNIFORM_STEP = {
    3: 0.5860194,
    4: 0.3352006,
    5: 0.1881388,
    6: 0.1040630,
    7: 0.05686768,
    8: 0.03076238,
}


@dataclasses.dataclass(frozen=True)
class IntegerFormat:
    """How a row of values becomes integers. ``group`` = 0 stands for the whole row."""

    bits: int
    group: int
    symmetric: bool
    stochastic: bool
    std: bool
    hadamard: bool = False

    def groups(self, n: int) -> int:
        """Groups in a row of ``n`` values."""
        return -(-n // self.group) if self.group else int(n > 0)

    def limit(self, n: int) -> float:
        """The greatest magnitude that a code in a row of ``n`` > 0 values may stand for."""
        if not self.hadamard:
            return torch.finfo(torch.float32).max
        return 2.0 ** (128 - (self.group or n).bit_length())


def row_nbytes(n: int, fmt: IntegerFormat) -> int:
    """Bytes of one encoded row of ``n`` values."""
    parameters = 2 if fmt.symmetric else 6
    return fmt.groups(n) * parameters + planes.packed_nbytes(n, fmt.bits)


def encode_rows(x: Tensor, fmt: IntegerFormat, seeds: Tensor, out: Tensor) -> bool:
    """Encode ``x`` [rows, n] float32 into ``out`` [rows, row_nbytes(n)] uint8.

    ``seeds`` [rows] int64 feed stochastic rounding. Returns False, with ``out`` undefined, if a
    value is not finite or a group's range exceeds float32 (with hadamard: ``fmt.limit``).
    """
    n = x.shape[1]
    if x.numel() == 0:
        return True
    group = fmt.group or n
    if fmt.hadamard:
        x = hadamard.rotate(x, group)
    random = noise.uniform(seeds, n) if fmt.stochastic else None
    scales, offsets, codes = [], [], []
    for start, end, size in _spans(n, group):
        part = x[:, start:end].unflatten(1, (-1, size))
        rand = None if random is None else random[:, start:end].unflatten(1, (-1, size))
        # not aminmax, which is ten times slower; + 0.0, since the least of 0.0 and -0.0 is
        # either, depending on the ISA
        lo, hi = part.amin(dim=2) + 0.0, part.amax(dim=2) + 0.0
        if not bool(torch.isfinite(hi - lo).all()):
            return False
        if fmt.std:
            scale, offset, code = _encode_std(part, lo, hi, fmt)
        else:
            scale, offset, code = _encode_range(part, lo, hi, fmt, rand)
        if not _decodable(scale, offset, fmt, fmt.limit(n)):
            return False
        scales.append(scale)
        offsets.append(offset)
        codes.append(code.flatten(1))
    count = fmt.groups(n)
    out[:, : 2 * count].copy_(_bf16_bytes(torch.cat(scales, 1)))
    at = 2 * count
    if not fmt.symmetric:
        out[:, at : at + 4 * count].copy_(torch.cat(offsets, 1).view(torch.uint8))
        at += 4 * count
    planes.pack(codes[0] if len(codes) == 1 else torch.cat(codes, 1), fmt.bits, out[:, at:])
    return True


def decode_rows(payload: Tensor, n: int, fmt: IntegerFormat) -> Tensor | None:
    """Decode ``payload`` [rows, row_nbytes(n)] uint8 to [rows, n] float32.

    Returns None if a scale in it is negative, or a code would not stand for a finite number (with
    hadamard: one within ``fmt.limit``).
    """
    rows = payload.shape[0]
    if n == 0 or rows == 0:
        return torch.zeros((rows, n), dtype=torch.float32, device=payload.device)
    count = fmt.groups(n)
    scales = _typed(payload[:, : 2 * count], torch.bfloat16).to(torch.float32)
    at = 2 * count
    offsets = None
    if not fmt.symmetric:
        offsets = _typed(payload[:, at : at + 4 * count], torch.float32)
        at += 4 * count
    base = torch.zeros_like(scales) if offsets is None else offsets
    if not _decodable(scales, base, fmt, fmt.limit(n)):
        return None
    codes = planes.unpack(payload[:, at:], n, fmt.bits)
    y = torch.empty((rows, n), dtype=torch.float32, device=payload.device)
    first = 0
    for start, end, size in _spans(n, fmt.group or n):
        groups = (end - start) // size
        value = y[:, start:end].unflatten(1, (groups, size))
        _levels(codes[:, start:end].unflatten(1, (groups, size)), fmt, value)
        value.mul_(scales[:, first : first + groups, None])
        if offsets is not None:
            value.add_(offsets[:, first : first + groups, None])
        first += groups
    return hadamard.unrotate(y, fmt.group) if fmt.hadamard else y


def _typed(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [rows, k] as values of ``dtype``: a copy, since a slice need not be aligned."""
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)


def _spans(n: int, group: int) -> list[tuple[int, int, int]]:
    """(start, end, group size): the full groups of a row, then its short last group."""
    cut = n // group * group
    spans = [(0, cut, group)] if cut else []
    return [*spans, (cut, n, n - cut)] if n > cut else spans


def _decodable(scale: Tensor, offset: Tensor, fmt: IntegerFormat, limit: float) -> bool:
    """Whether every code of every group stands for a value of a magnitude within ``limit``."""
    ends = torch.tensor([0, 2**fmt.bits - 1], dtype=torch.uint8, device=scale.device)
    levels = torch.empty(2, dtype=torch.float32, device=scale.device)
    _levels(ends, fmt, levels)
    values = scale[..., None] * levels + offset[..., None]
    return bool(((values.abs() <= limit).all(-1) & (scale >= 0)).all())


def _divide(x: Tensor, by: float) -> Tensor:
    """x / by, by a tensor: CUDA turns division by a number into multiplication by 1 / by."""
    return x / torch.full((), by, dtype=x.dtype, device=x.device)


def _root(x: Tensor) -> Tensor:
    """The square root, correctly rounded: torch's own in float32 may be off by a unit (measured),
    which in float64 is too little to matter."""
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def _round_up_bf16(x: Tensor) -> Tensor:
    """The least bfloat16 not below each x >= 0, as float32 (largest finite at the top)."""
    bits = x.view(torch.int32)
    bits = (bits + 0xFFFF) & ~0xFFFF
    return bits.clamp(max=_BF16_MAX_BITS).view(torch.float32)


def _bf16_bytes(x: Tensor) -> Tensor:
    """Exact bfloat16 values held in float32, as bytes [rows, 2 * groups]."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.uint8)


def _scale_down(x: Tensor, step: Tensor) -> Tensor:
    """x, which is overwritten, / step by a reciprocal [rows, groups, size]; 0 where step is 0."""
    tiny = step < _TINY
    if bool(tiny.any()):
        lift = torch.where(tiny, torch.full_like(step, _LIFT), torch.ones_like(step))
        x = x.mul_(lift[:, :, None])
        step = step * lift
    inverse = torch.where(step > 0, 1.0 / step, torch.zeros_like(step))
    return x.mul_(inverse[:, :, None])


def _encode_range(
    x: Tensor, lo: Tensor, hi: Tensor, fmt: IntegerFormat, random: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, offset, codes) of groups x [rows, groups, size] with the min-max or max-abs scale."""
    if fmt.symmetric:
        middle = 2 ** (fmt.bits - 1) - 1
        top, bias, offset = 2 * middle, middle, torch.zeros_like(lo)
        scale = _round_up_bf16(_divide(torch.maximum(hi, -lo).abs(), middle))
        t = x.clone()
    else:
        top, bias, offset = 2**fmt.bits - 1, 0, lo
        scale = _round_up_bf16(_divide(hi - lo, top))
        t = x - lo[:, :, None]
    t = _scale_down(t, scale)
    t = t.round_() if random is None else t.add_(random).floor_()
    if bias:
        t = t.add_(bias)
    return scale, offset, t.clamp_(0, top).to(torch.uint8)


def _encode_std(
    x: Tensor, lo: Tensor, hi: Tensor, fmt: IntegerFormat
) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, offset, codes) of groups x [rows, groups, size] with the mean and deviation."""
    size = x.shape[2]
    unit = torch.ones_like(lo)
    mean, squares = _moments(x, fmt)
    extreme = ~((squares >= _LEAST_SQUARES) & (squares <= _MOST_SQUARES))
    if bool(extreme.any()):
        # sums of values scaled by a power of two, which is exact: they neither overflow nor vanish
        exponent = torch.maximum(hi, -lo).view(torch.int32) & 0x7F800000
        unit = torch.where(extreme & (exponent > 0), exponent.view(torch.float32), unit)
        scaled = _moments(x * (1.0 / unit)[:, :, None], fmt)
        mean = torch.where(extreme, scaled[0], mean)
        squares = torch.where(extreme, scaled[1], squares)
    scale = _round_up_bf16(_root(_divide(squares, size)) * unit)
    # -0.0 would make the offset's bytes depend on the sign of a zero sum
    offset = mean * unit + 0.0
    d = x - offset[:, :, None]
    positive = (~torch.signbit(d)).view(torch.uint8)
    if fmt.bits == 1:
        return scale, offset, positive
    # codes count from the lowest level: half + cell on the positive side, half - 1 - cell below
    if fmt.bits == 2:
        cell = (d.abs_() > (scale * LLOYD_2_THRESHOLD)[:, :, None]).view(torch.uint8)
    else:
        cell = _scale_down(d.abs_(), scale * UNIFORM_STEP[fmt.bits])
        cell = cell.floor_().clamp_(max=2 ** (fmt.bits - 1) - 1).to(torch.uint8)
    return scale, offset, cell ^ (positive + (2 ** (fmt.bits - 1) - 1))


def _moments(x: Tensor, fmt: IntegerFormat) -> tuple[Tensor, Tensor]:
    """(mean, sum of squares about it) of each group; the mean is 0 if symmetric."""
    mean = torch.zeros_like(x[..., 0])
    if not fmt.symmetric:
        mean = _divide(tree_sum(x), x.shape[2])
    centred = x - mean[:, :, None]
    return mean, tree_sum(centred * centred)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by halving: zeros pad it to a power of two, then fold."""
    size = x.shape[-1]
    width = 1 << (size - 1).bit_length()
    if width != size:
        x = torch.nn.functional.pad(x, (0, width - size))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def _levels(code: Tensor, fmt: IntegerFormat, out: Tensor) -> None:
    """What each code stands for, in units of the scale, into ``out`` float32."""
    if fmt.std and fmt.bits <= 2:
        positive = (LLOYD_1,) if fmt.bits == 1 else LLOYD_2
        levels = [-v for v in reversed(positive)] + list(positive)
        table = torch.tensor(levels, dtype=torch.float32, device=code.device)
        out.copy_(torch.index_select(table, 0, code.flatten().to(torch.int32)).view(code.shape))
        return
    out.copy_(code)
    if fmt.std:
        out.sub_(2 ** (fmt.bits - 1) - 0.5).mul_(UNIFORM_STEP[fmt.bits])
    elif fmt.symmetric:
        out.sub_(2 ** (fmt.bits - 1) - 1)
