"""The arithmetic of ``tile`` against slow code written from its description, and on every ISA.

Run as a script it prints a hash of payloads and decoded values.
"""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.digest import cases
from tests.native.test_hadamard import bell
from tests.native.test_planes import slow_pack
from thinwire.native import hadamard, tile
from thinwire.native.tile import TileFormat

# A change of this value is a change of the wire format.
GOLDEN = "16478c0486430d03e4612829f605c59f5033d4f5e5fb7a07c6ebd4607df2f26e"


def digest(device: torch.device | str = "cpu") -> str:
    total = hashlib.sha256()
    for x in cases():
        for bits in range(3, 9):
            for n in (x.shape[1], max(1, x.shape[1] - 13)):
                payload = encoded(x[:, :n].to(device).to(torch.float32), bits)
                y = tile.decode_rows(payload, n, TileFormat(bits))
                assert y is not None
                total.update(payload.cpu().numpy().tobytes())
                total.update(y.cpu().numpy().tobytes())
    return total.hexdigest()


def encoded(x: torch.Tensor, bits: int) -> torch.Tensor:
    rows, n = x.shape
    fmt = TileFormat(bits)
    out = torch.full((rows, tile.row_nbytes(n, fmt)), 171, dtype=torch.uint8, device=x.device)
    assert tile.encode_rows(x.contiguous(), fmt, torch.zeros(rows, dtype=torch.int64), out)
    return out


def slow_widths(codes: list[int], units: int) -> list[int]:
    """The widths of full tiles from their codes c."""
    heights = [min(8 * c, c + 105) for c in codes]

    def at(t: int) -> list[int]:
        return [min(max((height - t) // 8, 2), 8) for height in heights]

    t = next(t for t in range(-64, 146) if sum(at(t)) <= units)
    widths = at(t)
    for i, wider in enumerate(at(t - 1)):
        if sum(widths) < units:
            widths[i] = wider
    return widths


def slow_encode(row: torch.Tensor, bits: int) -> bytes:
    """One row, tile by tile; peaks from 2**-60 to 2**120."""
    n = len(row)
    turned = hadamard.rotate(row[None], 32)[0]
    tiles, logs, flags = [], [], []
    for plain, other in zip(row.split(32), turned.split(32), strict=True):
        rotated = float(other.abs().max()) < float(plain.abs().max())
        values = other if rotated else plain
        peak = values.abs().max()
        rounding = 2**19 if bits <= 4 else 7 * 2**17
        logs.append((int(peak.view(torch.int32)) + rounding) // 2**20)
        negative = float(values.max()) == float(peak) != -float(values.min())
        flags.append(128 * rotated + 64 * negative)
        tiles.append(values)
    top = max(logs)
    heads, codes, scales = [], [], []
    for log, flag in zip(logs, flags, strict=True):
        height = max(168 + log - top, 0) if log else 0
        c = height - 105 if height >= 120 else -(-height // 8)
        codes.append(c)
        heads.append(c + flag if c else 0)
        bits_of_scale = (top - 168 + min(8 * c, c + 105)) * 2**20
        as_float = torch.tensor([bits_of_scale if c else 0], dtype=torch.int32).view(torch.float32)
        scales.append(float(as_float))
    full = n // 32
    units = bits * full - -(-(full + 2) // 4) if full else 0
    widths = slow_widths(codes[:full], units) + [bits] * (len(codes) - full)
    assert sum(widths[:full]) == units
    packed = bytearray(top.to_bytes(2, "little")) + bytes(heads)
    for values, head, scale, width in zip(tiles, heads, scales, widths, strict=True):
        h = float(1 << (width - 1))
        inverse = torch.tensor(h if scale else 0.0) / torch.tensor(scale or 1.0)
        signed = -inverse if head & 64 else inverse
        steps = torch.round(values * signed).clamp(-h, h - 1)
        packed += slow_pack([int(v + h) for v in steps.tolist()], width)
    return bytes(packed)


@pytest.mark.parametrize("bits", range(3, 9))
@pytest.mark.parametrize("n", [1, 9, 31, 32, 33, 64, 100, 421, 1024])
def test_payloads_are_those_of_the_description(bits, n, device):
    x = torch.cat([bell(1, n), bell(2, n, 7) ** 5, bell(1, n).abs(), torch.zeros(1, n)])
    x = torch.cat([x, x * torch.logspace(0, -9, n)])
    x[1, n // 2] = 1000.0
    expected = [slow_encode(row, bits) for row in x]
    assert [bytes(row) for row in encoded(x.to(device), bits).tolist()] == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 63), min_size=1, max_size=40), st.integers(3, 8))
def test_widths_are_those_of_the_description_and_use_every_bit_plane(codes, bits):
    fmt = TileFormat(bits)
    found = tile._widths(torch.tensor([codes], dtype=torch.int32), 32 * len(codes), fmt)[0].tolist()
    assert found == slow_widths(codes, fmt.units(len(codes)))
    assert sum(found) == fmt.units(len(codes))


def test_a_tile_of_twice_the_range_gets_a_bit_more_and_ties_go_to_the_first():
    def widths(*peaks: float) -> list[int]:
        x = torch.cat([torch.full((1, 32), peak) for peak in peaks], 1)
        codes = encoded(x, 4)[:, 2 : 2 + len(peaks)].to(torch.int32) & 63
        return [int(w) for w in tile._widths(codes, 32 * len(peaks), TileFormat(4))[0]]

    assert widths(1.0, 1.0, 1.0, 1.0) == [4, 4, 3, 3]
    assert widths(1.0, 2.0, 4.0, 2.0) == [3, 4, 4, 3]
    assert widths(1.0, 1.9, 4.2, 2.1) == [3, 3, 5, 3]


@pytest.mark.parametrize("capability", ["default", "avx2", None])
def test_bytes_do_not_depend_on_the_isa(capability):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment.pop("ATEN_CPU_CAPABILITY", None)
    if capability is not None:
        environment["ATEN_CPU_CAPABILITY"] = capability
    done = subprocess.run(
        [sys.executable, __file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.strip() == GOLDEN


def test_bytes_do_not_depend_on_the_device(device):
    assert digest(device) == GOLDEN


def test_bytes_do_not_depend_on_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        assert digest() == GOLDEN
    finally:
        torch.set_default_dtype(torch.float32)


def test_bytes_do_not_depend_on_the_number_of_threads():
    x = bell(40, 2048)
    threads = torch.get_num_threads()
    payloads = []
    for count in (1, 2):
        torch.set_num_threads(count)
        payloads.append(encoded(x, 4))
    torch.set_num_threads(threads)
    assert torch.equal(*payloads)


def test_the_sign_of_a_zero_changes_no_byte():
    x = torch.where(bell(4, 300) > 0.3, bell(4, 300), torch.zeros(()))
    signed = torch.where(x == 0, -0.0, x)
    assert torch.equal(encoded(x, 4), encoded(signed, 4))
    assert torch.equal(encoded(-torch.zeros(2, 70), 4), encoded(torch.zeros(2, 70), 4))


def test_the_input_is_left_unchanged():
    for factor in (1.0, 2.0**-100):
        x = bell(2, 300) * factor
        before = x.clone()
        encoded(x, 4)
        assert torch.equal(x, before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 40, 69])
def test_a_value_that_is_not_finite_is_refused(value, at):
    x = bell(2, 70)
    x[1, at] = value
    out = torch.empty((2, tile.row_nbytes(70, TileFormat(4))), dtype=torch.uint8)
    assert not tile.encode_rows(x, TileFormat(4), torch.zeros(2, dtype=torch.int64), out)


@settings(max_examples=200, deadline=None)
@given(st.integers(3, 8), st.integers(1, 100), st.integers(0, 2**31), st.integers(0, 0x7FF))
def test_any_bytes_decode_to_finite_values_or_are_refused(bits, n, seed, top):
    fmt = TileFormat(bits)
    generator = torch.Generator().manual_seed(seed)
    size = (2, tile.row_nbytes(n, fmt))
    payload = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    payload[:, 0], payload[:, 1] = top & 255, top >> 8
    y = tile.decode_rows(payload, n, fmt)
    assert y is None or (y.shape == (2, n) and bool(torch.isfinite(y).all()))
    if top <= 0x700:
        assert y is not None
    if top > 0x7F7:
        assert y is None


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(digest())
