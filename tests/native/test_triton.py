"""The Triton twins against the eager twin: under Triton's interpreter everywhere, on GPUs if any.

As a script it prints what differs; the tests run it in a process of its own, since the interpreter
has to be chosen before Triton is imported.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.native.digest import cases
from tests.native.interpreter import run_under_the_interpreter
from thinwire.native import delta_reference, reference, triton_kernels, triton_launch, triton_use
from thinwire.native.reference import IntegerFormat

MODES = [  # symmetric, stochastic, std
    (False, False, False),
    (True, False, False),
    (False, True, False),
    (True, True, False),
    (False, False, True),
    (True, False, True),
]


def formats(groups: tuple[int, ...]) -> Iterator[IntegerFormat]:
    """Every number of bits in every mode, with the groups in turn."""
    group = itertools.cycle(groups)
    for bits in range(1, 9):
        for symmetric, stochastic, std in MODES:
            if bits > 1 or not symmetric or std:
                yield IntegerFormat(bits, next(group), symmetric, stochastic, std)


def normal(rows: int, n: int, seed: int) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))


def seeds_of(rows: int) -> Tensor:
    return torch.arange(rows, dtype=torch.int64) * (7 * 2**33) - 5


def equal(a: Tensor, b: Tensor) -> bool:
    return bool((a.cpu().view(torch.uint8) == b.cpu().view(torch.uint8)).all())


def eager_encode(x: Tensor, sizes: list[int] | None, fmt: IntegerFormat, seeds: Tensor) -> Tensor:
    """Row by row; an empty tensor if a row cannot be coded."""
    parts = []
    for row, size in enumerate(sizes or [x.shape[1]] * x.shape[0]):
        out = torch.zeros((1, reference.row_nbytes(size, fmt)), dtype=torch.uint8)
        values = x[row : row + 1, :size].float()
        if not reference.encode_rows(values, fmt, seeds[row : row + 1], out):
            return torch.empty(0, dtype=torch.uint8)
        parts.append(out[0])
    return torch.cat(parts)


def eager_decode(payload: Tensor, sizes: list[int], fmt: IntegerFormat, n: int) -> Tensor:
    y, at = torch.zeros(len(sizes), n), 0
    for row, size in enumerate(sizes):
        width = reference.row_nbytes(size, fmt)
        values = reference.decode_rows(payload[None, at : at + width], size, fmt)
        assert values is not None
        y[row, :size] = values[0]
        at += width
    return y


def as_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return y.clamp(-most, most).to(dtype)


def check(x: Tensor, fmt: IntegerFormat, sizes: list[int] | None, device: str) -> str:
    """What differs, coding and decoding ``x``; nothing if nothing does."""
    rows, n = x.shape
    lengths = sizes or [n] * rows
    seeds = seeds_of(rows)
    expected = eager_encode(x, sizes, fmt, seeds)
    out = torch.zeros(
        sum(reference.row_nbytes(s, fmt) for s in lengths), dtype=torch.uint8, device=device
    )
    place = triton_kernels.encode(x.to(device), sizes, fmt, seeds.to(device), out)
    if not expected.numel() and out.numel():
        return "" if place >= 0 else "codes what the eager twin refuses"
    if place != -1:
        return f"refuses place {place}"
    if not equal(out, expected):
        return f"byte {int((out.cpu() != expected).nonzero()[0])} of {out.numel()} differs"
    y = torch.full((rows, n), 7.0, device=device).to(x.dtype)
    if not triton_kernels.decode(out, sizes, fmt, y):
        return "does not decode"
    if not equal(y, as_dtype(eager_decode(expected, lengths, fmt, n), x.dtype)):
        return "decodes to other values"
    return ""


def check_delta(
    x: Tensor,
    m: Tensor,
    fmt: IntegerFormat,
    how: delta_reference.Kept,
    sizes: list[int] | None,
    device: str,
    in_place: bool,
) -> str:
    """What differs in the AQ-SGD step from ``m``; nothing if nothing does."""
    rows, n = x.shape
    lengths = sizes or [n] * rows
    seeds = seeds_of(rows)
    payloads, ys, befores, afters, energies = [], [], [], [], []
    for row, size in enumerate(lengths):
        value = x[row : row + 1, :size].float()
        kept = delta_reference.keep_rows(m[row : row + 1, :size], how)
        assert kept is not None
        before = delta_reference.read_rows(list(kept), size, how)
        out = torch.zeros((1, reference.row_nbytes(size, fmt)), dtype=torch.uint8)
        y = delta_reference.delta_encode_rows(value, before, fmt, seeds[row : row + 1], out)
        assert y is not None
        after = delta_reference.keep_rows(y, how)
        assert after is not None
        payloads.append(out[0])
        ys.append(torch.nn.functional.pad(y[0], (0, n - size)))
        befores.append(kept[0])
        afters.append(after[0])
        energies.append([float(delta_reference.energies(v)) for v in (value - before, value)])
    payload = torch.cat(payloads)
    problems = []
    for sender in (True, False):
        here = [kept.to(device, copy=True) for kept in befores]
        there = here if in_place else [torch.zeros_like(kept) for kept in here]
        if sender:
            out = torch.zeros_like(payload, device=device)
            found = torch.zeros(rows, 2, device=device)
            args = (x.to(device), sizes, fmt, seeds.to(device), out, here, there, how, found)
            if (place := triton_kernels.delta_encode(*args)) != -1:
                return f"refuses place {place}"
            if not equal(out, payload):
                problems.append("other bytes")
            if not equal(found, torch.tensor(energies)):
                problems.append("other energies")
        else:
            y = torch.full((rows, n), 7.0, device=device, dtype=x.dtype)
            arguments = (payload.to(device), (rows, n), sizes, fmt, here, there, how, y)
            if not triton_kernels.delta_decode(*arguments):
                return "does not decode"
            if not equal(y, as_dtype(torch.stack(ys), x.dtype)):
                problems.append("other values")
        if not all(equal(a, b) for a, b in zip(there, afters, strict=True)):
            problems.append(f"other references at the {'sender' if sender else 'receiver'}")
    return ", ".join(problems)


def check_places(device: str) -> Iterator[str]:
    """Whether the value that cannot be coded is found, and bad payloads are refused."""
    seeds = torch.zeros(3, dtype=torch.int64, device=device)
    for group, std in itertools.product((8, 64, 100, 0), (False, True)):
        fmt = IntegerFormat(4, group, False, False, std)
        out = torch.zeros(3 * reference.row_nbytes(300, fmt), dtype=torch.uint8, device=device)
        for spoilt, expected in (
            ({(2, 7): float("inf"), (1, 298): float("nan"), (1, 299): float("inf")}, 598),
            ({(1, 290): -3e38, (1, 291): 3.1e38, (1, 292): 3.1e38}, 591),
        ):
            x = normal(3, 300, 0)
            for at, value in spoilt.items():
                x[at] = value
            place = triton_kernels.encode(x.to(device), None, fmt, seeds, out)
            if place != expected:
                yield f"{fmt}: {spoilt} found at {place}"
            before = torch.ones(3, 300, device=device)
            args = (x.to(device), None, fmt, seeds, out, before, before, torch.float32)
            if (place := triton_kernels.delta_encode(*args)) != expected:
                yield f"{fmt}: changes with {spoilt} found at {place}"
    # finite changes to sums beyond bfloat16, from index 140 of the second row on
    x, before = normal(3, 300, 1), torch.zeros(3, 300)
    x[1, 140:], before[1, 140:] = 3.3999e38, 3.38e38
    for fmt in (
        IntegerFormat(8, 0, False, False, False),
        IntegerFormat(8, 20, False, False, False),
    ):
        kept = before.to(torch.bfloat16).to(device)
        out = torch.zeros(3 * reference.row_nbytes(300, fmt), dtype=torch.uint8, device=device)
        args = (x.to(device), None, fmt, seeds, out, kept, kept, torch.bfloat16)
        if (place := triton_kernels.delta_encode(*args)) != 440:
            yield f"{fmt}: a sum beyond bfloat16 found at {place}"
    fmt = IntegerFormat(4, 32, False, False, False)
    out = torch.zeros(3 * reference.row_nbytes(300, fmt), dtype=torch.uint8, device=device)
    triton_kernels.encode(normal(3, 300, 0).to(device), None, fmt, seeds, out)
    out[reference.row_nbytes(300, fmt) + 1] = 0xBF  # a negative scale in the second row
    y = torch.full((3, 300), 7.0, device=device)
    if triton_kernels.decode(out, None, fmt, y) or not bool((y == 7.0).all()):
        yield "a negative scale is decoded"
    moved = torch.zeros(3, 300, device=device)
    arguments = (out, (3, 300), None, fmt, moved, moved, torch.float32)
    if triton_kernels.delta_decode(*arguments) or bool(moved.any()):
        yield "a reference moves by a negative scale"


def mismatches(device: str) -> Iterator[str]:
    """All that differs from the eager twin, over formats, sizes, dtypes and extreme values."""
    for fmt in formats((8, 128, 100, 0, 64, 32)):
        for n in (21, 300)[fmt.bits % 3 > 0 :]:
            if problem := check(normal(2, n, n), fmt, None, device):
                yield f"{fmt} {n} values: {problem}"
    few = list(formats((128, 100)))[::3]
    for fmt, (index, x) in zip(itertools.cycle(few), enumerate(cases() * 2)):
        if problem := check(x[:2], fmt, None, device):
            yield f"{fmt} case {index}: {problem}"
    for dtype, fmt in itertools.product((torch.bfloat16, torch.float16), few[::3]):
        x = (normal(2, 600, 3) * 30000).clamp(-65000, 65000).to(dtype)
        if problem := check(x, fmt, None, device):
            yield f"{fmt} {dtype}: {problem}"
    for fmt in few[::2]:
        x = normal(1100, 5, 4).T  # rows that are not contiguous
        if problem := check(x[:, :700], fmt, [700, 0, 1, 256, 130], device):
            yield f"{fmt} lengths: {problem}"
    for group, std, symmetric in ((0, False, True), (0, True, False), (4100, True, True)):
        for scale in (1.0, 2.0**-120, 2.0**120):
            fmt = IntegerFormat(3, group, symmetric, False, std)
            if problem := check(normal(2, 4200, 5) * scale, fmt, [4200, 4101], device):
                yield f"{fmt} large, {scale}: {problem}"
    for symmetric in (False, True):  # the sum of such zeros is -0.0, the offset 0.0
        fmt = IntegerFormat(4, 8, symmetric, False, True)
        if problem := check(torch.full((1, 16), -0.0), fmt, None, device):
            yield f"{fmt} negative zeros: {problem}"
    packed = [IntegerFormat(bits, 64, False, False, False) for bits in (8, 4)]
    kept: itertools.cycle[delta_reference.Kept] = itertools.cycle(
        (torch.float32, torch.bfloat16, packed[0], torch.bfloat16, torch.float32, packed[1])
    )
    for k, fmt in enumerate(list(formats((128, 100, 0)))[::2]):
        how, sizes = next(kept), (None, [600, 300, 1])[k // 3 % 2]
        m = normal(3, 600, 6)
        x = m + normal(3, 600, 7) * 0.1
        dtype = (torch.float32, torch.bfloat16)[k // 2 % 2]
        if problem := check_delta(x.to(dtype), m, fmt, how, sizes, device, k % 2 == 0):
            yield f"{fmt} change, {how} references, lengths {sizes}: {problem}"
    yield from check_places(device)


def test_every_program_equals_the_eager_twin_under_the_interpreter():
    run_under_the_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.timeout(600)  # some hundred programs to compile
def test_every_program_equals_the_eager_twin_on_a_gpu():
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: torch.cuda.is_available() is false")
    large = IntegerFormat(4, 128, False, False, False)
    assert list(mismatches("cuda")) == []
    assert check(normal(7, 100_003, 8), large, None, "cuda") == ""


# Without a GPU, Triton still compiles for one. What it makes of the arithmetic can be read.

INEXACT = re.compile(r"\b(?:fma|mad|rcp)\.[a-z.]*f32|\b[a-z]+\.[a-z0-9.]*(?:ftz|approx|full)\b")


@pytest.mark.parametrize(
    ("fmt", "n", "how"),
    [
        (IntegerFormat(4, 128, False, False, False), 1024, torch.float32),
        (IntegerFormat(3, 128, True, True, False), 1000, torch.bfloat16),
        (IntegerFormat(7, 100, False, False, True), 1000, torch.float32),
        (IntegerFormat(2, 0, False, False, True), 5000, torch.bfloat16),
    ],
)
def test_compiled_programs_neither_fuse_nor_flush_nor_round_coarsely(
    monkeypatch, tmp_path, fmt, n, how
):
    pytest.importorskip("triton")
    compiled: dict[str, str] = {}

    def launch(name, count, width=1024, **arguments):
        compiled[name] = ptx(triton_launch.program(name), arguments, "cuda", 80)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_launch, "launch", launch)
    x, m = torch.zeros(2, n), torch.zeros(2, n, dtype=how)
    out = torch.zeros(2 * reference.row_nbytes(n, fmt), dtype=torch.uint8)
    energies = torch.zeros(2, 2)
    assert triton_kernels.delta_encode(x, None, fmt, seeds_of(2), out, m, m, how, energies) == -1
    assert triton_kernels.decode(out, None, fmt, x)
    assert len(compiled) >= 4
    for name, text in compiled.items():
        assert INEXACT.findall(text) == [], name


def ptx(program, arguments, backend: str, capability: int) -> str:
    """The assembly of a program for these arguments, without floating-point fusion."""
    triton = pytest.importorskip("triton")
    types = {"float32": "*fp32", "float16": "*fp16", "uint8": "*u8"}
    signature, constants = {}, {}
    for parameter in program.params:
        value = arguments[parameter.name]
        special = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or special:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, Tensor):
            name = str(value.dtype).removeprefix("torch.")
            signature[parameter.name] = types.get(name, name.replace("int", "*i"))
        else:
            signature[parameter.name] = "i32"
    source = triton.compiler.ASTSource(fn=program, signature=signature, constexprs=constants)
    target = triton.backends.compiler.GPUTarget(backend, capability, 32)
    done = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    text: str = done.asm["ptx"]
    return text


def test_tensors_on_the_cpu_are_left_to_others():
    assert not triton_use.usable(torch.zeros(2, 3), IntegerFormat(4, 128, False, False, False))


def test_a_reference_on_another_device_is_refused():
    here, elsewhere = torch.zeros(2, 3), torch.zeros(2, 3, device="meta")
    for before, after in ((here, list(elsewhere)), (elsewhere, here), ([], elsewhere)):
        with pytest.raises(ValueError, match="a reference on meta of values on cpu"):
            triton_launch.References.of(before, after, torch.float32, here.device)


@pytest.mark.parametrize(
    ("version", "said"),
    [(None, "pip install triton"), ("3.5.1", "3.5.1 is too old"), ("3.10.0", "")],
)
def test_the_reason_for_doing_without_triton_says_what_to_do(monkeypatch, version, said):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CC", "cc")
    reason = triton_use.why_missing.__wrapped__()
    assert said in reason
    assert bool(reason) == bool(said)


@pytest.mark.parametrize("call", ["encode", "decode", "delta_encode", "delta_decode", "kept"])
def test_a_rotated_format_is_refused_before_anything_is_done(call):
    plain = IntegerFormat(4, 128, False, False, False)
    fmt = dataclasses.replace(plain, hadamard=True)
    x, seeds = torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64)
    out = torch.zeros(reference.row_nbytes(8, fmt), dtype=torch.uint8)
    calls = {
        "encode": lambda: triton_kernels.encode(x, None, fmt, seeds, out),
        "decode": lambda: triton_kernels.decode(out, None, fmt, x),
        "delta_encode": lambda: triton_kernels.delta_encode(
            x, None, fmt, seeds, out, x, x, torch.float32
        ),
        "delta_decode": lambda: triton_kernels.delta_decode(
            out, (1, 8), None, fmt, x, x, torch.float32
        ),
        "kept": lambda: triton_kernels.delta_decode(out, (1, 8), None, plain, [out], [out], fmt),
    }
    with pytest.raises(ValueError, match="GPU kernels do not rotate"):
        calls[call]()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in mismatches("cpu"):
        print(line)
