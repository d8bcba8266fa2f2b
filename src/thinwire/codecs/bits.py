"""Integers of any width as a stream of bits: value i of a row has bits i * width and on.

The lowest bits come first, in a value and in a byte; what is left of a row's last byte is zero. So
the bytes of a row's first values are the first bytes of the row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

WIDEST = 63
_TURN = 8  # values, after which the bits begin with a byte again


def nbytes(count: int, width: int) -> int:
    """Bytes of ``count`` values."""
    return -(-count * width // 8)


def pack(values: Tensor, width: int) -> Tensor:
    """``values`` [rows, count], integers in [0, 2**width), as [rows, nbytes] uint8."""
    rows, count = values.shape
    turns = -(-count // _TURN)
    codes = values.to(torch.uint8 if width <= 8 else torch.int64)
    codes = torch.nn.functional.pad(codes, (0, turns * _TURN - count))
    codes = codes.view(rows, turns, _TURN)
    stream = torch.zeros((rows, turns, width), dtype=torch.uint8, device=values.device)
    for place, byte, shift in _overlaps(width):
        code = codes[:, :, place]
        part = code << shift if shift >= 0 else code >> -shift
        stream[:, :, byte] |= part.to(torch.uint8)  # modulo 256
    return stream.view(rows, turns * width)[:, : nbytes(count, width)]


def unpack(stream: Tensor, count: int, width: int) -> Tensor:
    """The values [rows, count] behind ``stream`` [rows, nbytes]: bool of width 1, else int64."""
    rows, turns = stream.shape[0], -(-count // _TURN)
    stream = torch.nn.functional.pad(stream, (0, turns * width - stream.shape[1]))
    stream = stream.view(rows, turns, width).to(torch.uint8 if width <= 8 else torch.int64)
    codes = torch.zeros((rows, turns, _TURN), dtype=stream.dtype, device=stream.device)
    for place, byte, shift in _overlaps(width):
        part = stream[:, :, byte]
        codes[:, :, place] |= part >> shift if shift >= 0 else part << -shift
    if width != 8:
        codes &= (1 << width) - 1
    codes = codes.view(rows, turns * _TURN)[:, :count]
    return codes.to(torch.bool if width == 1 else torch.int64)


def _overlaps(width: int) -> Iterator[tuple[int, int, int]]:
    """(value, byte, how far the value's lowest bit is above the byte's) within a turn."""
    for place in range(_TURN):
        first = place * width
        for byte in range(first // 8, (first + width - 1) // 8 + 1):
            yield place, byte, first - 8 * byte
