"""Bit planes against a slow packer that is written from the layout's description."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.native import planes

WIDTHS = range(1, 9)
LENGTHS = [1, 2, 7, 8, 9, 63, 64, 65, 100, 128, 255, 256, 257, 264, 511, 512, 513, 700]


def slow_pack(codes: list[int], bits: int) -> bytes:
    """One row, code by code."""
    widths = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}.get(bits, (bits,))
    packed = bytearray()
    for start in range(0, len(codes), 256):
        block = codes[start : start + 256]
        block = block + [0] * (-len(block) % 8)
        shift = 0
        for width in widths:
            stride = len(block) * width // 8
            for j in range(stride):
                byte = 0
                for k, code in enumerate(block[j::stride]):
                    byte |= (code >> shift & (1 << width) - 1) << (k * width)
                packed.append(byte)
            shift += width
    return bytes(packed)


def random_codes(rows: int, n: int, bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, (rows, n), generator=generator, dtype=torch.uint8)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    rows, n = codes.shape
    size = planes.packed_nbytes(n, bits)
    out = torch.empty((rows, size), dtype=torch.uint8, device=codes.device)
    planes.pack(codes, bits, out)
    return out


@pytest.mark.parametrize("bits", WIDTHS)
def test_packed_bytes_are_those_of_the_described_layout(bits, device):
    for n in LENGTHS:
        codes = random_codes(2, n, bits, seed=n)
        expected = [slow_pack(row, bits) for row in codes.tolist()]
        found = [bytes(row) for row in packed(codes.to(device), bits).tolist()]
        assert found == expected, n


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 1100), st.integers(1, 3), st.integers(0, 2**32))
def test_unpacking_returns_the_packed_codes(bits, n, rows, seed):
    codes = random_codes(rows, n, bits, seed)
    assert torch.equal(planes.unpack(packed(codes, bits), n, bits), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_code_costs_its_bits(bits):
    for n in LENGTHS:
        assert planes.packed_nbytes(n, bits) == -(-n // 8) * bits
        assert planes.packed_nbytes(8 * n, bits) * 8 == 8 * n * bits
