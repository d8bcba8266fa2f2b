"""Codecs as researchers write them: what the library does for them, and what it refuses."""

import dataclasses
import struct
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import thinwire as tw
from tests.blocks import loaded
from tests.codecs.common import FLOATS, normal, round_trip
from thinwire.codecs import tensors
from thinwire.codecs.tensors import OfTensors
from thinwire.native import noise

pytestmark = pytest.mark.usefixtures("registry")


def own(spec: str, folder: Path) -> tw.Codec:
    """A codec of the documentation."""
    loaded(spec.partition(":")[0], folder)
    return tw.codec(spec)


SPECS = ["sign", "grid:bits=5", "above:share=0.3"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_it_is_a_codec_like_any_other(spec, dtype, device, tmp_path):
    coder = own(spec, tmp_path)
    x = normal(3, 5, 7, device=device).to(dtype)
    y = coder.decode(coder.encode(x), x.shape, dtype)
    assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
    assert tw.parse(str(coder)) == coder
    assert tw.unpack(tw.pack(x, coder)).equal(y.cpu())
    assert str(tw.scheme(f"delta({coder},first={coder})")) == f"delta({coder},first={coder})"


def test_the_bytes_are_the_parts_of_each_row_in_their_order(tmp_path):
    payload = own("sign", tmp_path).encode(torch.tensor([[1.0, -2.0, -3.0], [-4.0, 4.0, 4.0]]))
    expected = bytes([0b110]) + struct.pack("<f", 2.0) + bytes([0b001]) + struct.pack("<f", 4.0)
    assert bytes(payload.tolist()) == expected


def test_a_ragged_part_has_its_number_of_entries_before_them(tmp_path):
    payload = own("above", tmp_path).encode(torch.tensor([[0.0, 2.0, 0.0, -1.0], [3.0, 0, 0, 0]]))
    first = struct.pack("<BBBff", 2, 0b1101, 2, 2.0, -1.0)
    assert bytes(payload.tolist()) == first + struct.pack("<BBBf", 1, 0, 1, 3.0)


def test_sizes_are_those_of_zeros_and_asked_for_once(tmp_path):
    asked = []

    @tw.register_codec("counting")
    @dataclasses.dataclass(frozen=True)
    class Counting(tw.TensorCodec):
        def encode(self, x):
            asked.append(tuple(x.shape))
            return {"x": x.half(), "bits": tw.Bits(x > 0, 1)}

        def decode(self, parts, n):
            return parts["x"].float()

    coder = tw.codec("counting")
    for _ in range(3):
        assert coder.max_nbytes((4, 10), torch.float32) == 4 * (20 + 2)
    assert asked == [(1, 10)]
    assert coder.fixed_size
    assert not own("above", tmp_path).fixed_size


def test_a_long_row_of_a_frame_takes_no_memory_before_it_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tensors, "_MOST_ZEROS", 100)
    coder, few = own("sign", tmp_path), torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"takes \d+ payload bytes, found 8"):
        coder.decode(few, (2, 1 << 45), torch.float32)

    @tw.register_codec("stubborn")
    @dataclasses.dataclass(frozen=True)
    class Stubborn(tw.TensorCodec):
        def encode(self, x):
            return {"x": x[:, : 1 + int(x.abs().max() > 1)]}

        def decode(self, parts, n):
            return parts["x"].expand(-1, n)

    assert tw.codec("stubborn").max_nbytes((1, 50), torch.float32) == 4
    with pytest.raises(ValueError, match="a row of 101 values; beyond 100 its encode must run on"):
        tw.codec("stubborn").max_nbytes((1, 101), torch.float32)


def test_noise_follows_from_the_seeds_alone(tmp_path):
    coder, x = own("grid:bits=5", tmp_path), normal(2, 400)
    seeds = torch.tensor([7, 8])
    assert coder.stochastic
    assert not own("sign", tmp_path).stochastic
    found = coder.encode(x, seed=seeds)
    assert found.equal(coder.encode(x, seed=seeds))
    assert not found.equal(coder.encode(x, seed=seeds + 1))
    assert tw.TensorCodec.noise(seeds, 9).equal(noise.uniform(seeds, 9))
    assert tw.scheme(f"delta({coder})").stochastic


def test_a_codec_may_say_that_an_option_makes_it_stochastic():
    @tw.register_codec("maybe")
    @dataclasses.dataclass(frozen=True)
    class Maybe(tw.TensorCodec):
        dither: bool = False

        @property
        def stochastic(self):
            return self.dither

        def encode(self, x, seeds):
            return {"x": x + self.noise(seeds, x.shape[1]) * self.dither}

        def decode(self, parts, n):
            return parts["x"]

    assert tw.codec("maybe:dither").stochastic
    assert not tw.codec("maybe").stochastic


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("spec", SPECS)
def test_what_float32_cannot_hold_is_an_error_with_its_index(spec, value, tmp_path):
    x = normal(2, 3, 4).double()
    x[1, 2, 0] = value
    with pytest.raises(tw.NonFiniteError, match=r"at index \(1, 2, 0\)"):
        own(spec, tmp_path).encode(x)


class Anything(tw.TensorCodec):
    """What a test puts into ``gives`` and ``back``."""

    gives: ClassVar[Any]
    back: ClassVar[Any]
    most: ClassVar[dict[str, int]] = {}

    def encode(self, x):
        return type(self).gives(x)

    def decode(self, parts, n):
        return type(self).back(parts, n)


def made(gives, back=lambda parts, n: parts["x"], most=None) -> tw.Codec:
    @tw.register_codec("anything")
    @dataclasses.dataclass(frozen=True)
    class Made(Anything):
        pass

    Made.gives, Made.back = staticmethod(gives), staticmethod(back)
    if most is not None:
        Made.max_counts = lambda self, n: most  # type: ignore[method-assign]
    return tw.codec("anything")


WRONG_PARTS = {
    "no mapping": (lambda x: [x], "encode returned list, not named parts"),
    "no tensor": (lambda x: {"x": 1.0}, "part 'x' is a float, not a tensor"),
    "no rows": (lambda x: {"x": x.mean()}, r"part 'x' has the shape \(\); its first dimension"),
    "other rows": (lambda x: {"x": x.repeat(2, 1)}, "its first dimension is that of the rows, 1"),
    "floats of a width": (lambda x: {"x": tw.Bits(x, 3)}, "tw.Bits of torch.float32"),
    "no width": (lambda x: {"x": tw.Bits(x > 0, 0)}, "a width of 0 bits, not 1 to 63"),
    "too wide": (lambda x: {"x": tw.Bits(x.long() + 9, 3)}, r"values outside \[0, 2\*\*3\)"),
    "negative": (lambda x: {"x": tw.Bits(x.long() - 9, 63)}, r"values outside \[0, 2\*\*63\)"),
    "ragged by surprise": (lambda x: {"x": tw.Ragged(x, (x > 0).sum(1))}, "max_counts names"),
    "by the data": (
        lambda x: {"x": x[:, : 1 + int((x > 0).sum())]},
        r"part 'x' is torch.float32 of \(\d,\) a row; of zeros it was 'x', torch.float32 of \(1,\)",
    ),
    "another dtype": (lambda x: {"x": x.half() if x.any() else x}, "of zeros it was"),
    "another part": (lambda x: {"x": x} | ({"y": x} if x.any() else {}), "2 parts, of zeros 1"),
}


@pytest.mark.parametrize("what", WRONG_PARTS)
def test_parts_that_the_library_cannot_lay_out_are_named(what):
    gives, message = WRONG_PARTS[what]
    with pytest.raises(ValueError, match=f"codec anything: .*{message}"):
        made(gives).encode(normal(2, 6))


def ragged(counts, room=4):
    return lambda x: {"x": tw.Ragged(x.new_zeros((len(x), room)), torch.tensor(counts(len(x))))}


WRONG_COUNTS = {
    "too many": (ragged(lambda rows: [5] * rows), "counts outside 0 … 3"),
    "more than said": (ragged(lambda rows: [4] * rows), "counts outside 0 … 3"),
    "negative": (ragged(lambda rows: [-1] * rows), "counts outside 0 … 3"),
    "not one a row": (ragged(lambda rows: [1] * (rows + 1)), "its counts are integers, one a row"),
    "floats": (ragged(lambda rows: [1.0] * rows), "its counts are integers, one a row"),
    "not ragged": (lambda x: {"x": x}, "tw.Ragged are the parts that max_counts names, alone"),
}


@pytest.mark.parametrize("what", WRONG_COUNTS)
def test_numbers_of_entries_that_do_not_fit_are_named(what):
    gives, message = WRONG_COUNTS[what]
    with pytest.raises(ValueError, match=f"codec anything: part 'x'.*{message}|{message}"):
        made(gives, most={"x": 3}).encode(normal(2, 6))


WRONG_BACK = {
    "no tensor": (lambda parts, n: None, "decode returned NoneType, not floats of"),
    "whole numbers": (lambda parts, n: parts["x"].long(), "decode returned torch.int64 of"),
    "another shape": (lambda parts, n: parts["x"][:, :-1], r"not floats of \(2, 6\)"),
    "nan": (lambda parts, n: parts["x"] / 0 * 0, "the payload holds values that are not finite"),
    "beyond float32": (lambda parts, n: parts["x"].double() * 1e300, "values that are not finite"),
    "an index": (lambda parts, n: parts["x"][:, [99]], "decode: IndexError: index 99 is out of"),
    "torch's": (lambda parts, n: parts["x"] @ parts["x"], "decode: RuntimeError: mat1 and mat2"),
}


@pytest.mark.parametrize("what", WRONG_BACK)
def test_what_decode_returns_is_checked(what):
    back, message = WRONG_BACK[what]
    coder = made(lambda x: {"x": x}, back)
    payload = coder.encode(normal(2, 6))
    with pytest.raises(ValueError, match=f"codec anything: .*{message}"):
        coder.decode(payload, (2, 6), torch.float32)


def test_a_mistake_in_decode_itself_is_not_taken_for_a_bad_payload():
    coder = made(lambda x: {"x": x}, lambda parts, n: parts["x"].flaot())
    payload = coder.encode(normal(2, 6))
    with pytest.raises(AttributeError, match="flaot"):
        coder.decode(payload, (2, 6), torch.float32)


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_a_part_may_have_any_dtype_and_shape(dtype):
    def gives(x):
        part = x.to(dtype)
        return {"x": part.view(len(x), -1, 2), "one": part[:, 0], "none": part[:, :0]}

    def back(parts, n):
        assert {name: part.shape[1:] for name, part in parts.items()} == {
            "x": (3, 2),
            "one": (),
            "none": (0,),
        }
        assert {part.dtype for part in parts.values()} == {dtype}
        return (
            parts["x"].flatten(1).real.float()
            if dtype.is_complex
            else parts["x"].flatten(1).to(torch.float32)
        )

    x = normal(2, 6)
    coder = made(gives, back)
    assert coder.max_nbytes(x.shape, x.dtype) == 2 * 7 * dtype.itemsize
    y = coder.decode(coder.encode(x), x.shape, x.dtype)
    assert y.equal(x.to(dtype).real.float() if dtype.is_complex else x.to(dtype).float())


@pytest.mark.parametrize("rows", [1, 3])
def test_a_part_may_lie_in_memory_in_any_way(rows):
    x = normal(rows, 6)
    coder = made(lambda x: {"x": x.t().contiguous().t(), "one": x.new_ones(1).expand(len(x))})
    assert coder.decode(coder.encode(x), x.shape, x.dtype).equal(x)


def test_bytes_that_are_no_bool_decode_to_one():
    coder = made(lambda x: {"x": x > 0}, lambda parts, n: parts["x"] * 1.0)
    y = coder.decode(torch.tensor([0, 1, 2, 255], dtype=torch.uint8), (2, 2), torch.float32)
    assert y.equal(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))


def test_its_values_may_be_those_that_topk_keeps(tmp_path):
    own("sign", tmp_path)
    y = round_trip("topk:0.25/sign", normal(2, 80))
    assert (y != 0).sum() == 40


def test_the_library_makes_the_codec_and_leaves_the_class_as_it_is(tmp_path):
    coder = own("sign", tmp_path)
    assert isinstance(coder, OfTensors)
    assert coder.coder.encode(torch.ones(1, 3)).keys() == {"negative", "scale"}


def test_a_class_without_decode_is_refused_when_it_is_registered():
    @dataclasses.dataclass(frozen=True)
    class Half(tw.TensorCodec):
        def encode(self, x):
            return {"x": x}

    add: Any = tw.register_codec("half")
    with pytest.raises(ValueError, match="Half has no decode, which every codec needs"):
        add(Half)
