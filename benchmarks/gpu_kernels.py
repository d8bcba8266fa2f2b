"""The integer codecs' GPU kernels: the same bytes as the CPU's eager twin, then their speed.

    PYTHONPATH=src python benchmarks/gpu_kernels.py --json benchmarks/results/gpu_kernels.json

Needs a CUDA device, torch and Triton >= 3.6. Most of its minutes go into compiling some hundred
programs for the comparison; --skip-identity leaves that out. With --small under TRITON_INTERPRET=1
it compares a little on a CPU, and times nothing.

Times are medians between CUDA events: "queued" of the programs alone, "call" of the function that a
codec calls, which also waits for the answer. "x copy" is the time of torch's copy_ of the
uncompressed tensor over the queued time: above 1, the codec is faster than a copy.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.native import delta_reference, reference, triton_kernels, triton_launch
from thinwire.native.reference import IntegerFormat

KEEPS = (torch.float32, torch.bfloat16, IntegerFormat(8, 64, False, False, False))
TIMED = {
    "int4": IntegerFormat(4, 128, False, False, False),
    "int4 stochastic": IntegerFormat(4, 128, False, True, False),
    "int8": IntegerFormat(8, 128, False, False, False),
    "int2 std": IntegerFormat(2, 128, False, False, True),
    "int6 group=1024": IntegerFormat(6, 1024, False, False, False),
    "int4 group=100": IntegerFormat(4, 100, False, False, False),
    "int4 group=row": IntegerFormat(4, 0, False, False, False),
}


def formats() -> Iterator[IntegerFormat]:
    """Every number of bits in every mode, with groups in turn."""
    group = itertools.cycle((128, 8, 100, 0, 1024, 64, 5000))
    for bits, symmetric, std in itertools.product(range(1, 9), (False, True), (False, True)):
        for stochastic in (False,) if std else (False, True):
            if bits > 1 or not symmetric or std:
                yield IntegerFormat(bits, next(group), symmetric, stochastic, std)


def inputs(small: bool) -> Iterator[tuple[str, Tensor]]:
    """Values of the CPU's generator, at the ends of float32 too."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 1111 if small else 20_011, generator=generator)
    yield "normal", x
    yield "bfloat16", x[:, :-3].to(torch.bfloat16)
    yield "float16", x.to(torch.float16)
    yield "vast", x * 2.0**122
    yield "subnormal", x * 2.0**-130
    yield "outliers", x**5
    yield "zeros of both signs", torch.where(x > 0, 0.0, -0.0)


def digest(parts: list[Tensor]) -> str:
    """SHA-256 of tensors' bytes."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def saturated(y: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return y.clamp(-most, most).to(dtype)


def on_cpu(x: Tensor, fmt: IntegerFormat, how: delta_reference.Kept | None) -> str:
    """Digest of what the eager twin makes of ``x``, with references where ``how`` says."""
    rows, n = x.shape
    seeds = torch.arange(rows, dtype=torch.int64) * (7 * 2**33) - 5
    out = torch.zeros(rows, reference.row_nbytes(n, fmt), dtype=torch.uint8)
    values = x.to(torch.float32)
    if how is None:
        assert reference.encode_rows(values, fmt, seeds, out)
        y = reference.decode_rows(out, n, fmt)
        assert y is not None
        return digest([out, saturated(y, x.dtype)])
    kept = delta_reference.keep_rows(values * 0.9, how)
    assert kept is not None
    before = delta_reference.read_rows(list(kept), n, how)
    y = delta_reference.delta_encode_rows(values, before, fmt, seeds, out)
    assert y is not None
    after = delta_reference.keep_rows(y, how)
    assert after is not None
    energies = [delta_reference.energies(values - before), delta_reference.energies(values)]
    return digest([out, after, saturated(y, x.dtype), after, torch.stack(energies, 1)])


def on_gpu(x: Tensor, fmt: IntegerFormat, how: delta_reference.Kept | None, device: str) -> str:
    """The same by Triton."""
    rows, n = x.shape
    seeds = (torch.arange(rows, dtype=torch.int64) * (7 * 2**33) - 5).to(device)
    out = torch.zeros(rows, reference.row_nbytes(n, fmt), dtype=torch.uint8, device=device)
    here, y = x.to(device), torch.empty_like(x, device=device)
    if how is None:
        assert triton_kernels.encode(here, None, fmt, seeds, out) == -1
        assert triton_kernels.decode(out, None, fmt, y)
        return digest([out, y])
    kept = delta_reference.keep_rows(x.to(torch.float32) * 0.9, how)
    assert kept is not None
    sent, received = kept.to(device, copy=True), list(kept.to(device, copy=True))
    energies = torch.empty(rows, 2, device=device)
    assert triton_kernels.delta_encode(here, None, fmt, seeds, out, sent, sent, how, energies) == -1
    assert triton_kernels.delta_decode(out, (rows, n), None, fmt, received, received, how, y)
    return digest([out, sent, y, torch.stack(received), energies])


def identity(device: str, small: bool) -> dict[str, Any]:
    """Compare everything; prints and returns what differs."""
    compared, different, started = 0, [], time.perf_counter()
    cases = list(inputs(small))
    keeps = itertools.cycle((None, *KEEPS))
    for index, fmt in enumerate(list(formats())[:: 9 if small else 1]):
        for name, x in (cases[0], cases[1 + index % (len(cases) - 1)]):
            how = next(keeps)
            compared += 1
            what = f"{fmt}, {name}" + ("" if how is None else f", {how} references")
            if on_cpu(x, fmt, how) != on_gpu(x, fmt, how, device):
                different.append(what)
                print(f"DIFFERENT: {what}", flush=True)
        next(keeps)  # so that formats meet other references
    seconds = time.perf_counter() - started
    print(f"{compared - len(different)} of {compared} cases equal ({seconds:.0f} s)", flush=True)
    return {"compared": compared, "different": different, "seconds": seconds}


def median_ms(step: Callable[[], object], rounds: int) -> float:
    """Median time of ``step`` between CUDA events, after two rounds of warming up."""
    times = []
    for k in range(rounds + 2):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        step()
        last.record()
        last.synchronize()
        if k >= 2:
            times.append(first.elapsed_time(last))
    return float(statistics.median(times))


def steps(x: Tensor, fmt: IntegerFormat) -> dict[str, dict[str, Callable[[], object]]]:
    """By operation: the queued programs, the whole call, and the eager twin on the same GPU."""
    rows, n = x.shape
    device = x.device
    layout = triton_launch.Layout(rows, n, fmt, None, device)
    seeds = torch.arange(rows, dtype=torch.int64, device=device)
    out = torch.zeros(rows, reference.row_nbytes(n, fmt), dtype=torch.uint8, device=device)
    m, y = torch.zeros_like(x), torch.empty_like(x)
    status = torch.full((4,), 2**63 - 1, dtype=torch.int64, device=device)
    none = triton_launch.NO_REFERENCES
    assert triton_kernels.encode(x, None, fmt, seeds, out) == -1

    def references() -> triton_launch.References:
        return triton_launch.References.of(m, m, x.dtype, device)

    def eager_step() -> None:
        moved = delta_reference.delta_encode_rows(x.float(), m.float(), fmt, seeds, out)
        assert moved is not None
        m.copy_(moved)

    return {
        "encode": {
            "queued": lambda: triton_launch.encode(x, layout, seeds, out, none, status),
            "call": lambda: triton_kernels.encode(x, None, fmt, seeds, out),
            "eager": lambda: reference.encode_rows(x.float(), fmt, seeds, out),
        },
        "decode": {
            "queued": lambda: triton_launch.decode(out, layout, none, y, status),
            "call": lambda: triton_kernels.decode(out, None, fmt, y),
            "eager": lambda: reference.decode_rows(out, n, fmt),
        },
        "delta encode": {
            "queued": lambda: triton_launch.delta_encode(
                x, layout, seeds, out, references(), status
            ),
            "call": lambda: triton_kernels.delta_encode(x, None, fmt, seeds, out, m, m, x.dtype),
            "eager": eager_step,
        },
        "delta decode": {
            "queued": lambda: triton_launch.decode(out, layout, references(), y, status),
            "call": lambda: triton_kernels.delta_decode(
                out, (rows, n), None, fmt, m, m, x.dtype, y
            ),
        },
    }


def timings() -> list[dict[str, Any]]:
    """Time every operation; prints a line each."""
    found = []
    for dtype, count in itertools.product((torch.float32, torch.bfloat16), (2**22, 2**26)):
        x = torch.randn(count // 4096, 4096, device="cuda").to(dtype)
        y = torch.empty_like(x)
        copy = median_ms(lambda x=x, y=y: y.copy_(x), 30)  # type: ignore[misc]
        rate = 2 * x.numel() * x.element_size() / copy / 1e6
        print(f"\n{count >> 20}M {dtype}: copy_ {copy:.4f} ms, {rate:.0f} GB/s", flush=True)
        for name, fmt in TIMED.items():
            for operation, ways in steps(x, fmt).items():
                ms = {
                    way: median_ms(step, 5 if way == "eager" else 20) for way, step in ways.items()
                }
                row = {"values": count, "dtype": str(dtype), "format": name, "copy_ms": copy}
                found.append({**row, "operation": operation, "ms": ms})
                text = ", ".join(f"{way} {value:.4f}" for way, value in ms.items())
                print(
                    f"  {name:16} {operation:13} {copy / ms['queued']:5.2f} x copy  (ms: {text})",
                    flush=True,
                )
    return found


def main() -> int:
    """Compare, time, and write; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--skip-identity", action="store_true")
    parser.add_argument("--small", action="store_true", help="few small comparisons, no times")
    options = parser.parse_args()
    import triton  # type: ignore[import-untyped]

    gpu = torch.cuda.is_available()
    document: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if gpu else f"{platform.machine()}, no GPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    print(", ".join(f"{key} {value}" for key, value in document.items()), flush=True)
    if not options.skip_identity:
        document["identity"] = identity("cuda" if gpu else "cpu", options.small)
    if not options.small:
        document["timings"] = timings()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(document.get("identity", {}).get("different")))


if __name__ == "__main__":
    sys.exit(main())
