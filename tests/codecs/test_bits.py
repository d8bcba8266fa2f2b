"""Streams of bits: any width, no bit too many, and beginnings that do not depend on the rest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codecs.common import quick
from thinwire.codecs import bits

WIDTHS = st.integers(1, bits.WIDEST)


@quick
@given(WIDTHS, st.integers(0, 40), st.integers(0, 3), st.data())
def test_values_of_any_width_come_back_from_as_few_bytes_as_hold_their_bits(
    width, count, rows, data
):
    within = st.integers(0, 2**width - 1)
    drawn = data.draw(st.lists(within, min_size=rows * count, max_size=rows * count))
    values = torch.tensor(drawn, dtype=torch.int64).view(rows, count)
    stream = bits.pack(values, width)
    assert stream.shape == (rows, -(-count * width // 8))
    found = bits.unpack(stream, count, width)
    assert found.dtype == (torch.bool if width == 1 else torch.int64)
    assert torch.equal(found.to(torch.int64), values)


@quick
@given(WIDTHS, st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20))
def test_the_stream_is_the_number_that_the_values_make_lowest_first(width, drawn):
    drawn = [value % 2**width for value in drawn]
    stream = bits.pack(torch.tensor([drawn]), width)
    number = sum(value << place * width for place, value in enumerate(drawn))
    assert bytes(stream[0].tolist()) == number.to_bytes(stream.shape[1], "little")


@pytest.mark.parametrize("width", [1, 3, 8, 13])
def test_the_first_bytes_of_a_row_hold_its_first_values(width):
    values = torch.arange(50)[None] % 2**width
    for count in range(51):
        first = bits.pack(values[:, :count], width)
        padded = bits.pack(values * (torch.arange(50) < count), width)
        assert torch.equal(padded[:, : first.shape[1]], first)
