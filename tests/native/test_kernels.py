"""The compiled kernels against the eager twin: equal bit for bit on every level.

Tensors of more than 2**31 values are not tested here, for want of memory (8 GiB in and as much
out). By hand: encode ``torch.ones(1, 2**31 + 300)`` with NaN as its last value; the place has to be
2**31 + 299.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.native.kernel_cases import (
    DTYPES,
    GROUPS,
    LARGE,
    LEVELS,
    MODES,
    SMALL,
    decoded,
    encoded,
    format_of,
    needs_library,
    normal,
    payload_nbytes,
    same,
    seeds_of,
    several,
    some_sizes,
    tensors,
    twin_decode,
    twin_encode,
)
from thinwire.codecs import codec
from thinwire.native import kernels, library, reference

pytestmark = needs_library


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# Encoding and decoding.


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("mode", MODES)
def test_every_format_gives_the_bytes_and_values_of_the_twin(mode, group):
    x, seeds = normal(2, 2500), seeds_of(2)
    for number in range(1, 9):
        fmt = format_of(mode, number, group)
        payload, _ = twin_encode(x, None, fmt, seeds)
        y = twin_decode(payload, x, None, fmt)
        for level in LEVELS:
            assert torch.equal(encoded(x, None, fmt, seeds, level)[0], payload)
            assert same(decoded(payload, torch.empty_like(x), None, fmt, level), y)


@pytest.mark.parametrize("mode", MODES)
@several
@given(tensors(), st.integers(1, 8), st.sampled_from(GROUPS) | st.integers(8, 600), st.data())
def test_any_values_are_encoded_as_by_the_twin(mode, x, number, group, data):
    fmt, sizes, seeds = format_of(mode, number, group), some_sizes(data, x), seeds_of(len(x))
    payload, place = twin_encode(x, sizes, fmt, seeds)
    for level in LEVELS:
        found, found_place = encoded(x, sizes, fmt, seeds, level)
        assert found_place == place
        assert torch.equal(found, payload)


@pytest.mark.parametrize("mode", MODES)
@several
@given(tensors(), st.integers(1, 8), st.sampled_from(GROUPS), st.data())
def test_any_payload_is_decoded_as_by_the_twin_into_every_dtype(mode, x, number, group, data):
    fmt, sizes = format_of(mode, number, group), some_sizes(data, x)
    payload, place = twin_encode(x, sizes, fmt, seeds_of(len(x)))
    if place >= 0:
        return
    for dtype in DTYPES:
        expected = twin_decode(payload, torch.empty(x.shape, dtype=dtype), sizes, fmt)
        for level in LEVELS:
            y = torch.full(x.shape, torch.nan, dtype=dtype)
            assert same(decoded(payload, y, sizes, fmt, level), expected)


@several
@given(
    tensors(bad=True),
    st.sampled_from(list(MODES)),
    st.integers(1, 8),
    st.sampled_from(GROUPS),
    st.data(),
)
def test_a_value_that_cannot_be_coded_is_found(x, mode, number, group, data):
    fmt, sizes, seeds = format_of(mode, number, group), some_sizes(data, x), seeds_of(len(x))
    _, place = twin_encode(x, sizes, fmt, seeds)
    for level in LEVELS:
        assert encoded(x, sizes, fmt, seeds, level)[1] == place


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_a_value_that_is_not_finite_is_found_anywhere(mode, level):
    fmt = format_of(mode, 4, 64)
    for place in [*range(66), 1000, 1023, 1024, 1040]:
        for value in (torch.nan, torch.inf, -torch.inf):
            x = normal(2, 1041)
            x[1, place] = value
            assert encoded(x, None, fmt, seeds_of(2), level)[1] == 1041 + place


@pytest.mark.parametrize("group", [16, 32, 100, 128])
@pytest.mark.parametrize("number", [2, 3, 4, 8])
def test_a_symmetric_scale_whose_unused_code_overflows_is_refused(number, group):
    half = 2 ** (number - 1) - 1
    fmt = format_of("symmetric", number, group)
    most = torch.finfo(torch.float32).max
    for share in (0.9, 1.01):  # of the peak at which the code above the greatest one overflows
        x = torch.zeros(1, 16 * group)
        # negative: the fast way's check of a sum would find a positive one by chance
        x[0, 2 * group + 2] = -min(most, share * most * half / (half + 1))
        _, place = twin_encode(x, None, fmt, seeds_of(1))
        for level in LEVELS:
            assert encoded(x, None, fmt, seeds_of(1), level)[1] == place


@several
@given(st.sampled_from(list(MODES)), st.integers(1, 8), st.sampled_from(GROUPS), st.data())
def test_any_bytes_decode_as_by_the_twin_or_are_refused(mode, number, group, data):
    fmt, n = format_of(mode, number, group), data.draw(st.sampled_from(SMALL))
    width = reference.row_nbytes(n, fmt)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    payload = torch.randint(0, 256, (2 * width,), dtype=torch.uint8, generator=generator)
    if data.draw(st.booleans()):  # scales that are numbers, and not negative
        for start in (0, width):
            payload[start + 1 : start + 2 * fmt.groups(n) : 2] &= 0x3F
    expected = reference.decode_rows(payload.view(2, width), n, fmt)
    for level in LEVELS:
        y = torch.full((2, n), 7.0)
        with library.forced(level):
            assert kernels.decode(payload, None, fmt, y) == (expected is not None)
        assert expected is None or same(y, expected)


@several
@given(tensors(), st.sampled_from(list(MODES)), st.integers(1, 8), st.sampled_from(GROUPS))
def test_a_payload_may_begin_at_any_byte_and_nothing_around_it_is_written(x, mode, number, group):
    fmt, seeds = format_of(mode, number, group), seeds_of(len(x))
    payload, place = twin_encode(x, None, fmt, seeds)
    if place >= 0:
        return
    for level in LEVELS:
        for offset in range(4):
            whole = torch.full((offset + payload.numel() + 64,), 171, dtype=torch.uint8)
            out = whole[offset : offset + payload.numel()]
            with library.forced(level):
                assert kernels.encode(x, None, fmt, seeds, out) == -1
            assert torch.equal(out, payload)
            assert bool((whole[:offset] == 171).all())
            assert bool((whole[offset + payload.numel() :] == 171).all())
            y = torch.empty(x.shape)
            assert same(decoded(out, y, None, fmt, level), twin_decode(payload, y, None, fmt))


@several
@given(tensors(), st.sampled_from(list(MODES)), st.integers(1, 8), st.sampled_from(GROUPS))
def test_nothing_but_the_rows_is_written_by_decoding(x, mode, number, group):
    fmt = format_of(mode, number, group)
    payload, place = twin_encode(x, None, fmt, seeds_of(len(x)))
    if place >= 0:
        return
    for level in LEVELS:
        for dtype in DTYPES:
            whole = torch.full((len(x) + 2, x.shape[1] + 3), 7.0, dtype=dtype)
            decoded(payload, whole[1:-1, 1:-2], None, fmt, level)
            assert bool((whole[0] == 7).all() and (whole[-1] == 7).all())
            assert bool((whole[:, 0] == 7).all() and (whole[:, -2:] == 7).all())


@pytest.mark.parametrize("level", LEVELS)
def test_values_beyond_a_rows_length_are_not_read_and_decode_to_zero(level):
    for mode in MODES:
        fmt, sizes = format_of(mode, 3, 100), [0, 1, 130, 999, 1000]
        x = normal(5, 1000)
        for row, size in enumerate(sizes):
            x[row, size:] = torch.nan
        payload, place = encoded(x, sizes, fmt, seeds_of(5), level)
        assert place == -1
        y = decoded(payload, torch.full_like(x, 7.0), sizes, fmt, level)
        assert not any(bool(y[row, size:].any()) for row, size in enumerate(sizes))


@pytest.mark.parametrize("shape", [(0, 0), (0, 300), (3, 0)])
@pytest.mark.parametrize("level", LEVELS)
def test_a_tensor_without_values_has_no_bytes(level, shape):
    fmt = format_of("affine", 4, 0)
    payload, place = encoded(torch.empty(shape), None, fmt, seeds_of(shape[0]), level)
    assert (payload.numel(), place) == (0, -1)
    decoded(payload, torch.empty(shape), None, fmt, level)


@pytest.mark.parametrize("level", LEVELS)
def test_a_matrix_that_is_transposed_is_encoded_by_its_rows(level):
    x, fmt = normal(300, 5).t(), format_of("affine", 4, 64)
    expected, _ = twin_encode(x, None, fmt, seeds_of(5))
    assert torch.equal(encoded(x, None, fmt, seeds_of(5), level)[0], expected)


# Large tensors: threads, and writing past the caches.


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("mode", MODES)
def test_two_threads_encode_and_decode_as_the_twin(mode, shape, two_threads):
    x, seeds = normal(*shape), seeds_of(shape[0])
    for number, group in ((4, 128), (3, 100), (2, 999), (5, 0)):
        fmt = format_of(mode, number, group)
        payload = torch.empty((shape[0], reference.row_nbytes(shape[1], fmt)), dtype=torch.uint8)
        assert reference.encode_rows(x, fmt, seeds, payload)
        y = reference.decode_rows(payload, shape[1], fmt)
        assert y is not None
        for level in LEVELS:
            assert torch.equal(encoded(x, None, fmt, seeds, level)[0], payload.flatten())
            assert same(decoded(payload, torch.empty_like(x), None, fmt, level), y)


@pytest.mark.parametrize("level", LEVELS)
def test_two_threads_name_the_first_value_that_cannot_be_coded(level, two_threads):
    x, fmt = normal(1, 400_000), format_of("affine", 4, 128)
    x[0, [399_999, 250_003, 250_007, 390_000]] = torch.nan
    for _ in range(20):
        assert encoded(x, None, fmt, seeds_of(1), level)[1] == 250_003


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("group", [128, 100])
def test_outputs_too_large_for_the_caches_hold_the_same_values(group, offset):
    fmt, n = format_of("affine", 4, group), 2_200_000
    payload, _ = encoded(normal(1, n), None, fmt, seeds_of(1), LEVELS[0])
    expected = twin_decode(payload, torch.empty(1, n), None, fmt)
    for level in LEVELS:
        whole = torch.full((1, n + 2 * offset), 7.0)
        y = whole[:, offset : offset + n]
        assert same(decoded(payload, y, None, fmt, level), expected)
        assert bool((whole[:, :offset] == 7).all() and (whole[:, offset + n :] == 7).all())


# Processes and threads.

FORK = """
import os, sys
import torch
from thinwire.native import IntegerFormat, kernels
torch.set_num_threads(2)
x, fmt = torch.randn(4, 100_000), IntegerFormat(4, 128, False, False, False)
seeds = torch.zeros(4, dtype=torch.int64)
outs = [torch.zeros(300_000, dtype=torch.uint8) for _ in range(3)]
kernels.encode(x, None, fmt, seeds, outs[0])
child = os.fork()
kernels.encode(x, None, fmt, seeds, outs[1])
if child == 0:
    os._exit(outs[0].numpy().tobytes() != outs[1].numpy().tobytes())
_, status = os.waitpid(child, 0)
kernels.encode(x, None, fmt, seeds, outs[2])
sys.exit(status or outs[0].numpy().tobytes() != outs[2].numpy().tobytes())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_and_its_parent_encode_on_two_threads():
    subprocess.run([sys.executable, "-c", FORK], timeout=60, check=True)


def test_two_python_threads_may_encode_at_once(two_threads):
    fmt = format_of("affine", 4, 128)
    inputs = [normal(3, 100_000, seed) for seed in range(2)]
    expected = [encoded(x, None, fmt, seeds_of(3), LEVELS[0])[0] for x in inputs]
    right = [0, 0]

    def work(number: int) -> None:
        torch.set_num_threads(2)  # which is a thread's own affair
        for _ in range(30):
            out = torch.empty_like(expected[number])
            kernels.encode(inputs[number], None, fmt, seeds_of(3), out)
            right[number] += torch.equal(out, expected[number])

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert right == [30, 30]


def test_other_python_threads_run_while_one_encodes():
    x, fmt = normal(1, 4_000_000), format_of("affine", 4, 128)
    out = torch.empty(payload_nbytes(x, None, fmt), dtype=torch.uint8)
    interval, steps, over = sys.getswitchinterval(), [0], threading.Event()

    def count() -> None:
        while not over.is_set():
            steps[0] += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    sys.setswitchinterval(100)  # nobody has to let go of the GIL
    try:
        progress = 0
        for _ in range(20):
            before = steps[0]
            kernels.encode(x, None, fmt, seeds_of(1), out)
            progress += steps[0] - before
    finally:
        sys.setswitchinterval(interval)
        over.set()
        counter.join()
    assert progress > 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threads", [1, 2])
def test_flushing_subnormals_elsewhere_leaves_the_bytes_alone(level, threads):
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1)) * 1e-39
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with library.forced(level):
            expected = codec("int4").encode(x)
            torch.set_flush_denormal(True)
            assert torch.equal(codec("int4").encode(x), expected)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
