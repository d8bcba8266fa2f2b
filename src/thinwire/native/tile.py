"""The eager twin of the codec ``tile``: what its kernels must equal, bit for bit.

A row of n values is cut into tiles of 32; ``m = n % 32`` values may be left over as a short tile.
A tile's peak is its largest magnitude. Encoding a row:

1. Rotation. A tile whose Hadamard rotation (see ``hadamard``; group 32) has a smaller peak is
   replaced by it, unless its own peak reaches 2**120, where sums might overflow.
2. Scale. The peak's float32 bits, rounded to 3 bits of mantissa, are a logarithm in steps of about
   an eighth of an octave: a = min((bits + ``rounding``) >> 20, 0x7F7). With ``top`` the row's
   largest a, a tile's height is max(168 + a - top, 0), and its 6-bit code is
   c = max(height - 105, (height + 7) >> 3). From here on a tile's height is min(8c, c + 105), what
   c stands for: eighths of an octave in the upper six octaves, octaves rounded up in the fifteen
   below. Its scale P has the bits (top - 168 + height) << 20. c = 0 means P = 0, as does a = 0.
3. Widths. Full tiles share U bit planes of 32 bits, U depending on n alone. Tile i gets
   w_i(t) = clamp((height_i - t) >> 3, 2, 8) bits for the smallest t where the widths' sum is at
   most U (reverse water-filling: a bit more an octave), and what is left of U goes, a bit each, to
   the first tiles where w_i(t - 1) > w_i(t). Both ends compute this from the codes c, so no map
   of widths is sent. A short tile has ``bits`` bits.
4. Values. Levels are k * (P / h), k = -h … h - 1, h = 2**(w-1). P / h is made negative where the
   highest value exceeds the lowest in magnitude, so that the extreme is at k = -h. A value's k is
   value * (h / P), rounded to nearest even and clamped, and its code is k + h.

Payload of a row: top (uint16, little-endian); a byte a tile (bit 7: rotated, bit 6: the step is
negative, the rest c); the codes of the full tiles, packed tile after tile as by ``planes`` with
one block of 32 a tile, so 4 bytes a bit; the codes of the short tile, as by ``planes``.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from thinwire.native import hadamard, planes

TILE = 32
NARROWEST, WIDEST = 2, 8
HIGHEST = 168
_LARGEST = 0x7F7  # of the scales with 3 bits of mantissa: 1.875 * 2**127
_ROTATED, _NEGATIVE, _CODE = 0x80, 0x40, 0x3F
#: Neither sums of 32 values below this nor decoded values overflow in a rotation.
_ROTATABLE = 2.0**120
#: Tiles with a scale below this are multiplied by 2**64 first: h/scale would overflow.
_TINY = 2.0**-60
_LIFT = 2.0**64


@dataclasses.dataclass(frozen=True)
class TileFormat:
    """``bits`` a value, 3 to 8: codes, scales and all."""

    bits: int

    @property
    def rounding(self) -> int:
        """What is added to a peak's bits before they are cut to a scale.

        Up to 4 bits the nearest scale is best: a peak at most 1/16 above it costs no more than any
        other value's rounding. Finer steps leave no room for that: scales less than 1/64 below.
        """
        return 1 << 19 if self.bits <= 4 else 7 << 17

    def units(self, tiles: int) -> int:
        """U, the sum of the widths of ``tiles`` full tiles: what top and scales leave."""
        return self.bits * tiles - (tiles + 5) // 4 if tiles else 0


def row_nbytes(n: int, fmt: TileFormat) -> int:
    """Bytes of one encoded row of ``n`` values: ``bits`` / 8 each, where n is a multiple of 32."""
    if n == 0:
        return 0
    tiles, short = divmod(n, TILE)
    return 2 + -(-n // TILE) + 4 * fmt.units(tiles) + planes.packed_nbytes(short, fmt.bits)


def encode_rows(x: Tensor, fmt: TileFormat, seeds: Tensor, out: Tensor) -> bool:
    """Encode ``x`` [rows, n] float32 into ``out`` [rows, row_nbytes(n)] uint8.

    ``seeds`` is not used. Returns False, with ``out`` undefined, if a value is not finite.
    """
    n = x.shape[1]
    if x.numel() == 0:
        return True
    plain = _tiles(x)
    peak = plain.abs().amax(2)
    if not bool(torch.isfinite(peak).all()):
        return False
    turned = _tiles(hadamard.rotate(x, TILE))
    turned_peak = turned.abs().amax(2)
    rotated = (turned_peak < peak) & (peak < _ROTATABLE)  # false where turned_peak is NaN
    t = torch.where(rotated[:, :, None], turned, plain)
    peak = torch.where(rotated, turned_peak, peak)
    negative = t.amax(2) > -t.amin(2)

    log = ((peak.view(torch.int32) + fmt.rounding) >> 20).clamp(max=_LARGEST)
    top = log.amax(1, keepdim=True)
    height = torch.where(log > 0, (log - top + HIGHEST).clamp(min=0), 0)
    code = torch.maximum(height - 105, (height + 7) >> 3)
    scale = _scale(code, top)

    tiles = n // TILE
    widths = _widths(code, n, fmt)
    half = (1 << (widths - 1)).to(torch.float32)
    k = _steps(t, scale, half, negative)
    head = code | rotated.to(torch.int32) * _ROTATED | negative.to(torch.int32) * _NEGATIVE
    head = torch.where(code > 0, head, 0)
    count, body = head.shape[1], 4 * fmt.units(tiles)
    out[:, :2].copy_(top.to(torch.int16).view(torch.uint8))
    out[:, 2 : 2 + count].copy_(head)
    _pack(k[:, :tiles], widths[:, :tiles], out[:, 2 + count : 2 + count + body])
    if n % TILE:
        planes.pack(k[:, tiles, : n % TILE], fmt.bits, out[:, 2 + count + body :])
    return True


def decode_rows(payload: Tensor, n: int, fmt: TileFormat) -> Tensor | None:
    """Decode ``payload`` [rows, row_nbytes(n)] uint8 to [rows, n] float32.

    Returns None if a scale in it is not finite, or if a rotated tile's might overflow.
    """
    rows = payload.shape[0]
    if n == 0 or rows == 0:
        return torch.zeros((rows, n), dtype=torch.float32, device=payload.device)
    tiles, count = n // TILE, -(-n // TILE)
    top = payload[:, :1].to(torch.int32) | payload[:, 1:2].to(torch.int32) << 8
    head = payload[:, 2 : 2 + count].to(torch.int32)
    rotated, negative, code = (head & _ROTATED) != 0, (head & _NEGATIVE) != 0, head & _CODE
    scale = _scale(code, top)
    if bool((top > _LARGEST).any()) or bool((rotated & (scale > _ROTATABLE)).any()):
        return None
    widths = _widths(code, n, fmt)
    half = (1 << (widths - 1)).to(torch.float32)
    body = 2 + count + 4 * fmt.units(tiles)
    codes = payload.new_zeros((rows, count, TILE))
    _unpack(payload[:, 2 + count : body], widths[:, :tiles], codes[:, :tiles])
    if n % TILE:
        codes[:, tiles, : n % TILE] = planes.unpack(payload[:, body:], n % TILE, fmt.bits)
    step = scale / half
    step = torch.where(negative, -step, step)
    y = codes.to(torch.float32).sub_(half[:, :, None]).mul_(step[:, :, None])
    plain = y.flatten(1)[:, :n]
    turned = _tiles(hadamard.unrotate(plain, TILE))
    return torch.where(rotated[:, :, None], turned, y).flatten(1)[:, :n].contiguous()


def _tiles(x: Tensor) -> Tensor:
    """``x`` [rows, n] as [rows, tiles, 32], the short tile padded with zeros."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % TILE))
    return padded.view(len(x), -1, TILE)


def _heights(code: Tensor) -> Tensor:
    """The heights that the codes c stand for."""
    return torch.minimum(code * 8, code + 105)


def _scale(code: Tensor, top: Tensor) -> Tensor:
    """The scales P [rows, tiles] that ``code`` stands for under ``top`` [rows, 1]."""
    log = (top - HIGHEST + _heights(code)).clamp(min=0)
    return torch.where(code > 0, log << 20, 0).view(torch.float32)


def _widths(code: Tensor, n: int, fmt: TileFormat) -> Tensor:
    """The width of every tile, the short one included, as step 3 defines it."""
    tiles = n // TILE
    height = _heights(code[:, :tiles])
    units = fmt.units(tiles)

    def at(t: Tensor) -> Tensor:
        return ((height - t) >> 3).clamp(NARROWEST, WIDEST)

    # the sum falls as t rises: at -64 every tile is at its widest, at 145 at its narrowest
    below = torch.full((len(code), 1), -65, dtype=torch.int32, device=code.device)
    t = torch.full_like(below, 145)
    for _ in range(8):
        middle = (below + t) >> 1
        fits = at(middle).sum(1, keepdim=True) <= units
        t = torch.where(fits, middle, t)
        below = torch.where(fits, below, middle)
    widths = at(t)
    more = at(t - 1) - widths
    left = units - widths.sum(1, keepdim=True)
    widths = widths + torch.where(more.cumsum(1) <= left, more, 0)
    return torch.nn.functional.pad(widths, (0, code.shape[1] - tiles), value=fmt.bits)


def _steps(t: Tensor, scale: Tensor, half: Tensor, negative: Tensor) -> Tensor:
    """The codes k + h, uint8, of the tiles ``t``, which are overwritten."""
    tiny = (scale < _TINY) & (scale > 0)  # where it is 0, a lifted value might overflow
    lift = torch.where(tiny, torch.full_like(scale, _LIFT), torch.ones_like(scale))
    inverse = torch.where(scale > 0, half / (scale * lift), torch.zeros_like(scale))
    inverse = torch.where(negative, -inverse, inverse)
    if bool(tiny.any()):
        t = t.mul_(lift[:, :, None])
    k = t.mul_(inverse[:, :, None]).round_()
    half = half[:, :, None]
    k = torch.minimum(torch.maximum(k, -half), half - 1)
    return k.add_(half).to(torch.uint8)


def _places(widths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Which tiles have ``width``, and where the bytes of each lie in a flat [rows, bytes]."""
    ends = widths.flatten().cumsum(0)  # every row has the same sum
    chosen = widths == width
    first = 4 * (ends[chosen.flatten()] - width)
    return chosen, first[:, None] + torch.arange(4 * width, device=widths.device)


def _pack(codes: Tensor, widths: Tensor, out: Tensor) -> None:
    """``codes`` [rows, tiles, 32] into ``out`` [rows, 4 * U], tile after tile."""
    flat = torch.empty(out.numel(), dtype=torch.uint8, device=out.device)
    for width in range(NARROWEST, WIDEST + 1):
        chosen, places = _places(widths, width)
        if places.numel():
            packed = torch.empty(places.shape, dtype=torch.uint8, device=out.device)
            planes.pack(codes[chosen], width, packed)
            flat[places] = packed
    out.copy_(flat.view(out.shape))


def _unpack(packed: Tensor, widths: Tensor, codes: Tensor) -> None:
    """The inverse of ``_pack``."""
    flat = packed.flatten()
    for width in range(NARROWEST, WIDEST + 1):
        chosen, places = _places(widths, width)
        if places.numel():
            codes[chosen] = planes.unpack(flat[places], TILE, width)
