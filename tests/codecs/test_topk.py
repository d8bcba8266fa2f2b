"""``topk``: what is kept, what it costs, and the base class's promises for a size that varies."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codecs.common import FLOATS, normal, quick, round_trip
from thinwire.codecs import codec
from thinwire.codecs.topk import TopK
from thinwire.errors import FrameError, NonFiniteError, SpecError
from thinwire.frame import Section
from thinwire.schemes import Visit, scheme
from thinwire.spec import parse

SPECS = ["topk:0.1", "topk:0.01/int8", "topk:0.2/bf16", "topk:0.3", "topk:0.5/int4", "topk:1"]
every = pytest.mark.parametrize("name", SPECS)
SHAPES = [(), (0,), (1,), (7,), (0, 5), (5, 0), (2, 3, 0), (3, 1), (1, 257), (3, 5, 7)]


# what is kept


@pytest.mark.parametrize(
    ("share", "n", "k"),
    [
        ("0.1", 10, 1),
        ("0.1", 11, 2),
        ("0.1", 1, 1),
        ("0.1", 30, 3),
        ("0.3", 10, 3),
        ("0.7", 10, 7),
        ("0.07", 100, 7),
        ("0.000000001", 10**9 + 1, 2),
        ("1", 13, 13),
        ("0.1", 0, 0),
    ],
)
def test_the_number_kept_is_the_exact_share_rounded_up(share, n, k):
    assert TopK(share).kept(n) == k


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_come_back_as_they_are_and_the_rest_as_zero(dtype, device):
    x = normal(4, 50, 20, device=device).to(dtype)
    y = round_trip("topk:0.05", x)
    for row, found in zip(x.flatten(1), y.flatten(1), strict=True):
        threshold = row.float().abs().sort(descending=True).values[49]
        kept = found != 0
        assert int(kept.sum()) == 50
        assert torch.equal(found[kept].float(), row[kept].float())
        assert bool((row[kept].float().abs() >= threshold).all())


def test_of_equal_magnitudes_the_first_are_kept(device):
    x = torch.tensor([[1.0, -2, 2, -2, 1, 2, 2, 1, 1, 1]], device=device)
    y = round_trip("topk:0.3", x)
    assert y.tolist() == [[0, -2, 2, -2, 0, 0, 0, 0, 0, 0]]


def test_a_constant_row_keeps_its_share():
    assert int((round_trip("topk:0.1", torch.full((1, 1000), -0.5)) != 0).sum()) == 100


def test_a_share_of_one_keeps_everything():
    x = normal(3, 100)
    assert torch.equal(round_trip("topk:1", x), x)


def test_kept_values_travel_through_the_named_codec():
    x = normal(3, 400)
    kept = round_trip("topk:0.1", x)
    for name in ("bf16", "int8", "int4"):
        y = round_trip(f"topk:0.1/{name}", x)
        for row, found in zip(kept, y, strict=True):
            there = row != 0
            assert torch.equal(found[there], round_trip(name, row[there]))
            assert not found[~there].any()


def test_values_of_sixteen_bits_travel_as_sixteen_bits():
    x = normal(1, 4000)
    for dtype in (torch.bfloat16, torch.float16):
        assert codec("topk:0.3").encode(x.to(dtype)).numel() == 2 * 1200 + 500
    assert codec("topk:0.3").encode(x).numel() == 4 * 1200 + 500
    assert codec("topk:0.3").encode(x.double()).numel() == 4 * 1200 + 500


def test_a_double_beyond_float32_is_an_error_not_an_infinity():
    x = torch.tensor([[1.0, 1e300]], dtype=torch.float64)
    with pytest.raises(NonFiniteError, match=r"topk:0\.5 cannot hold, at index \(0, 1\)"):
        codec("topk:0.5").encode(x)


# what it costs


@pytest.mark.parametrize("share", ["0.001", "0.01", "0.05", "0.1", "0.2"])
@pytest.mark.parametrize("n", [1 << 15, 1 << 20])
def test_random_positions_cost_at_most_two_percent_more_than_their_entropy(share, n):
    p = float(share)
    entropy = -n / 8 * (p * math.log2(p) + (1 - p) * math.log2(1 - p))
    c = TopK(share)
    rows = max(1, (1 << 18) // n)
    spent = c.encode(normal(rows, n)).numel() / rows - 4 * c.kept(n)
    assert spent <= 1.02 * entropy


def test_positions_cost_a_bit_a_value_from_a_quarter_on():
    for share in ("0.25", "0.4", "1"):
        c = TopK(share)
        assert c.fixed_size
        assert c.row_nbytes(1000, torch.float32) == 4 * c.kept(1000) + 125
    assert not codec("topk:0.24").fixed_size


@every
@quick
@given(st.integers(1, 4), st.integers(0, 200), st.data())
def test_max_nbytes_is_a_bound_known_in_advance(name, rows, n, data):
    c = codec(name)
    x = normal(rows, n).abs() if data.draw(st.booleans()) else torch.ones(rows, n)
    lengths = data.draw(st.lists(st.integers(0, n), min_size=rows, max_size=rows))
    assert c.encode(x).numel() <= c.max_nbytes(x.shape, x.dtype)
    assert c.encode(x, lengths=lengths).numel() <= c.max_nbytes(x.shape, x.dtype)


# the base class's promises


@every
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_and_float_dtype_comes_back(name, shape, device):
    for dtype in FLOATS:
        x = normal(*shape, device=device).to(dtype)
        y = round_trip(name, x)
        assert y.shape == x.shape
        assert y.dtype == dtype
        assert y.device == x.device


@every
@quick
@given(st.lists(st.integers(0, 200), min_size=1, max_size=6))
def test_rows_of_mixed_lengths_are_the_bytes_of_each_row_cut_to_its_length(name, lengths):
    x = normal(len(lengths), 200)
    c = codec(name)
    parts = [c.encode(x[i : i + 1, :size]) for i, size in enumerate(lengths)]
    assert torch.equal(c.encode(x, lengths=lengths), torch.cat(parts))
    y = round_trip(name, x, lengths=lengths)
    for i, size in enumerate(lengths):
        assert torch.equal(y[i : i + 1, :size], round_trip(name, x[i : i + 1, :size]))
        assert not y[i, size:].any()


@every
@pytest.mark.parametrize("padding", [0.0, 1e9, float("nan"), float("inf")])
def test_padding_costs_nothing_and_is_never_kept(name, padding):
    x = normal(3, 40)
    lengths = torch.tensor([40, 17, 0])
    padded = torch.full((3, 64), padding)
    padded[:, :40] = x
    for i, size in enumerate(lengths.tolist()):
        padded[i, size:] = padding
    assert torch.equal(
        codec(name).encode(padded, lengths=lengths), codec(name).encode(x, lengths=lengths)
    )


@every
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_strides_do_not_matter_and_the_input_is_left_unchanged(name, dtype):
    x = normal(6, 20, 5).to(dtype).requires_grad_()
    before = x.detach().clone()
    expected = codec(name).encode(x)
    assert not expected.requires_grad
    strided = torch.empty(6, 20, 10, dtype=dtype)[..., ::2].copy_(before)
    padded = torch.empty(6, 200, dtype=dtype)[:, 7:107].copy_(before.flatten(1))
    turned = before.transpose(0, 2).contiguous().transpose(0, 2)
    for same in (strided, padded, turned, before[None].expand(2, 6, 20, 5)[1]):
        assert torch.equal(codec(name).encode(same), expected)
    assert torch.equal(x, before)


@every
def test_encoding_into_a_buffer_writes_its_start_and_no_more(name):
    x = normal(3, 500)
    expected = codec(name).encode(x)
    most = codec(name).max_nbytes(x.shape, x.dtype)
    for offset in (0, 1, 3):  # unaligned as well
        buffer = torch.full((most + 20,), 171, dtype=torch.uint8)
        view = codec(name).encode(x, out=buffer[offset:])
        assert torch.equal(view, expected)
        assert view.data_ptr() == buffer.data_ptr() + offset
        assert bool((buffer[:offset] == 171).all())
        assert bool((buffer[offset + most :] == 171).all())


def test_a_buffer_below_the_bound_is_refused():
    c, x = codec("topk:0.1"), normal(3, 500)
    most = c.max_nbytes(x.shape, x.dtype)
    with pytest.raises(ValueError, match=f"at least {most} bytes"):
        c.encode(x, out=torch.empty(most - 1, dtype=torch.uint8))


@every
@pytest.mark.parametrize("lengths", [None, [50, 13, 0]], ids=str)
def test_decoding_into_an_output_from_any_address_gives_the_same_values(name, lengths):
    x = normal(3, 50)
    expected = round_trip(name, x, lengths=lengths)
    payload = codec(name).encode(x, lengths=lengths)
    payload = torch.empty(payload.numel() + 1, dtype=torch.uint8)[1:].copy_(payload)
    spread = torch.empty(payload.numel() * 2, dtype=torch.uint8)[::2].copy_(payload)
    outs = [
        torch.full((3, 50), torch.nan),
        torch.full((50, 3), torch.nan).t(),
        torch.full((3, 101), torch.nan)[:, 1::2],
    ]
    for out in outs:
        for source in (payload, spread):
            y = codec(name).decode(source, x.shape, x.dtype, lengths=lengths, out=out)
            assert y is out
            assert torch.equal(out, expected)


@every
@quick
@given(
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.sampled_from(FLOATS),
    st.integers(0, 2),
    st.integers(0, 259),
)
def test_a_value_that_is_not_finite_is_an_error_with_its_index(name, value, dtype, row, column):
    x = normal(3, 260).to(dtype)
    x[row, column] = value
    with pytest.raises(NonFiniteError, match=rf"{value} at index \({row}, {column}\)"):
        codec(name).encode(x)


def test_a_kept_value_that_its_codec_cannot_hold_is_an_error():
    x = torch.tensor([[1.0, 7e4, 2.0, 3.0]])
    with pytest.raises(NonFiniteError, match=r"topk:0\.5/fp16 cannot hold, at index \(0, 1\)"):
        codec("topk:0.5/fp16").encode(x)


@every
def test_a_payload_of_the_wrong_size_is_an_error(name):
    payload = codec(name).encode(normal(3, 500))
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]]), payload[:0]):
        with pytest.raises(ValueError, match=r"payload (bytes, found|holds positions or values)"):
            codec(name).decode(wrong, (3, 500), torch.float32)


@every
@quick
@given(st.data())
def test_a_damaged_payload_is_an_error_or_a_tensor_without_surprises(name, data):
    payload = codec(name).encode(normal(2, 120)).clone()
    for _ in range(3):
        payload[data.draw(st.integers(0, payload.numel() - 1))] = data.draw(st.integers(0, 255))
    try:
        y = codec(name).decode(payload, (2, 120), torch.float32)
    except ValueError:
        return
    assert bool(torch.isfinite(y).all())
    assert int((y != 0).sum(1).max()) <= TopK(name.removeprefix("topk:")).kept(120)


@pytest.mark.parametrize("name", ["topk:0.1/int8", "topk:0.3/fp8"])
def test_the_largest_half_precision_value_does_not_come_back_infinite(name):
    x = torch.tensor([[65504.0, -65504.0, 1.0, 65504.0] * 40], dtype=torch.float16)
    assert bool(torch.isfinite(round_trip(name, x)).all())


def test_tensors_that_are_not_floating_point_are_refused():
    with pytest.raises(ValueError, match="takes floating-point tensors"):
        codec("topk:0.1").encode(torch.ones(3, 4, dtype=torch.int64))


def test_torch_generators_are_left_alone():
    before = torch.get_rng_state()
    round_trip("topk:0.1/int4", normal(4, 9000))
    assert torch.equal(torch.get_rng_state(), before)


# the spec


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("topk:0.1", "topk:0.1"),
        ("topk:.10", "topk:0.1"),
        ("topk:00.100", "topk:0.1"),
        ("topk:1.0", "topk:1"),
        ("topk:1.", "topk:1"),
        ("topk:share=0.1", "topk:0.1"),
        ("topk:0.10/int8", "topk:0.1/int8"),
        ("topk: 0.1 / int8", "topk:0.1/int8"),
        ("delta(topk:0.50/int4,first=topk:0.5)", "delta(topk:0.5/int4,first=topk:0.5)"),
    ],
)
def test_canonical_strings(text, canonical):
    value = parse(text)
    assert str(value) == canonical
    assert parse(canonical) == value
    assert hash(parse(canonical)) == hash(value)


@given(st.integers(1, 10**9), st.sampled_from(["", "/bf16", "/fp8", "/int1", "/int8"]))
def test_the_canonical_string_parses_to_an_equal_value(billionths, coder):
    value = TopK(f"{billionths / 1e9:.9f}{coder}")
    assert parse(str(value)) == value


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("topk", "topk needs share, as in topk:0.1"),
        ("topk:0", "a share of 0 is not above 0 and at most 1"),
        ("topk:0.0", "a share of 0.0 is not above 0"),
        ("topk:2", "a share of 2 is not above 0 and at most 1"),
        ("topk:1.000001", "a share of 1.000001 is not"),
        ("topk:-0.1", "'-0.1' is not a share such as 0.1"),
        ("topk:abc", "'abc' is not a share such as 0.1"),
        ("topk:nan", "'nan' is not a share"),
        ("topk:1e-3", "'1e-3' is not a share"),
        ("topk:0.0000000001", "at most 9 decimals"),
        ("topk:0.1/", "'' is no codec for the kept values"),
        ("topk:0.1/int9", "'int9' is no codec for the kept values; did you mean 'int8'?"),
        ("topk:0.1/topk", "'topk' is no codec for the kept values"),
        ("topk:0.1/delta", "'delta' is no codec for the kept values"),
        ("topk:keep=3", "topk has no option 'keep'"),
        ("topk:0.1,0.2", "topk has no option '0.2'"),
        ("topk:0.1,share=0.2", "share is given twice"),
        ("topk(int8)", "options follow a colon"),
    ],
)
def test_a_bad_spec_is_one_clear_line(text, part):
    with pytest.raises(SpecError) as error:
        codec(text)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


# in schemes


def test_plain_values_travel_with_mixed_lengths():
    end = scheme("topk:0.1/int8")
    visit = Visit(None, (60, 200, 0), torch.zeros(3, dtype=torch.int64), padded=True)
    x = normal(3, 200)
    sections = end.sender().encode(x, 0, visit)
    assert isinstance(sections[0], Section)
    y = end.receiver().decode(sections, 0, visit)
    assert torch.equal(y, round_trip("topk:0.1/int8", x, lengths=visit.lengths))
    sections[0].codec = "topk:0.2/int8"
    with pytest.raises(FrameError, match=r"this end expects topk:0\.1/int8"):
        end.receiver().decode(sections, 0, visit)


@pytest.mark.parametrize("text", ["delta(topk:0.1)", "delta(int4,first=topk:0.1)"])
def test_both_ends_of_a_delta_of_varying_size_stay_equal(text):
    sender, receiver = scheme(text).sender(), scheme(text).receiver()
    for step in range(4):
        visit = Visit((7, 8, 9), (200,) * 3, torch.zeros(3, dtype=torch.int64), padded=False)
        for end in (sender, receiver):
            end.begin_step([visit])
        x = normal(3, 200) + 0.1 * normal(3, 200, seed=step)
        y = receiver.decode(sender.encode(x, 0, visit), 0, visit)
        assert y.shape == x.shape
        assert sender.digest() == receiver.digest()


@pytest.mark.parametrize("values", ["int4", "int8", "fp16"])
def test_kept_values_that_their_codec_cannot_hold_are_an_error(values):
    x = torch.ones(1, 16)
    x[0, 0], x[0, 1] = 3.4e38, -3.4e38
    with pytest.raises(NonFiniteError):
        codec(f"topk:0.5/{values}").encode(x)
