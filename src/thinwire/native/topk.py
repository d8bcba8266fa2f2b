"""The eager twin of top-k: what its kernels must equal, bit for bit.

Of a row of n values the k of largest magnitude are kept; of equal magnitudes those that come first.
A row is encoded as

    values     the kept ones in order of position, coded by another codec or as they are
    positions  a bitmask, or a Golomb code of the gaps between kept values

Bitmask: bit i % 8 of byte i // 8 is set if value i is kept.

Golomb code (S. W. Golomb, "Run-length encodings", 1966) with modulus M = 2**b or 3 * 2**b: the
remainder of a gap modulo M is t * 2**b + low. First come the t, if M has the factor 3, in base 3,
five a byte, the first lowest; then one string of bits, lowest first, zeros up to a byte: every low,
b bits each; then for each gap its quotient in zeros, and a one. The string ends with its k-th one,
so its length need not be told. It is shorter than the bitmask's in the worst case too, or the
bitmask is used: n, k and M decide, and nothing is transmitted about it.

Random positions take at most 1.9 % more than their entropy at any share below a quarter.
"""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction

import torch
from torch import Tensor

from thinwire.native.tensors import DTYPES

__all__ = [
    "DTYPES",
    "Rows",
    "decode",
    "encode",
    "golomb_used",
    "modulus",
    "positions_max_nbytes",
    "positions_min_nbytes",
    "put_values",
    "take_values",
]

_INFINITY = 0x7F800000
#: (least share kept, in 1/1024; modulus): where each becomes the best for geometric gaps.
_DENSE = ((256, 0), (241, 2), (186, 3), (128, 4), (98, 6), (66, 8), (50, 12))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows to be coded: of sizes[r] values kept[r] stay, which are coded in widths[r] bytes.

    All three are int64 on the CPU; kept is at least 1 wherever there is a value.
    """

    sizes: Tensor
    kept: Tensor
    widths: Tensor
    modulus: int

    def each(self) -> list[tuple[int, int, int]]:
        """(size, kept, width) of each row."""
        lists = self.sizes.tolist(), self.kept.tolist(), self.widths.tolist()
        return list(zip(*lists, strict=True))


@functools.cache
def modulus(share: Fraction) -> int:
    """The modulus of the Golomb code where ``share`` of the values is kept; 0: bitmasks only."""
    for least, best in _DENSE:
        if share * 1024 >= least:
            return best
    m = 16
    while share * m * 1024 < 490:
        m *= 2
    return m


def golomb_used(n: int, k: int, m: int) -> bool:
    """Whether the positions of k of n values take a Golomb code with modulus m."""
    return m > 0 and n > 0 and _golomb_max_nbytes(n, k, m) < -(-n // 8)


def positions_max_nbytes(n: int, k: int, m: int) -> int:
    """The most bytes that the positions of k of n values take."""
    return _golomb_max_nbytes(n, k, m) if golomb_used(n, k, m) else -(-n // 8)


def positions_min_nbytes(n: int, k: int, m: int) -> int:
    """The fewest bytes that they take: without gaps."""
    return _golomb_nbytes(k, m, 0) if golomb_used(n, k, m) else -(-n // 8)


def encode(x: Tensor, rows: Rows, out: Tensor, values: Tensor | None) -> Tensor | None:
    """Encode ``x`` [rows, n] of a dtype in DTYPES into ``out`` 1-D uint8.

    The kept values go to ``values`` [rows, at least the most kept] of x's dtype, and their places
    in ``out`` are left for put_values; if that is None, they are written to ``out`` as they are.
    Returns where each row of ``out`` begins and the last ends, int64 [rows + 1]; None, with ``out``
    undefined, if a value is not finite.
    """
    starts = [0]
    for r, (n, k, width) in enumerate(rows.each()):
        at = starts[-1]
        if n == 0:
            starts.append(at + width)
            continue
        key = x[r, :n].to(torch.float32).view(torch.int32) & 0x7FFFFFFF
        if bool((key >= _INFINITY).any()):
            return None
        index = _select(key, k)
        if values is None:
            out[at : at + width] = x[r, index].view(torch.uint8)
        else:
            values[r, :k] = x[r, index]
        coded = _code(index, n, rows.modulus)
        end = at + width + coded.numel()
        out[at + width : end] = coded
        starts.append(end)
    return torch.tensor(starts, dtype=torch.int64)


def put_values(rows: Rows, coded: Tensor, starts: Tensor, out: Tensor) -> None:
    """Write ``coded``, the rows' coded values one after the other, to the rows at ``starts``."""
    at = 0
    for (_, _, width), start in zip(rows.each(), starts.tolist(), strict=False):
        out[start : start + width] = coded[at : at + width]
        at += width


def take_values(rows: Rows, payload: Tensor) -> Tensor | None:
    """The reverse of put_values; None if ``payload`` is not exactly such rows."""
    found = _walk(rows, payload)
    if found is None:
        return None
    parts = [payload[start : start + width] for start, _, width, _ in found]
    return torch.cat(parts) if parts else payload[:0]


def decode(rows: Rows, payload: Tensor, values: Tensor | None, y: Tensor) -> bool:
    """Decode ``payload`` into ``y`` [rows, n] of a dtype in DTYPES, zeros where nothing was kept.

    Kept values come from ``values`` [rows, most kept] of y's dtype or, if that is None, from the
    payload. Returns False, with ``y`` undefined, if the payload is not exactly such rows, or a kept
    value is not finite.
    """
    found = _walk(rows, payload)
    if found is None:
        return False
    y.zero_()
    for r, (start, k, width, index) in enumerate(found):
        if values is None:
            if width != k * y.itemsize:
                return False
            kept = payload[start : start + width].clone().view(y.dtype)
        else:
            kept = values[r, :k]
        if not bool(torch.isfinite(kept).all()):
            return False
        y[r, index] = kept
    return True


def _select(key: Tensor, k: int) -> Tensor:
    """Positions, ascending, of the k greatest of ``key``; of equal ones the first."""
    threshold = key.kthvalue(key.numel() - k + 1).values
    above, equal = key > threshold, key == threshold
    first = torch.cumsum(equal, 0) <= k - above.sum()
    return torch.nonzero(above | (equal & first)).flatten()


def _split_modulus(m: int) -> tuple[int, bool]:
    """(b, whether there is a factor 3)."""
    ternary = m % 3 == 0
    return (m // 3 if ternary else m).bit_length() - 1, ternary


def _golomb_max_nbytes(n: int, k: int, m: int) -> int:
    return _golomb_nbytes(k, m, (n - k) // m)


def _golomb_nbytes(k: int, m: int, quotients: int) -> int:
    """Bytes of k gaps whose quotients add up to ``quotients``."""
    bits, ternary = _split_modulus(m)
    return (-(-k // 5) if ternary else 0) + -(-(k * bits + k + quotients) // 8)


def _code(index: Tensor, n: int, m: int) -> Tensor:
    """Ascending positions below n, as bytes."""
    k = index.numel()
    if not golomb_used(n, k, m):
        mask = torch.zeros(n, dtype=torch.uint8, device=index.device)
        mask[index] = 1
        return _pack(mask)
    bits, ternary = _split_modulus(m)
    gap = torch.diff(index, prepend=index.new_tensor([-1])) - 1
    quotient, remainder = gap // m, gap % m
    end = torch.cumsum(quotient + 1, 0)
    unary = torch.zeros(int(end[-1]), dtype=torch.uint8, device=index.device)
    unary[end - 1] = 1
    coded = _pack(torch.cat([_fields(remainder, bits), unary]))
    if not ternary:
        return coded
    digits = torch.nn.functional.pad(remainder >> bits, (0, -k % 5)).view(-1, 5)
    powers = index.new_tensor([1, 3, 9, 27, 81])
    return torch.cat([(digits * powers).sum(1).to(torch.uint8), coded])


def _walk(rows: Rows, payload: Tensor) -> list[tuple[int, int, int, Tensor]] | None:
    """(first byte, values kept, bytes of them, positions) of each row; None: they do not fit."""
    found, at = [], 0
    for n, k, width in rows.each():
        decoded = _decode_positions(payload[at + width :], n, k, rows.modulus)
        if decoded is None:
            return None
        index, size = decoded
        found.append((at, k, width, index))
        at += width + size
    return found if at == payload.numel() else None


def _decode_positions(coded: Tensor, n: int, k: int, m: int) -> tuple[Tensor, int] | None:
    """The k positions that ``coded`` starts with, and the bytes that they take."""
    size = min(positions_max_nbytes(n, k, m), coded.numel())
    if not golomb_used(n, k, m):
        if size < -(-n // 8):
            return None
        index = torch.nonzero(_unpack(coded[:size])).flatten()
        fits = index.numel() == k and (k == 0 or int(index[-1]) < n)
        return (index, size) if fits else None
    bits, ternary = _split_modulus(m)
    head = -(-k // 5) if ternary else 0
    string = _unpack(coded[head:size])
    ones = torch.nonzero(string[k * bits :]).flatten()[: k + 1]
    if ones.numel() < k or int(ones[k - 1]) >= k + (n - k) // m:
        return None
    size = head + -(-(k * bits + int(ones[k - 1]) + 1) // 8)
    if ones.numel() > k and int(ones[k]) + k * bits < 8 * (size - head):
        return None  # bits that nothing should have set
    quotient = torch.diff(ones[:k], prepend=ones.new_tensor([-1])) - 1
    fields = string[: k * bits].view(k, bits).to(torch.int64)
    remainder = (fields << torch.arange(bits, device=coded.device)).sum(1)
    if ternary:
        digits = _digits(coded[:head], k)
        if digits is None:
            return None
        remainder += digits << bits
    index = torch.cumsum(quotient * m + remainder + 1, 0) - 1
    return (index, size) if int(index[-1]) < n else None


def _digits(coded: Tensor, k: int) -> Tensor | None:
    """k digits in base 3, five a byte; None if a byte holds more."""
    left = coded.to(torch.int64)
    columns = []
    for _ in range(5):
        columns.append(left % 3)
        left = left // 3
    digits = torch.stack(columns, 1).flatten()
    return None if bool(left.any()) or bool(digits[k:].any()) else digits[:k]


def _fields(values: Tensor, bits: int) -> Tensor:
    """The lowest ``bits`` bits of each value, one after the other, lowest first."""
    shifts = torch.arange(bits, device=values.device)
    return ((values[:, None] >> shifts) & 1).to(torch.uint8).flatten()


def _pack(bits: Tensor) -> Tensor:
    """Zeros and ones as bytes, lowest bit first."""
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded << shifts).sum(1).to(torch.uint8)


def _unpack(coded: Tensor) -> Tensor:
    """The reverse of _pack, as whole bytes."""
    shifts = torch.arange(8, dtype=torch.uint8, device=coded.device)
    return ((coded[:, None] >> shifts) & 1).flatten()
