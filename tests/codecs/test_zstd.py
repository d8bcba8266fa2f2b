"""``int4:zstd``: layout, entropy, and frames that are not to be trusted."""

import dataclasses
import threading

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.codecs.common import FLOATS, normal, quick, round_trip
from thinwire.codecs import codec, zstd
from thinwire.codecs.integer import Integer
from thinwire.errors import NonFiniteError
from thinwire.native import planes

SPECS = ["int4", "int2", "int3:symmetric", "int8", "int1", "int4:round=stochastic", "int4:hadamard"]


def with_zstd(spec: str) -> Integer:
    plain = codec(spec)
    assert isinstance(plain, Integer)
    return dataclasses.replace(plain, zstd=True)


def plain_of(c: Integer) -> Integer:
    return dataclasses.replace(c, zstd=False)


def cut(plain: Tensor, sizes: list[int], c: Integer) -> tuple[Tensor, Tensor]:
    """The parameters and the codes of all rows of a plain payload."""
    parameters, codes, at = [], [], 0
    for size in sizes:
        end = at + plain_of(c).row_nbytes(size, torch.float32)
        middle = end - planes.packed_nbytes(size, c.bits)
        parameters.append(plain[at:middle])
        codes.append(plain[middle:end])
        at = end
    return torch.cat(parameters), torch.cat(codes)


# layout


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("lengths", [None, [4000, 0, 1234, 8]], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_payload_is_a_flag_the_parameters_and_one_frame_or_the_plain_payload(
    spec, lengths, dtype, device
):
    c = with_zstd(spec)
    x = normal(4, 4000, device=device).to(dtype)
    seeds = torch.arange(4) * 7
    plain = plain_of(c).encode(x, lengths=lengths, seed=seeds)
    parameters, codes = cut(plain.cpu(), [4000] * 4 if lengths is None else lengths, c)
    found = c.encode(x, lengths=lengths, seed=seeds)
    y = c.decode(found, x.shape, dtype, lengths=lengths)
    assert torch.equal(y, plain_of(c).decode(plain, x.shape, dtype, lengths=lengths))
    found = found.cpu()
    if found[0] == 1:
        end = 1 + parameters.numel()
        assert torch.equal(found[1:end], parameters)
        frame = bytes(found[end:].tolist())
        assert zstandard.ZstdDecompressor().decompress(frame) == bytes(codes.tolist())
        assert found.numel() < 1 + plain.numel()
    else:
        assert torch.equal(found, torch.cat([torch.tensor([0]), plain.cpu()]))
    compressible = spec not in ("int1", "int2", "int3:symmetric")
    assert (found[0] == 1) == compressible or spec == "int2"


def test_what_does_not_compress_costs_one_byte():
    x = torch.rand(2, 64, generator=torch.Generator().manual_seed(0))
    c = with_zstd("int4")
    payload = c.encode(x)
    assert payload[0] == 0
    assert payload.numel() == plain_of(c).encode(x).numel() + 1
    assert payload.numel() <= c.max_nbytes(x.shape, x.dtype)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_no_values_are_no_bytes(shape):
    c = with_zstd("int4")
    payload = c.encode(torch.zeros(shape))
    assert payload.numel() == 0
    assert c.decode(payload, shape, torch.float32).shape == shape


def test_equal_values_cost_next_to_nothing():
    assert with_zstd("int4").encode(torch.zeros(1, 1 << 16)).numel() < 4000


@quick
@given(
    st.sampled_from(SPECS),
    st.lists(st.integers(0, 600), min_size=1, max_size=5),
    st.floats(0.01, 3),
)
def test_any_rows_come_back_as_from_the_plain_codec(spec, lengths, power):
    c = with_zstd(spec)
    x = normal(len(lengths), max(lengths)).abs() ** power
    y = round_trip(str(c), x, lengths=lengths, seed=5)
    assert torch.equal(y, round_trip(spec, x, lengths=lengths, seed=5))
    payload = c.encode(x, lengths=lengths, seed=5)
    assert payload.numel() <= c.max_nbytes(x.shape, x.dtype)


def test_a_value_that_is_not_finite_is_an_error_with_its_index():
    x = normal(2, 300)
    x[1, 77] = torch.nan
    with pytest.raises(NonFiniteError, match=r"\(1, 77\)"):
        with_zstd("int4").encode(x)


# size


@pytest.mark.parametrize("group", [128, 1024])
def test_codes_take_at_most_2_percent_more_than_their_entropy(group):
    c = with_zstd(f"int4:group={group}")
    x = normal(256, 4096)
    plain = plain_of(c).encode(x)
    parameters, packed = cut(plain, [4096] * 256, c)
    codes = torch.cat([packed & 15, packed >> 4])
    share = torch.bincount(codes.to(torch.int64), minlength=16).double() / codes.numel()
    entropy = float(-(share * share.clamp(min=1e-300).log2()).sum()) * codes.numel() / 8
    payload = c.encode(x)
    assert payload[0] == 1
    assert payload.numel() - 1 - parameters.numel() < 1.02 * entropy


# frames that are not to be trusted


def forged(c: Integer, frame: bytes, x: Tensor) -> Tensor:
    """A payload for ``x`` with ``frame`` in place of its own."""
    parameters, _ = cut(plain_of(c).encode(x), [x.shape[1]] * x.shape[0], c)
    return torch.cat(
        [
            torch.tensor([1], dtype=torch.uint8),
            parameters,
            torch.tensor(list(frame), dtype=torch.uint8),
        ]
    )


def compressed(data: bytes, write_content_size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=write_content_size).compress(data)


X = normal(4, 4096)
CODES = 4 * 4096 // 2
FRAME = compressed(bytes(CODES))


def test_a_frame_as_it_should_be_is_accepted():
    c = with_zstd("int4")
    y = c.decode(forged(c, FRAME, X), X.shape, torch.float32)
    assert bool(torch.isfinite(y).all())


def header(log: int) -> bytes:
    """Of a frame that announces CODES bytes and a window of 2**(10 + log)."""
    return b"\x28\xb5\x2f\xfd" + bytes([0x80, log << 3]) + CODES.to_bytes(4, "little")


def test_a_frame_made_by_hand_is_accepted_while_its_window_is_short():
    assert (
        zstd.decompress(
            torch.tensor(list(header(10) + long_window()[10:]), dtype=torch.uint8), CODES
        ).sum()
        == 0
    )


def long_window() -> bytes:
    """A frame that announces CODES bytes and a window of 16 MiB, and holds a run of zeros."""
    return header(14) + (CODES << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\x00"


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "damaged"),
        (b"nonsense that is no frame", "damaged"),
        (FRAME[:-1], "damaged"),
        (FRAME + b"\0", "damaged"),
        (FRAME + FRAME, "damaged"),
        (compressed(bytes(CODES - 1)), f"of {CODES - 1} bytes, {CODES} expected"),
        (compressed(bytes(CODES + 1)), f"of {CODES + 1} bytes, {CODES} expected"),
        (compressed(bytes(1 << 24)), "of 16777216 bytes"),
        (compressed(bytes(CODES), write_content_size=False), "bytes, 8192 expected"),
        (long_window(), "a window of 16777216 bytes"),
    ],
    ids=[
        "empty",
        "nonsense",
        "cut",
        "a byte more",
        "a frame more",
        "too little",
        "too much",
        "a bomb",
        "of no known size",
        "a long window",
    ],
)
def test_a_frame_that_is_not_what_is_expected_is_refused(frame, message):
    c = with_zstd("int4")
    with pytest.raises(ValueError, match=message):
        c.decode(forged(c, frame, X), X.shape, torch.float32)


@pytest.mark.parametrize("size", [CODES - 100, CODES + 100, CODES << 10])
def test_a_frame_that_holds_another_size_than_it_announces_is_refused(size):
    frame = compressed(bytes(size))
    blocks = frame[zstandard.frame_header_size(frame) :]
    c = with_zstd("int4")
    with pytest.raises(ValueError, match="zstd frame"):
        c.decode(forged(c, header(10) + blocks, X), X.shape, torch.float32)


@pytest.mark.parametrize("payload", [b"", b"\0", b"\1", b"\2", b"\xff", b"\0" * 8000], ids=len)
def test_payloads_that_do_not_fit_are_refused(payload):
    c = with_zstd("int4")
    data = torch.tensor(list(payload), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"codec int4:zstd: a (payload|damaged zstd frame|tensor)"):
        c.decode(data, X.shape, torch.float32)


@quick
@given(st.binary(max_size=300), st.integers(0, 1))
def test_any_bytes_decode_to_finite_values_or_an_error(noise, flag):
    c = with_zstd("int4")
    n = 256
    data = torch.tensor([flag, *noise], dtype=torch.uint8)[: c.row_nbytes(n, torch.float32)]
    try:
        y = c.decode(data, (1, n), torch.float32)
    except ValueError:
        return
    assert bool(torch.isfinite(y).all())


@quick
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_byte_is_an_error_or_leaves_finite_values(at, change):
    c = with_zstd("int4")
    payload = c.encode(X).clone()
    payload[at % payload.numel()] ^= change
    try:
        y = c.decode(payload, X.shape, torch.float32)
    except ValueError:
        return
    assert bool(torch.isfinite(y).all())


def test_threads_do_not_share_contexts():
    expected = with_zstd("int4").encode(X)
    found, contexts = [], []

    def work() -> None:
        for _ in range(20):
            found.append(with_zstd("int4").encode(X))
            y = with_zstd("int4").decode(found[-1], X.shape, torch.float32)
            assert y.shape == X.shape
        contexts.append(zstd._local.compressor)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(torch.equal(payload, expected) for payload in found)
    assert len({id(context) for context in contexts}) == 4
