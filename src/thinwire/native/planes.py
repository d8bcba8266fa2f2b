"""Bit planes: codes of 1 to 8 bits packed densely, in a layout that vectorizes on any ISA.

A row of codes is cut into blocks of 256; the last block is what remains, rounded up to a multiple
of 8 codes. A block of B codes is stored as planes of 4, 2 and 1 bits (3 = 2 + 1, 5 = 4 + 1,
6 = 4 + 2, 7 = 4 + 2 + 1), low-order bits first, each B * width / 8 bytes long: byte j of a plane of
width w holds the codes j, j + S, j + 2S, … of the block (S = B * w / 8), the first in the lowest
bits. Packing needs only byte AND, OR and shift.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
_WIDTHS = {
    1: (1,),
    2: (2,),
    3: (2, 1),
    4: (4,),
    5: (4, 1),
    6: (4, 2),
    7: (4, 2, 1),
    8: (8,),
}


def packed_nbytes(n: int, bits: int) -> int:
    """Bytes of ``n`` packed codes."""
    return -(-n // 8) * bits


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Pack ``codes`` [rows, n] uint8, each below 2**bits, into ``out`` [rows, packed_nbytes]."""
    n = codes.shape[1]
    full = n // BLOCK
    cut = full * BLOCK
    if full:
        end = full * BLOCK * bits // 8
        _pack_blocks(codes[:, :cut].unflatten(1, (full, BLOCK)), bits, out[:, :end])
    if n > cut:
        tail = -(-(n - cut) // 8) * 8
        padded = torch.nn.functional.pad(codes[:, cut:], (0, tail - (n - cut)))
        _pack_blocks(padded.unflatten(1, (1, tail)), bits, out[:, full * BLOCK * bits // 8 :])


def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    """The codes [rows, n] uint8 behind ``packed`` [rows, packed_nbytes]."""
    full = n // BLOCK
    cut = full * BLOCK * bits // 8
    parts = []
    if full:
        parts.append(_unpack_blocks(packed[:, :cut], full, BLOCK, bits))
    if n > full * BLOCK:
        rest = n - full * BLOCK
        tail = -(-rest // 8) * 8
        parts.append(_unpack_blocks(packed[:, cut:], 1, tail, bits)[:, :rest])
    if not parts:
        return packed.new_empty((packed.shape[0], 0))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _pack_blocks(codes: Tensor, bits: int, out: Tensor) -> None:
    """``codes`` [rows, blocks, B] into ``out`` [rows, blocks * B * bits / 8]."""
    size = codes.shape[2]
    target = out.unflatten(1, (codes.shape[1], size * bits // 8))
    start, shift = 0, 0
    for width in _WIDTHS[bits]:
        length = size * width // 8
        plane = target[:, :, start : start + length]
        if width == 8:
            plane.copy_(codes)
        else:
            field = codes if bits == width else (codes >> shift) & (2**width - 1)
            parts = field.unflatten(2, (8 // width, length))
            byte = parts[:, :, 0]
            for k in range(1, 8 // width):
                byte = byte | (parts[:, :, k] << (k * width))
            plane.copy_(byte)
        start += length
        shift += width


def _unpack_blocks(packed: Tensor, blocks: int, size: int, bits: int) -> Tensor:
    """``packed`` [rows, blocks * size * bits / 8] into codes [rows, blocks * size]."""
    source = packed.unflatten(1, (blocks, size * bits // 8))
    codes = packed.new_empty((packed.shape[0], blocks, size))
    start, shift = 0, 0
    for width in _WIDTHS[bits]:
        length = size * width // 8
        plane = source[:, :, start : start + length]
        mask = 2**width - 1
        for k in range(8 // width):
            field = plane if width == 8 else (plane >> (k * width)) & mask
            part = codes[:, :, k * length : (k + 1) * length]
            if shift == 0:
                part.copy_(field)
            else:
                part.bitwise_or_(field << shift)
        start += length
        shift += width
    return codes.flatten(1)
