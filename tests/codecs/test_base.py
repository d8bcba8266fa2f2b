"""What holds for every codec, where ``thinwire check`` asks for less: any lengths, devices, and
what errors say. The rest is in tests/contract."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codecs.common import ALL, FIXED, FLOATS, LOSSY, ROWWISE, normal, quick, round_trip
from thinwire.codecs import Codec, codec, register_codec
from thinwire.codecs.keeping import KEEPINGS
from thinwire.errors import NonFiniteError

#: These keep values in the dtype that they have.
SELECTING = ("topk:0.1", "randk:0.2", "threshold:1.5")
every = pytest.mark.parametrize("name", ALL)
lossy = pytest.mark.parametrize("name", LOSSY)
rowwise = pytest.mark.parametrize("name", ROWWISE)
fixed = pytest.mark.parametrize("name", FIXED)
SHAPES = [
    (),
    (0,),
    (1,),
    (7,),
    (0, 5),
    (5, 0),
    (2, 3, 0),
    (3, 1),
    (1, 257),
    (3, 5, 7),
    (2, 3, 5, 7),
]


@every
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_and_float_dtype_comes_back(name, shape, device):
    for dtype in FLOATS:
        x = normal(*shape, device=device).to(dtype)
        y = round_trip(name, x)
        assert y.shape == x.shape
        assert y.dtype == dtype
        assert y.device == x.device
        assert bool(((y - x).abs() <= 4.0).all())  # the range, nearly: one bit is coarse


@every
def test_the_payload_is_one_dimensional_bytes_on_the_input_device(name, device):
    payload = codec(name).encode(normal(3, 5, device=device))
    assert payload.dtype == torch.uint8
    assert payload.dim() == 1
    assert payload.device.type == device.type


@every
@quick
@given(st.integers(1, 5), st.integers(0, 300), st.data())
def test_max_nbytes_is_a_bound_and_exact_for_full_rows_of_a_fixed_size(name, rows, n, data):
    x = normal(rows, n)
    lengths = data.draw(st.lists(st.integers(0, n), min_size=rows, max_size=rows))
    bound = codec(name).max_nbytes(x.shape, x.dtype)
    size = codec(name).encode(x).numel()
    assert size == bound if name in FIXED else size <= bound
    most = rows * codec(name).most_row_nbytes(n, x.dtype)
    assert codec(name).encode(x, lengths=lengths).numel() <= most


@rowwise
def test_a_row_has_the_same_bytes_alone_and_in_any_batch(name, device):
    x = normal(6, 300, device=device) * torch.logspace(-3, 3, 6, device=device)[:, None]
    seeds = torch.arange(6) * 11
    alone = [codec(name).encode(x[i : i + 1], seed=seeds[i : i + 1]) for i in range(6)]
    assert torch.equal(codec(name).encode(x, seed=seeds), torch.cat(alone))


@rowwise
@quick
@given(st.lists(st.integers(0, 200), min_size=1, max_size=6))
def test_rows_of_mixed_lengths_are_the_bytes_of_each_row_cut_to_its_length(name, lengths):
    x = normal(len(lengths), 200)
    c = codec(name)
    parts = [c.encode(x[i : i + 1, :size]) for i, size in enumerate(lengths)]
    assert torch.equal(c.encode(x, lengths=lengths), torch.cat(parts))


@rowwise
@quick
@given(st.lists(st.integers(0, 90), min_size=1, max_size=5))
def test_values_beyond_a_length_decode_to_zero_and_those_within_as_without_padding(name, lengths):
    x = normal(len(lengths), 9, 10)
    y = round_trip(name, x, lengths=lengths).flatten(1)
    for i, size in enumerate(lengths):
        assert torch.equal(y[i : i + 1, :size], round_trip(name, x.flatten(1)[i : i + 1, :size]))
        assert not y[i, size:].any()


@every
@pytest.mark.parametrize("padding", [0.0, 1e9, float("nan"), float("inf")])
def test_padding_costs_nothing_and_sets_no_scale(name, padding, device):
    x = normal(3, 40, device=device)
    lengths = torch.tensor([40, 17, 0])
    payloads = []
    for width in (40, 64):
        padded = torch.full((3, width), padding, device=device)
        for i, size in enumerate(lengths.tolist()):
            padded[i, :size] = x[i, :size]
        payloads.append(codec(name).encode(padded, lengths=lengths))
    assert torch.equal(payloads[0], payloads[1])


def test_a_tensor_of_one_dimension_is_one_row():
    x = normal(300)
    assert torch.equal(codec("int4:group=row").encode(x), codec("int4:group=row").encode(x[None]))


@every
def test_strides_do_not_matter(name, device):
    x = normal(2, 6, 5, 4, device=device)
    expected = codec(name).encode(x)
    strided = torch.empty(2, 6, 5, 8, device=device)[..., ::2].copy_(x)
    turned = x.transpose(1, 3).contiguous().transpose(1, 3)
    for same in (x.contiguous(memory_format=torch.channels_last), strided, turned):
        assert not same.is_contiguous()
        assert torch.equal(codec(name).encode(same), expected)


@pytest.mark.parametrize("name", [name for name in LOSSY if name not in SELECTING])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_floats_are_coded_as_their_float32_values(name, dtype):
    x = normal(3, 200).to(dtype)
    c = codec(name)
    payload = c.encode(x)
    assert torch.equal(payload, c.encode(x.float()))
    expected = c.decode(payload, x.shape, torch.float32).to(dtype)
    assert torch.equal(c.decode(payload, x.shape, dtype), expected)


@every
def test_encoding_into_a_buffer_writes_its_start_and_no_more(name, device):
    x = normal(3, 50, device=device)
    expected = codec(name).encode(x)
    for offset in (0, 1, 3):  # unaligned as well
        size = codec(name).max_nbytes(x.shape, x.dtype) + 20
        buffer = torch.full((size,), 171, dtype=torch.uint8, device=device)
        view = codec(name).encode(x, out=buffer[offset:])
        assert torch.equal(view, expected)
        assert view.data_ptr() == buffer.data_ptr() + offset
        rest = torch.cat([buffer[:offset], buffer[offset + expected.numel() :]])
        assert bool((rest == 171).all())


@every
@pytest.mark.parametrize("lengths", [None, [50, 50, 50], [50, 13, 0]], ids=str)
def test_decoding_into_an_output_gives_the_same_values(name, lengths, device):
    x = normal(3, 50, device=device)
    expected = round_trip(name, x, lengths=lengths)
    payload = codec(name).encode(x, lengths=lengths)
    outs = [
        torch.full((3, 50), torch.nan, device=device),
        torch.full((50, 3), torch.nan, device=device).t(),
        torch.full((3, 101), torch.nan, device=device)[:, 1::2],
        torch.full((3 * 50 + 1,), torch.nan, device=device)[1:].view(3, 50),
    ]
    for out in outs:
        y = codec(name).decode(payload, x.shape, x.dtype, lengths=lengths, out=out)
        assert y is out
        assert torch.equal(out, expected)


@lossy
@quick
@given(
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.sampled_from(FLOATS),
    st.integers(0, 2),
    st.integers(0, 259),
)
def test_a_value_that_is_not_finite_is_an_error_with_its_index(name, value, dtype, row, column):
    x = normal(3, 10, 26).to(dtype)
    x[row, column // 26, column % 26] = value
    index = f"({row}, {column // 26}, {column % 26})"
    with pytest.raises(NonFiniteError) as error:
        codec(name).encode(x)
    assert str(value) in str(error.value)
    assert index in str(error.value)


@lossy
def test_a_value_that_is_not_finite_in_a_scalar_is_an_error(name, device):
    with pytest.raises(NonFiniteError, match=r"nan at index \(\) "):
        codec(name).encode(torch.tensor(float("nan"), device=device))


@fixed
@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_of_the_wrong_size_is_an_error(name, change):
    payload = codec(name).encode(normal(3, 50))
    wrong = payload[:change] if change < 0 else torch.cat([payload, payload[:change]])
    with pytest.raises(ValueError, match=f"takes {payload.numel()} payload bytes, found"):
        codec(name).decode(wrong, (3, 50), torch.float32)


@lossy
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
def test_tensors_that_are_not_floating_point_are_refused(name, dtype):
    with pytest.raises(ValueError, match="takes floating-point tensors"):
        codec(name).encode(torch.ones(3, 4, dtype=dtype))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 7}, "24 values cannot be cut into 7 equal rows"),
        ({"rows": 0}, "cannot be cut into 0"),
        ({"rows": -1}, "cannot be cut into -1"),
        ({"lengths": [1, 2]}, "2 lengths for 4 rows"),
        ({"lengths": [1, 2, 3, 7]}, "length 7 of row 3"),
        ({"lengths": [1, -2, 3, 6]}, "length -2 of row 1"),
        ({"seed": torch.zeros(3, dtype=torch.int64)}, "int64 tensor of 4 values"),
        ({"seed": torch.zeros(4)}, "int64 tensor of 4 values"),
        ({"out": torch.zeros(5, dtype=torch.uint8)}, "at least 40 bytes"),
        ({"out": torch.zeros(50)}, "must be 1-D uint8"),
        ({"out": torch.zeros(50, 1, dtype=torch.uint8)}, "must be 1-D uint8"),
        ({"out": torch.zeros(50, dtype=torch.uint8, device="meta")}, "bytes on cpu, not .* meta"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        codec("int4").encode(normal(4, 6), **options)


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(6, 4),
        torch.zeros(4, 6, dtype=torch.float16),
        torch.zeros(4, 6, device="meta"),
    ],
)
def test_an_output_of_another_shape_dtype_or_device_is_refused(out):
    payload = codec("int4").encode(normal(4, 6))
    with pytest.raises(ValueError, match=r"out must be torch\.float32 of shape"):
        codec("int4").decode(payload, (4, 6), torch.float32, out=out)


@every
def test_torch_generators_are_left_alone(name, device):
    x = normal(4, 300, device=device)
    before = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state() if device.type == "cuda" else None
    round_trip(name, x, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    if on_device is not None:
        assert torch.equal(torch.cuda.get_rng_state(), on_device)


@pytest.mark.usefixtures("registry")
def test_a_user_adds_a_codec_from_outside():
    @register_codec("sign")
    @dataclasses.dataclass(frozen=True)
    class Sign(Codec):
        scale: float = 1.0

        def row_nbytes(self, n, dtype):
            return n

        def _encode_rows(self, x, seeds, out):
            out.copy_(x > 0)
            return True

        def _decode_rows(self, payload, n, dtype):
            return (payload.float() * 2 - 1) * self.scale

    x = normal(3, 5)
    assert torch.equal(round_trip("sign:scale=0.5", x), x.sign() * 0.5)
    assert str(codec("sign:scale=0.5")) == "sign:scale=0.5"


@pytest.mark.parametrize("name", ["bf16", "int4", "int4:zstd", "topk:0.1"])
def test_coding_the_change_of_shorter_rows_leaves_the_input_unchanged(name):
    x = normal(2, 300)
    before = [torch.zeros(200), torch.zeros(300)]
    after = [torch.empty(200), torch.empty(300)]
    codec(name).encode_change(x, [200, 300], 0, before, after, KEEPINGS["fp32"])
    assert torch.equal(x, normal(2, 300))


@pytest.mark.parametrize("name", ["bf16", "int4", "topk:0.1"])
def test_a_change_is_coded_into_a_buffer_of_any_stride(name):
    x, m = normal(2, 300), normal(2, 300, seed=1)
    payloads = []
    for stride in (1, 2):
        buffer = torch.full((2 * 1300,), 171, dtype=torch.uint8)[::stride]
        payload, _ = codec(name).encode_change(
            x, None, 0, list(m), list(m.clone()), KEEPINGS["fp32"], buffer
        )
        payloads.append(payload)
    assert torch.equal(*payloads)


@every
def test_rows_without_values_take_no_memory_however_many(name):
    shape = (1 << 40, 0)
    assert (
        codec(name).decode(torch.empty(0, dtype=torch.uint8), shape, torch.float32).shape == shape
    )


@every
def test_few_bytes_cannot_claim_to_be_many_rows(name):
    few = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="payload bytes"):
        codec(name).decode(few, (1 << 36, 3), torch.float32)


@every
def test_what_is_no_tensor_is_named(name):
    with pytest.raises(TypeError, match="takes a torch tensor, not list"):
        codec(name).encode([1.0])  # type: ignore[arg-type]
