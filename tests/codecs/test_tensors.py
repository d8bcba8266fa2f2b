"""Codecs as researchers write them: what the library does for them, and what it refuses."""

import dataclasses
import struct
from typing import Any, ClassVar

import pytest
import torch

import thinwire as tw
from tests.codecs.common import FLOATS, normal, round_trip
from thinwire.codecs import tensors
from thinwire.codecs.tensors import OfTensors
from thinwire.native import noise

pytestmark = pytest.mark.usefixtures("registry")


def sign() -> str:
    @tw.register_codec("sign")
    @dataclasses.dataclass(frozen=True)
    class Sign(tw.TensorCodec):
        def encode(self, x):
            return {"negative": tw.Bits(x < 0, 1), "scale": x.abs().mean(1)}

        def decode(self, parts, n):
            return torch.where(parts["negative"], -1.0, 1.0) * parts["scale"][:, None]

    return "sign"


def grid() -> str:
    """Integers of some bits, rounded at random, about a bfloat16 scale."""

    @tw.register_codec("grid")
    @dataclasses.dataclass(frozen=True)
    class Grid(tw.TensorCodec):
        bits: int = 3

        def encode(self, x, seeds):
            top = 2**self.bits - 1
            scale = (2 * x.abs().amax(1) / top).clamp(min=1e-30).to(torch.bfloat16)
            code = x / scale.float()[:, None] + top / 2 + self.noise(seeds, x.shape[1])
            return {"scale": scale, "code": tw.Bits(code.long().clamp(0, top), self.bits)}

        def decode(self, parts, n):
            return (parts["code"] - (2**self.bits - 1) / 2) * parts["scale"].float()[:, None]

    return "grid:bits=5"


def above() -> str:
    """The values above a threshold, with their positions: as many as there are."""

    @tw.register_codec("above")
    @dataclasses.dataclass(frozen=True)
    class Above(tw.TensorCodec):
        at: float = 1.0

        def max_counts(self, n):
            return {"index": n, "value": n}

        def encode(self, x):
            kept = x.abs() > self.at
            index = kept.sort(dim=1, descending=True, stable=True).indices
            width = max(1, (x.shape[1] - 1).bit_length())
            return {
                "index": tw.Ragged(tw.Bits(index, width), kept.sum(1)),
                "length": torch.full((len(x), 2), x.shape[1], dtype=torch.int16),
                "value": tw.Ragged(x.gather(1, index).half(), kept.sum(1)),
            }

        def decode(self, parts, n):
            index, value = parts["index"], parts["value"]
            if not index.counts.equal(value.counts):
                raise ValueError("positions and values of different numbers")
            at = torch.arange(index.values.shape[1], device=index.values.device)
            place = torch.where(at < index.counts[:, None], index.values, n)
            y = torch.zeros((len(place), n + 1), device=place.device)
            return y.scatter(1, place, value.values.float())[:, :n]

    return "above:at=0.5"


MADE = {"sign": sign, "grid": grid, "above": above}
every = pytest.mark.parametrize("name", MADE)


@every
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_it_is_a_codec_like_any_other(name, dtype, device):
    coder = tw.codec(MADE[name]())
    x = normal(3, 5, 7, device=device).to(dtype)
    y = coder.decode(coder.encode(x), x.shape, dtype)
    assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
    assert tw.parse(str(coder)) == coder
    assert tw.unpack(tw.pack(x, coder)).equal(y.cpu())
    assert str(tw.scheme(f"delta({coder},first={coder})")) == f"delta({coder},first={coder})"


@every
@pytest.mark.parametrize("lengths", [[90, 90, 90], [90, 0, 17], [1, 2, 90], [0, 0, 0]], ids=str)
def test_a_row_has_the_bytes_that_it_has_alone_and_decodes_to_what_it_does_alone(
    name, lengths, device
):
    spec, x = MADE[name](), normal(3, 9, 10, device=device)
    seeds = torch.tensor([4, 5, 6])
    whole = tw.codec(spec).encode(x, lengths=lengths, seed=seeds)
    y = tw.codec(spec).decode(whole, x.shape, x.dtype, lengths=lengths)
    alone = []
    for row, size in enumerate(lengths):
        part = x[row].flatten()[None, :size]
        alone.append(tw.codec(spec).encode(part, seed=seeds[row : row + 1]))
        assert y[row].flatten()[:size].equal(round_trip(spec, part, seed=seeds[row : row + 1])[0])
        assert not y[row].flatten()[size:].any()
    assert whole.equal(torch.cat(alone))


def test_the_bytes_are_the_parts_of_each_row_in_their_order():
    payload = tw.codec(sign()).encode(torch.tensor([[1.0, -2.0, -3.0], [-4.0, 4.0, 4.0]]))
    expected = bytes([0b110]) + struct.pack("<f", 2.0) + bytes([0b001]) + struct.pack("<f", 4.0)
    assert bytes(payload.tolist()) == expected


def test_a_ragged_part_has_its_number_of_entries_before_them():
    payload = tw.codec(above()).encode(torch.tensor([[0.0, 2.0, 0.0, -1.0], [0.0] * 4]))
    entries = struct.pack("<BBhhBee", 2, 0b1101, 4, 4, 2, 2.0, -1.0)
    assert bytes(payload.tolist()) == entries + struct.pack("<BhhB", 0, 4, 4, 0)


def test_sizes_are_those_of_zeros_and_asked_for_once():
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
    assert not tw.codec(above()).fixed_size


def test_a_long_row_of_a_frame_takes_no_memory_before_it_is_refused(monkeypatch):
    monkeypatch.setattr(tensors, "_MOST_ZEROS", 100)
    coder, few = tw.codec(sign()), torch.zeros(8, dtype=torch.uint8)
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


def test_noise_follows_from_the_seeds_alone():
    spec, x = grid(), normal(2, 400)
    seeds = torch.tensor([7, 8])
    found = tw.codec(spec).encode(x, seed=seeds)
    assert tw.codec(spec).stochastic
    assert not tw.codec(sign()).stochastic
    assert found.equal(tw.codec(spec).encode(x, seed=seeds))
    assert not found.equal(tw.codec(spec).encode(x, seed=seeds + 1))
    assert tw.TensorCodec.noise(seeds, 9).equal(noise.uniform(seeds, 9))
    assert tw.scheme(f"delta({spec})").stochastic


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
@every
def test_what_float32_cannot_hold_is_an_error_with_its_index(name, value):
    x = normal(2, 3, 4).double()
    x[1, 2, 0] = value
    with pytest.raises(tw.NonFiniteError, match=r"at index \(1, 2, 0\)"):
        tw.codec(MADE[name]()).encode(x)


@every
def test_no_payload_is_more_than_a_value_error(name):
    coder, x = tw.codec(MADE[name]()), normal(3, 40)
    payload = coder.encode(x)
    generator = torch.Generator().manual_seed(1)
    for turn in range(200):
        size = max(0, payload.numel() + turn % 7 - 3)
        noisy = torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
        if turn % 2 and size >= payload.numel():
            noisy[: payload.numel()] = payload
            noisy[turn % payload.numel()] ^= 255
        try:
            y = coder.decode(noisy, x.shape, x.dtype)
        except ValueError:
            continue
        assert bool(torch.isfinite(y).all())


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


def test_bytes_that_are_no_bool_decode_to_one():
    coder = made(lambda x: {"x": x > 0}, lambda parts, n: parts["x"] * 1.0)
    y = coder.decode(torch.tensor([0, 1, 2, 255], dtype=torch.uint8), (2, 2), torch.float32)
    assert y.equal(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))


def test_its_values_may_be_those_that_topk_keeps():
    sign()
    y = round_trip("topk:0.25/sign", normal(2, 80))
    assert (y != 0).sum() == 40


def test_both_ends_of_a_delta_agree_on_it():
    spec = grid()
    scheme = tw.scheme(f"delta({spec},first={spec})")
    sender, receiver = scheme.sender(), scheme.receiver()
    visit = tw.Visit((1, 2), (60, 60), torch.tensor([3, 4]), False)
    for step in range(4):
        for end in (sender, receiver):
            end.begin_step([visit])
        x = normal(2, 60) + 0.1 * normal(2, 60, seed=step)
        y = receiver.decode(sender.encode(x, 0, visit), 0, visit)
        assert sender.digest() == receiver.digest()
    assert float((y - x).norm() / x.norm()) < 0.2


def test_the_library_makes_the_codec_and_leaves_the_class_as_it_is():
    sign()
    coder = tw.codec("sign")
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
