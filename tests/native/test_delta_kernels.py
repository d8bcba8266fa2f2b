"""The kernels of the AQ-SGD step against the eager twin: equal bit for bit on every level."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.native.kernel_cases import (
    DTYPES,
    GROUPS,
    KINDS,
    LARGE,
    LEVELS,
    MODES,
    each,
    format_of,
    needs_library,
    normal,
    payload_nbytes,
    same,
    seeds_of,
    several,
    tensors,
    twin_encode,
)
from thinwire.codecs.base import saturated
from thinwire.native import delta_reference, kernels, library, reference
from thinwire.native.delta_reference import Kept
from thinwire.native.reference import IntegerFormat

pytestmark = needs_library

REFERENCES: dict[str, Kept] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": IntegerFormat(8, 128, False, False, False),
    "int4": IntegerFormat(4, 128, False, False, False),
    "int8 symmetric": IntegerFormat(8, 64, True, False, False),
}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Step:
    """What the twin makes of a step: payload, references moved, energies, what is computed on."""

    def __init__(
        self, x: Tensor, m: Tensor, sizes: list[int] | None, fmt: IntegerFormat, how: Kept
    ) -> None:
        self.x, self.sizes, self.fmt, self.how = x, sizes, fmt, how
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        self.payload = torch.zeros(payload_nbytes(x, sizes, fmt), dtype=torch.uint8)
        self.y, self.energies = torch.zeros(x.shape), torch.zeros(len(x), 2)
        self.codable, at, seeds = True, 0, seeds_of(len(x))
        for rows, size in each(x, sizes):
            self.before += kept_rows(m[rows, :size], how)
            if not self.codable or not len(x):
                continue
            old = delta_reference.read_rows(self.before[rows], size, how)
            new = x[rows, :size].to(torch.float32)
            width = reference.row_nbytes(size, fmt)
            end = at + len(new) * width
            out = self.payload[at:end].view(len(new), width)
            y = delta_reference.delta_encode_rows(new, old, fmt, seeds[rows], out)
            after = None if y is None else delta_reference.keep_rows(y, how)
            if y is None or after is None:
                self.codable = False
                continue
            at = end
            self.after += list(after)
            self.y[rows, :size] = y
            if size:
                self.energies[rows, 0] = delta_reference.energies(new - old)
                self.energies[rows, 1] = delta_reference.energies(new)

    def references(self, in_place: bool) -> tuple[list[Tensor], list[Tensor]]:
        before = [row.clone() for row in self.before]
        return before, before if in_place else [torch.empty_like(row) for row in before]

    def encode(self, in_place: bool, level: str) -> tuple[int, Tensor, list[Tensor], Tensor]:
        """(place, payload, references, energies) of the kernels."""
        before, after = self.references(in_place)
        out = torch.empty_like(self.payload)
        energies = torch.full((len(self.x), 2), torch.nan)
        with library.forced(level):
            place = kernels.delta_encode(
                *(self.x, self.sizes, self.fmt, seeds_of(len(self.x)), out),
                *(before, after, self.how, energies),
            )
        return place, out, after, energies

    def decode(self, in_place: bool, level: str, y: Tensor | None) -> tuple[bool, list[Tensor]]:
        """(whether the payload was valid, references) of the kernels."""
        before, after = self.references(in_place)
        shape = len(self.x), self.x.shape[1]
        with library.forced(level):
            valid = kernels.delta_decode(
                self.payload, shape, self.sizes, self.fmt, before, after, self.how, y
            )
        return valid, after

    def moved(self, after: list[Tensor]) -> bool:
        return all(same(a, b) for a, b in zip(after, self.after, strict=True))


def kept_rows(m: Tensor, how: Kept) -> list[Tensor]:
    """References as they are kept; zeros instead of those that cannot be."""
    rows = delta_reference.keep_rows(m, how)
    if rows is None:
        rows = delta_reference.keep_rows(torch.zeros_like(m), how)
    assert rows is not None
    return list(rows)


@st.composite
def steps(draw, how: Kept, rotated: bool = False) -> Step:
    """A step of one of the formats; often a small change."""
    x = draw(tensors(bad=draw(st.integers(0, 9)) == 0))
    rows, n = x.shape
    m = KINDS[draw(st.sampled_from(list(KINDS)))](normal(rows, n, draw(st.integers(0, 2**31))))
    if draw(st.booleans()):
        m = (x.to(torch.float32) + 0.01 * normal(rows, n)).nan_to_num(0.0, 1.0, 1.0)
    mode = draw(st.sampled_from(list(MODES)))
    fmt = format_of(mode, draw(st.integers(1, 8)), draw(st.sampled_from(GROUPS)))
    fmt = dataclasses.replace(fmt, hadamard=rotated)
    lengths = st.lists(st.integers(0, x.shape[1]), min_size=len(x), max_size=len(x))
    sizes = draw(st.none() | lengths) if len(x) else None
    return Step(x, m.clamp(-3.3e38, 3.3e38), sizes, fmt, how)


in_place_or_not = pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])


@in_place_or_not
@pytest.mark.parametrize("kept", REFERENCES)
@several
@given(st.data())
def test_a_step_is_encoded_as_by_the_twin(kept, in_place, data):
    step = data.draw(steps(REFERENCES[kept]))
    for level in LEVELS:
        place, payload, after, _ = step.encode(in_place, level)
        assert (place < 0) == step.codable
        if step.codable:
            assert torch.equal(payload, step.payload)
            assert step.moved(after)


@in_place_or_not
@pytest.mark.parametrize("kept", REFERENCES)
@several
@given(st.data())
def test_a_step_is_decoded_as_by_the_twin(kept, in_place, data):
    step = data.draw(steps(REFERENCES[kept]).filter(lambda step: step.codable))
    for level in LEVELS:
        for dtype in (None, torch.float32, torch.bfloat16, torch.float16):
            y = None if dtype is None else torch.full(step.x.shape, torch.nan, dtype=dtype)
            valid, after = step.decode(in_place, level, y)
            assert valid
            assert step.moved(after)
            assert y is None or same(y, saturated(step.y, y.dtype))


@pytest.mark.parametrize("kept", REFERENCES)
@several
@given(st.data())
def test_energies_are_those_of_the_twin(kept, data):
    step = data.draw(steps(REFERENCES[kept]).filter(lambda step: step.codable))
    for level in LEVELS:
        assert same(step.encode(True, level)[3], step.energies)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kept", REFERENCES)
def test_a_change_that_cannot_be_coded_is_found(kept, level):
    for place in (0, 127, 128, 700, 999):
        x = normal(2, 1000)
        x[1, place] = torch.inf
        step = Step(x, normal(2, 1000, 1), None, format_of("affine", 4, 128), REFERENCES[kept])
        assert step.encode(False, level)[0] == 1000 + place


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kept", REFERENCES)
def test_nothing_but_the_rows_is_written_by_decoding_a_step(kept, level):
    fmt = format_of("std", 2, 100)
    step = Step(normal(3, 1000), normal(3, 1000, 1), None, fmt, REFERENCES[kept])
    for dtype in DTYPES:
        whole = torch.full((5, 1003), 7.0, dtype=dtype)
        step.decode(False, level, whole[1:-1, 1:-2])
        assert bool((whole[0] == 7).all() and (whole[-1] == 7).all())
        assert bool((whole[:, 0] == 7).all() and (whole[:, -2:] == 7).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kept", ["float32", "bfloat16", "int8"])
def test_a_sum_that_cannot_be_kept_is_refused_at_both_ends(kept, level):
    m = torch.full((1, 512), 3.0e38)
    x = torch.zeros(1, 512)
    x[0, 100] = -3.0e38
    payload, _ = twin_encode(m, None, (fmt := format_of("affine", 8, 0)), seeds_of(1))
    step = Step(x, m, None, fmt, REFERENCES[kept])
    assert not step.codable
    assert step.encode(False, level)[0] == 100
    step.payload = payload  # 3e38 more
    assert not step.decode(False, level, None)[0]


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("kept", REFERENCES)
def test_two_threads_do_a_step_as_the_twin(kept, shape, two_threads):
    rows, n = shape
    for mode, group in (("affine", 128), ("symmetric", 100), ("std", 0)):
        fmt = format_of(mode, 4, group)
        step = Step(normal(rows, n), normal(rows, n, 1), None, fmt, REFERENCES[kept])
        for level in LEVELS:
            _, payload, after, energies = step.encode(True, level)
            assert torch.equal(payload, step.payload)
            assert step.moved(after)
            assert same(energies, step.energies)
            y = torch.full(shape, torch.nan)
            assert step.moved(step.decode(False, level, y)[1])
            assert same(y, step.y)
