"""Frames: what is sent arrives, and whatever else arrives is refused with the reason."""

import math
import re
import struct
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thinwire as tw
from thinwire import frame
from thinwire.errors import FrameError
from thinwire.frame import Direction, Kind, Place, Section

U32, U64 = 2**32 - 1, 2**64 - 1
HEADER, CHECKSUM, ALL_ROWS = 36, 8, U32
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
OTHERS = [torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DTYPES = FLOATS + INTEGERS + OTHERS
SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (4, 0), (2, 3, 130), (1, 1, 1, 1)]
CODECS = ["raw", "bf16", "fp16", "fp8"] + [f"int{b}" for b in range(1, 9)]
CODECS += ["int4:group=32,symmetric", "int8:round=stochastic", "int3:scale=std", "int5:group=row"]


def places() -> st.SearchStrategy[Place]:
    return st.builds(
        Place,
        st.integers(0, U64),
        st.integers(0, U32),
        st.integers(0, U32),
        st.integers(0, U32),
        st.sampled_from(Direction),
    )


@st.composite
def sections(draw: st.DrawFn) -> Section:
    dims: list[int] = draw(st.lists(st.integers(0, 6), max_size=4))
    shape = tuple(dims)
    rows: list[int] | None = None
    if draw(st.booleans()) and shape:
        rows = sorted(draw(st.sets(st.integers(0, shape[0] - 1)))) if shape[0] else []
    versions = None
    if draw(st.booleans()):
        count = len(rows) if rows is not None else (shape[0] if shape else 0)
        versions = draw(st.lists(st.integers(0, U32), min_size=count, max_size=count))
    return Section(
        draw(st.sampled_from(Kind)),
        draw(st.text(st.characters(max_codepoint=126, min_codepoint=33), max_size=30)),
        draw(st.sampled_from(DTYPES)),
        shape,
        payload(draw(st.binary(max_size=40))),
        rows,
        versions,
        draw(st.integers(0, U64)) if versions is not None else 0,
        draw(st.integers(0, 255)),
        draw(st.booleans()),
    )


def payload(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def joined(place: Place, parts: list[Section]) -> bytes:
    return b"".join(frame.build(place, parts))


def same(a: Section, b: Section) -> bool:
    return bool(a.payload.equal(b.payload)) and replace(a, payload=b.payload) == b


EXAMPLE = Place(7, 3, 2, 1, Direction.BACKWARD)


def example() -> bytes:
    """A bound frame with a row mask and versions."""
    change = Section(Kind.CHANGE, "int4", shape=(3, 4), payload=payload(b"abc"))
    change.rows, change.versions, change.keys = [0, 2], [1, 5], 99
    return joined(EXAMPLE, [change, Section(Kind.FIRST, "int8", shape=(3, 4), rows=[1])])


@given(places(), st.lists(sections(), max_size=4))
def test_a_frame_gives_back_what_was_put_in(place: Place, parts: list[Section]) -> None:
    found, back = frame.parse(joined(place, parts), place)
    assert found == place
    assert len(back) == len(parts)
    assert all(same(a, b) for a, b in zip(back, parts, strict=True))


@given(st.lists(sections(), max_size=4))
def test_nbytes_is_the_size_of_the_built_frame(parts: list[Section]) -> None:
    assert frame.nbytes(parts) == len(joined(Place(), parts))


@given(sections())
def test_a_section_adds_no_more_than_its_declared_bound(section: Section) -> None:
    extra = frame.nbytes([section]) - frame.MIN_BYTES - section.payload.numel()
    mask = 0 if section.rows is None else -(-section.shape[0] // 8)
    assert extra <= frame.MAX_ENTRY_BYTES + mask + 4 * len(section.versions or ())


def test_payloads_of_a_writable_buffer_are_not_copied() -> None:
    data = bytearray(joined(Place(), [Section(Kind.VALUE, payload=payload(b"abc"))]))
    _, (section,) = frame.parse(data)
    data[-9] = ord("z")
    assert bytes(section.payload.numpy()) == b"abz"


def test_every_truncation_is_refused_as_cut_short() -> None:
    data = example()
    for n in range(len(data)):
        with pytest.raises(FrameError, match="cut short"):
            frame.parse(data[:n], EXAMPLE)


@given(st.binary(min_size=1, max_size=50))
def test_every_extension_is_refused_as_too_long(more: bytes) -> None:
    with pytest.raises(FrameError, match="too long"):
        frame.parse(example() + more, EXAMPLE)


def test_every_single_bit_flip_is_refused() -> None:
    data = bytearray(example())
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            frame.parse(data, EXAMPLE)
        data[bit // 8] ^= 1 << bit % 8
    assert len(frame.parse(data, EXAMPLE)[1]) == 2


def test_a_flipped_payload_is_refused_as_damaged() -> None:
    data = bytearray(example())
    data[-9] ^= 1
    with pytest.raises(FrameError, match="damaged: the checksum"):
        frame.parse(data)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_with_a_frame_error(data: bytes) -> None:
    with pytest.raises(FrameError):
        frame.parse(data)


def test_wrong_magic_is_refused_as_no_frame() -> None:
    with pytest.raises(FrameError, match="no thinwire frame"):
        frame.parse(b"HTTP" + example()[4:])


def test_another_version_is_refused_by_its_number() -> None:
    data = bytearray(example())
    data[4] = 9
    with pytest.raises(FrameError, match="version 9; this is version 3"):
        frame.parse(data)


@given(places())
def test_a_frame_for_any_other_place_is_refused(other: Place) -> None:
    if other != EXAMPLE:
        with pytest.raises(FrameError, match=r"arrived where one for .* was expected"):
            frame.parse(example(), other)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", 8),
        ("step", 4),
        ("microbatch", 0),
        ("edge", 2),
        ("direction", Direction.FORWARD),
    ],
)
def test_each_coordinate_alone_tells_frames_apart(field: str, value: int) -> None:
    changed: dict[str, Any] = {field: value}
    other = EXAMPLE._replace(**changed)
    with pytest.raises(FrameError) as caught:
        frame.parse(example(), other)
    assert str(EXAMPLE) in str(caught.value)
    assert str(other) in str(caught.value)


# Frames whose checksum is right, made by someone who means harm.


def forged(body: bytes, count: int = 1, direction: int = 0) -> bytes:
    """A frame with a right length and checksum around any section table and payloads."""
    total = HEADER + len(body) + CHECKSUM
    data = struct.pack("<4sBBHQIIIQ", b"TWIR", 3, direction, count, 0, 0, 0, 0, total) + body
    return data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))


def entry(
    name: bytes = b"raw",
    shape: tuple[int, ...] = (),
    *,
    kind: int = 0,
    dtype: int = 0,
    dims: int | None = None,
    rows: int = ALL_ROWS,
    size: int = 0,
    rest: bytes = b"",
) -> bytes:
    """One entry of a section table, as it is or as it should never be."""
    dims = len(shape) if dims is None else dims
    head = struct.pack("<BBBBIQB", 0, kind, dtype, dims, rows, size, len(name))
    return head + name + struct.pack(f"<{len(shape)}Q", *shape) + rest


HOSTILE = {
    "an unknown direction": (forged(entry(), direction=4), "unknown direction 4"),
    "more sections than there are": (forged(entry(), count=65535), "past the end"),
    "fewer sections than there are": (forged(entry() * 2), "bytes follow the last section"),
    "no section": (forged(b"", count=0), "does not decode alone"),
    "a payload beyond the end": (forged(entry(size=1 << 40)), "claims 1099511627776 payload"),
    "a payload of 2^64 - 1 bytes": (forged(entry(size=U64)), "claims .* 0 are left"),
    "payloads that overlap in sum": (
        forged(entry(shape=(3,), dtype=4, size=2) * 2 + b"abc", count=2),
        "claims 2 payload bytes, 1 are left",
    ),
    "a kind of the future": (forged(entry(kind=49)), "unknown kind 49"),
    "a dtype of the future": (forged(entry(dtype=99)), "dtype 99"),
    "too many dimensions": (forged(entry(dims=17, rest=bytes(136))), "17 dims"),
    "dimensions beyond the end": (forged(entry(dims=16)), "past the end"),
    "huge dimensions": (forged(entry(shape=(U64,) * 16)), "not plausible"),
    "a dimension of 2^64 - 1 beside a zero": (forged(entry(shape=(0, U64))), "not plausible"),
    "2^40 values without a payload": (forged(entry(b"int4", (1 << 40,))), "payload bytes, found 0"),
    "2^40 rows of versions": (forged(entry(shape=(1 << 40,), kind=0x80)), "past the end"),
    "a mask of 2^40 rows": (forged(entry(shape=(1 << 40,), rows=0)), "past the end"),
    "rows of a number": (forged(entry(rows=1)), "without dimensions"),
    "more rows than the mask names": (
        forged(entry(shape=(8,), rows=3, rest=b"\x01")),
        "does not name 3",
    ),
    "rows beyond the last": (forged(entry(shape=(3,), rows=1, rest=b"\x80")), "does not name 1"),
    "a name beyond the end": (forged(entry()[:-3]), "past the end"),
    "a name that is not ASCII": (forged(entry("ïnt4".encode())), "not ASCII"),
    "no name": (forged(entry(b"")), "spec"),
    "an unknown codec": (forged(entry(b"itn4")), "did you mean 'int4'"),
    "a bad option": (forged(entry(b"int4:group=%s" % (b"9" * 150))), "group="),
    "a name of 255 bytes": (forged(entry(b"int4:" * 51)), "at most 200"),
    "a scheme": (forged(entry(b"delta(int4)")), "is a scheme, which has state"),
    "nested schemes": (forged(entry(b"delta(" * 33)), "spec"),
    "integers in a float codec": (forged(entry(b"int4", (0,), dtype=8)), "floating-point"),
    "a NaN for a scale": (
        forged(entry(b"int8", (1,), size=14) + b"\xff\x7f" + bytes(12)),
        "invalid scale",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_frame_is_refused_with_the_reason(what: str) -> None:
    data, reason = HOSTILE[what]
    with pytest.raises(FrameError, match=reason):
        tw.unpack(data)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_frame_costs_neither_time_nor_memory(what: str) -> None:
    tracemalloc.start()
    begun = time.perf_counter()
    with pytest.raises(FrameError):
        tw.unpack(HOSTILE[what][0])
    assert time.perf_counter() - begun < 1.0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("name", [b"raw", b"int8", b"fp8", b"int4:group=row"])
def test_a_tensor_of_many_rows_without_values_needs_no_memory(name: bytes) -> None:
    found = tw.unpack(forged(entry(name, (2**47, 0))))
    assert found.shape == (2**47, 0)


@settings(max_examples=300)
@given(st.data())
def test_any_change_under_a_right_checksum_is_refused_or_read_as_sections(
    data: st.DataObject,
) -> None:
    body = bytearray(example()[:-CHECKSUM])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(HEADER, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    changed = bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))
    try:
        _, found = frame.parse(changed, EXAMPLE)
    except FrameError:
        return
    assert sum(s.payload.numel() for s in found) == 3


@settings(max_examples=200)
@given(st.binary(max_size=80), st.integers(0, 4))
def test_any_table_under_a_right_checksum_unpacks_or_is_refused(body: bytes, count: int) -> None:
    try:
        found = tw.unpack(forged(body, count))
    except FrameError:
        return
    assert isinstance(found, Tensor)


# Self-describing frames.


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype == torch.bool or not dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_brings_back_every_dtype_and_shape_bit_for_bit(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = values(shape, dtype)
        y = tw.unpack(tw.pack(x, "raw"))
        assert y.dtype == x.dtype
        assert y.shape == x.shape
        assert y.contiguous().flatten().view(torch.uint8).equal(x.flatten().view(torch.uint8))


@pytest.mark.parametrize("spec", CODECS)
def test_unpack_decodes_what_pack_encoded(spec: str) -> None:
    coder = tw.codec(spec)
    for dtype in FLOATS:
        for shape in SHAPES:
            x = values(shape, dtype)
            y = tw.unpack(tw.pack(x, coder))
            assert y.dtype == dtype
            assert y.equal(coder.decode(coder.encode(x), x.shape, dtype))


@pytest.mark.parametrize("spec", CODECS)
def test_a_frame_names_its_codec_canonically(spec: str) -> None:
    _, (section,) = frame.parse(tw.pack(torch.ones(2, 3), spec))
    assert section.codec == str(tw.codec(spec))


def test_pack_takes_strided_tensors() -> None:
    x = torch.arange(24.0).view(2, 3, 4).transpose(0, 2)
    assert tw.unpack(tw.pack(x, "raw")).equal(x)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_unpack_reads_any_buffer(kind: type) -> None:
    x = torch.randn(3, 4)
    assert tw.unpack(kind(tw.pack(x, "raw"))).equal(x)


def test_unpack_reads_a_tensor_of_bytes() -> None:
    x = torch.randn(3, 4)
    data = tw.pack(x, "raw")
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    spread = torch.stack([tensor, tensor], 1)[:, 0]
    assert tw.unpack(tensor).equal(x)
    assert tw.unpack(spread).equal(x)


def test_an_empty_tensor_of_bytes_is_refused_as_cut_short() -> None:
    with pytest.raises(FrameError, match="cut short"):
        tw.unpack(torch.empty(0, dtype=torch.uint8))


@pytest.mark.parametrize("x", [torch.zeros(50), torch.zeros(5, 10, dtype=torch.uint8)])
def test_a_tensor_that_is_no_row_of_bytes_is_refused(x: Tensor) -> None:
    with pytest.raises(FrameError, match="a frame is 1-D uint8"):
        tw.unpack(x)


def bound(**changes: Any) -> bytes:
    section = Section(Kind.VALUE, "raw", shape=(1, 1), payload=payload(bytes(4)))
    return joined(Place(), [replace(section, **changes)])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(example(), id="two sections"),
        pytest.param(bound(kind=Kind.CHANGE), id="a change"),
        pytest.param(bound(kind=Kind.FIRST), id="a first visit"),
        pytest.param(bound(kind=Kind.ABORT), id="giving up"),
        pytest.param(bound(rows=[0]), id="some rows"),
        pytest.param(bound(versions=[3]), id="versions"),
    ],
)
def test_a_frame_bound_to_an_edge_is_not_unpacked(data: bytes) -> None:
    with pytest.raises(FrameError, match="bound to an edge and its state"):
        tw.unpack(data)


def test_a_value_off_an_edge_decodes_alone() -> None:
    x = torch.randn(2, 3)
    section = Section(Kind.VALUE, "raw", x.dtype, (2, 3), tw.codec("raw").encode(x))
    assert tw.unpack(joined(EXAMPLE, [section])).equal(x)


def test_pack_refuses_a_scheme() -> None:
    with pytest.raises(tw.SpecError, match="has state"):
        tw.pack(torch.ones(2), "delta(int4)")


def test_pack_refuses_what_is_not_finite() -> None:
    with pytest.raises(tw.NonFiniteError, match=r"nan at index \(1,\)"):
        tw.pack(torch.tensor([0.0, math.nan]), "int4")


# The layout of docs/wire-format.md, read with struct alone.


def test_a_frame_can_be_read_by_hand_from_its_description() -> None:
    change = Section(Kind.CHANGE, "int4", torch.bfloat16, (10, 6), payload(b"payload"))
    change.rows, change.versions, change.keys, change.tensor = [1, 9], [4, 70000], 0xABCDEF, 5
    value = Section(Kind.VALUE, "raw", torch.int32, (2,), payload(b"12345678"), predicted=True)
    place = Place(0x1122334455667788, 9, 3, 2, Direction.BACKWARD)
    data = joined(place, [change, value])

    assert data[0:4] == b"TWIR"
    assert data[4] == 3  # version
    assert data[5] == 1  # backward
    assert struct.unpack_from("<H", data, 6) == (2,)  # sections
    assert struct.unpack_from("<Q", data, 8) == (0x1122334455667788,)  # run
    assert struct.unpack_from("<III", data, 16) == (9, 3, 2)  # step, micro-batch, edge
    assert struct.unpack_from("<Q", data, 28) == (len(data),)

    at = 36
    assert struct.unpack_from("<BBBB", data, at) == (5, 2 | 0x80, 1, 2)  # tensor kind dtype dims
    assert struct.unpack_from("<IQ", data, at + 4) == (2, 7)  # rows, payload bytes
    assert data[at + 16] == 4
    assert data[at + 17 : at + 21] == b"int4"
    assert struct.unpack_from("<QQ", data, at + 21) == (10, 6)
    assert data[at + 37 : at + 39] == bytes([0b00000010, 0b00000010])  # rows 1 and 9 of 10
    assert struct.unpack_from("<QII", data, at + 39) == (0xABCDEF, 4, 70000)

    at += 55
    assert struct.unpack_from("<BBBBIQ", data, at) == (0, 0x40, 7, 1, 0xFFFFFFFF, 8)
    assert data[at + 16 : at + 20] == b"\x03raw"
    assert struct.unpack_from("<Q", data, at + 20) == (2,)

    at += 28
    assert data[at:-8] == b"payload" + b"12345678"
    assert struct.unpack("<Q", data[-8:]) == (xxhash.xxh3_64_intdigest(data[:-8]),)


def planes_by_hand(data: bytes, n: int, bits: int) -> list[int]:
    """The codes of one row, by the rules of docs/wire-format.md."""
    widths = {3: [2, 1], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1]}.get(bits, [bits])
    codes: list[int] = []
    at = 0
    while len(codes) < n:
        block = min(256, -(-(n - len(codes)) // 8) * 8)
        found, shift = [0] * block, 0
        for width in widths:
            length = block * width // 8
            for j in range(length):
                for k in range(8 // width):
                    field = data[at + j] >> (k * width) & (2**width - 1)
                    found[j + k * length] |= field << shift
            at += length
            shift += width
        codes += found
    assert at == len(data)
    return codes[:n]


def bf16(data: bytes, at: int) -> float:
    (value,) = struct.unpack("<f", b"\0\0" + data[at : at + 2])
    return float(value)


@pytest.mark.parametrize("bits", range(3, 9))
def test_an_integer_payload_can_be_decoded_by_hand(bits: int) -> None:
    x = torch.randn(1, 300, generator=torch.Generator().manual_seed(bits))
    data = bytes(tw.codec(f"int{bits}").encode(x).numpy())
    groups = 3  # of 128, 128 and 44 values
    codes = planes_by_hand(data[groups * 6 :], 300, bits)
    expected = tw.unpack(tw.pack(x, f"int{bits}"))[0].tolist()
    for i, code in enumerate(codes):
        scale = bf16(data, 2 * (i // 128))
        (offset,) = struct.unpack_from("<f", data, 2 * groups + 4 * (i // 128))
        product = torch.tensor(float(code)) * torch.tensor(scale)
        assert float(product + torch.tensor(offset)) == expected[i]


def test_an_fp8_payload_can_be_decoded_by_hand() -> None:
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    data = bytes(tw.codec("fp8").encode(x).numpy())
    expected = tw.unpack(tw.pack(x, "fp8"))
    assert len(data) == 2 * (4 + 5)
    for row in range(2):
        (scale,) = struct.unpack_from("<f", data, 9 * row)
        codes = torch.frombuffer(bytearray(data[9 * row + 4 : 9 * row + 9]), dtype=torch.uint8)
        byhand = codes.view(torch.float8_e4m3fn).float() * scale
        assert byhand.equal(expected[row])


def test_the_documented_dtype_codes_are_those_of_the_frames():
    text = (Path(__file__).parent.parent / "docs" / "wire-format.md").read_text()
    table = text[text.index("| dtype |") : text.index("**State.**")]
    documented = {int(code): name for code, name in re.findall(r"(\d+) \| (\w+)", table)}
    assert documented == {k: str(d).removeprefix("torch.") for k, d in enumerate(frame._DTYPES)}


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.complex32])
def test_raw_frames_hold_dtypes_that_torch_computes_little_with(dtype):
    x = torch.arange(-8, 8, dtype=torch.int64).view(dtype).reshape(2, -1)
    y = tw.unpack(tw.pack(x, "raw"))
    assert y.dtype == dtype
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8))


def test_a_tensor_of_too_many_dimensions_is_refused_when_it_is_packed():
    with pytest.raises(ValueError, match="at most 16 dimensions"):
        tw.pack(torch.zeros([1] * 17), "raw")
