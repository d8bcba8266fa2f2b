#!/usr/bin/env python3
"""Why ``tile`` is as it is, and what zstd adds to ``int4``: SNR and bits, data by data.

    nice .venv/bin/python benchmarks/tile_design.py --json benchmarks/results/tile_design.json

The first table gives the SNR (dB, energy of the values over energy of the error) of existing
codecs, of ``tile``, and of the designs that it was chosen from, simulated at 4.0 bits a value with
all that travels counted. A design is named by

* its tile and the grid: ``affine`` (a byte of scale and one of offset a tile), and with one byte
  ``midtread`` (2**b - 1 levels), ``midrise`` (2**b levels, none at zero) or ``signed`` (2**b
  levels, the extreme at the end that has one more);
* the widths: ``3/4`` (the wider for the tiles of the widest range, as many as the bits allow) or
  ``2-8`` (a bit more for each octave of range);
* the rotation: ``no``, ``ratio`` (of tiles whose largest magnitude is twice the second),
  ``smaller`` (of tiles whose range it makes smaller), ``pivot`` (the same with the largest value
  swapped to the front, its position in another byte a tile).

Real data are the tensors at the cut of the demo's model, trained here for ``--steps`` steps in one
process: the activations, the gradients, and the change of the activations over an epoch.

The second table gives the bits a value of int4 payloads after level 1 of zstd (needs the package
``zstandard``): ``whole``, as they are; ``codes``, with the codes of all rows in one frame and the
parameters raw; ``pairs``, the same with neighbours in a byte instead of planes; against the entropy
of the codes, parameters added to all. ``excess`` is that of the compressed codes alone over their
entropy. Speeds are those of the codes, per processor second.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import codec
from thinwire.native import hadamard, planes
from thinwire.train import data, model
from thinwire.train.batches import Batch, training_numbers
from thinwire.train.config import DataConfig, ModelConfig

ROWS, VALUES = 16, 16384
OUTLIERS = (20.0, 30.0, 40.0, 60.0, 80.0, 100.0)
CODECS = ("int3", "int4:group=1024", "int4:symmetric", "int4", "tile:bits=3", "tile")
DESIGNS = (
    (32, "affine", "3/4", "no"),
    (64, "affine", "3/4", "no"),
    (64, "affine", "3/5", "no"),
    (64, "affine", "3/4", "ratio"),
    (64, "affine", "3/4", "pivot"),
    (32, "affine", "2-8", "smaller"),
    (64, "affine", "2-8", "no"),
    (64, "affine", "2-8", "ratio"),
    (64, "affine", "2-8", "smaller"),
    (32, "affine", "2-8", "pivot"),
    (64, "affine", "2-8", "pivot"),
    (128, "affine", "2-8", "pivot"),
    (32, "midtread", "2-8", "smaller"),
    (32, "midrise", "2-8", "smaller"),
    (16, "signed", "2-8", "smaller"),
    (64, "signed", "2-8", "smaller"),
    (128, "signed", "2-8", "smaller"),
    (32, "signed", "2-8", "no"),
    (32, "signed", "3/4", "smaller"),
    (32, "signed", "3/5", "smaller"),
    (32, "signed", "2-8", "smaller"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=432, help="of training; 216 are an epoch")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sets = {**synthetic(), **real(args.steps)}
    snr = snr_table(sets)
    zstd = zstd_table(sets)
    if args.json:
        machine = {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        report = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.date.today().isoformat(),
            "machine": machine,
            "snr_db": snr,
            "zstd": zstd,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


# The data.


def synthetic() -> dict[str, Tensor]:
    """By name: float32 [64, 16384], a million values."""
    generator = torch.Generator().manual_seed(1)
    shape = (4 * ROWS, VALUES)
    gauss = torch.randn(shape, generator=generator)
    signs = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    laplace = signs * torch.empty(shape).exponential_(generator=generator)
    chi = torch.randn(3, *shape, generator=generator).square().sum(0)
    channels = 1024
    scales = torch.exp(0.6 * torch.randn(channels, generator=generator))
    chosen = torch.randperm(channels, generator=generator)[: len(OUTLIERS)]
    scaled = gauss.view(len(gauss), -1, channels) * scales
    wild = scaled.clone()
    wild[..., chosen] = gauss.view(len(gauss), -1, channels)[..., chosen] * torch.tensor(OUTLIERS)
    biased = scaled.clone()
    biased[..., chosen] += torch.tensor(OUTLIERS) * signs[0, : len(OUTLIERS)]
    return {
        "gauss": gauss,
        "laplace": laplace,
        "t3": gauss / (chi / 3).sqrt(),
        "outlier channels": wild.reshape(shape),
        "biased outliers": biased.reshape(shape),
        "relu": gauss.clamp(min=0),
    }


def real(steps: int) -> dict[str, Tensor]:
    """Activations, gradients and changes at the cut, by name: [16, context * dim]."""
    config = ModelConfig()
    text = data.load(DataConfig(), config.context)
    samples = data.Samples(text.train, config.context)
    stages = [model.build_stage(config, index, 2, seed=0) for index in range(2)]
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=5e-4, weight_decay=0.1)
    probe = samples.batch(torch.arange(0, len(samples), len(samples) // ROWS)[:ROWS])

    def at_cut(batch: Batch) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        x = stages[0](batch.inputs)
        received = x.detach().requires_grad_()
        logits = stages[1](received).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, batch.target.flatten()).backward()
        assert received.grad is not None
        x.backward(received.grad)
        return x.detach().flatten(1), received.grad.flatten(1)

    found: dict[str, Tensor] = {}
    upcoming = training_numbers(len(samples), batch=16, least=8, seed=0)
    captures = {max(1, steps // 2): "half way", steps: "end"}
    for step in range(1, steps + 1):
        at_cut(samples.batch(next(upcoming)[1]))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step in captures:
            x, gradient = at_cut(probe)
            found[f"activations, {captures[step]}"] = x.clone()
            found[f"gradients, {captures[step]}"] = gradient.clone()
    found["changes"] = found["activations, end"] - found["activations, half way"]
    return found


# Designs.


def snr_table(sets: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Prints and returns a row a design: its name, bits a value, and dB by data set."""
    print(f"{'SNR, dB':32}{'bits':>6}  " + "  ".join(f"{name:>10.22}" for name in sets))
    rows: list[dict[str, Any]] = []
    coders: list[tuple[str, Callable[[Tensor], tuple[Tensor, float]]]] = [
        *((spec, coded_by(spec)) for spec in CODECS),
        *((f"{t} {g} {w} {r}", simulated_by(t, g, w, r)) for t, g, w, r in DESIGNS),
    ]
    for name, code in coders:
        results = {key: code(x) for key, x in sets.items()}
        db = {key: round(snr(sets[key], y), 2) for key, (y, _) in results.items()}
        bits = next(iter(results.values()))[1]
        rows.append({"design": name, "bits": round(bits, 3), "db": db})
        cells = (f"{value:{max(10, min(22, len(key)))}.2f}" for key, value in db.items())
        print(f"{name:32}{bits:6.3f}  " + "  ".join(cells), flush=True)
    return rows


def snr(x: Tensor, y: Tensor) -> float:
    energy = x.double().square().sum()
    return 10 * math.log10(float(energy / (y.double() - x.double()).square().sum()))


def coded_by(spec: str) -> Callable[[Tensor], tuple[Tensor, float]]:
    """What the codec makes of x, and the bits a value."""

    def code(x: Tensor) -> tuple[Tensor, float]:
        payload = codec(spec).encode(x)
        return codec(spec).decode(payload, x.shape, x.dtype), 8 * payload.numel() / x.numel()

    return code


def simulated_by(
    size: int, grid: str, widths: str, rotation: str
) -> Callable[[Tensor], tuple[Tensor, float]]:
    """The same for a design of 4.0 bits, which is computed but not packed."""

    def code(x: Tensor) -> tuple[Tensor, float]:
        tiles = x.unflatten(1, (-1, size))
        count = tiles.shape[1]
        side = count * (8 * (2 if grid == "affine" else 1) + 8 * (rotation == "pivot")) + 16
        low, span, log = parameters_of(tiles, grid)
        if rotation != "no":
            first = tiles.abs().argmax(2, keepdim=True) if rotation == "pivot" else None
            turned = turn(tiles, first)
            other = parameters_of(turned, grid)
            use = other[2] < log
            if rotation == "ratio":
                top = tiles.abs().topk(2, dim=2).values
                use = top[..., 0] > 2 * top[..., 1]
            tiles = torch.where(use[..., None], turned, tiles)
            low, span, log = (
                torch.where(use, new, old) for new, old in zip(other, (low, span, log), strict=True)
            )
        bits = widths_of(log, widths, (4 * x.shape[1] - side) // size)
        error = quantized(tiles, low, span, grid, bits) - tiles
        # a rotation keeps the energy of the error, so that it need not be undone here
        used = (int(bits[0].sum()) * size + side) / x.shape[1]
        return x + error.flatten(1), used

    return code


def parameters_of(tiles: Tensor, grid: str) -> tuple[Tensor, Tensor, Tensor]:
    """(lowest level, range, range as a logarithm in 1/8 octaves) of each tile."""
    low, high = tiles.amin(2), tiles.amax(2)
    if grid != "affine":
        peak = torch.maximum(high, -low)
        log = (peak.view(torch.int32) + (1 << 19)) >> 20
        peak = (log << 20).view(torch.float32)
        flipped = torch.where(high > -low, -1.0, 1.0)  # of the signed grid
        return (-peak * flipped if grid == "signed" else -peak), 2 * peak, log
    # the offset's 256 steps of 1/64 of the range reach two ranges to either side
    reach = torch.maximum(torch.maximum(high - low, -low / 2), low / 1.98)
    log = (reach.view(torch.int32) + (1 << 19)) >> 20
    span = (log << 20).view(torch.float32)
    unit = torch.where(span > 0, span / 64, torch.ones(()))
    offset = (((low + high) / 2 - span / 2) / unit).round().clamp(-128, 127)
    return offset * span / 64, span, log


def turn(tiles: Tensor, first: Tensor | None) -> Tensor:
    """The tiles rotated; with ``first`` after a swap of that value and the first one."""
    size = tiles.shape[2]
    if first is None:
        return hadamard.rotate(tiles.flatten(1), size).view_as(tiles)
    swapped = tiles.scatter(2, first, tiles[..., :1])
    swapped[..., 0] = tiles.gather(2, first)[..., 0]
    # without signs: the first column is constant, so the outlier becomes the offset
    return hadamard.unrotate(swapped.flatten(0, 1), size).view_as(tiles) * hadamard.signs(
        size, tiles.device
    )


def widths_of(log: Tensor, rule: str, units: int) -> Tensor:
    """Bits of each tile [rows, tiles], ``units`` in all."""
    count = log.shape[1]
    if "/" in rule:
        narrow, wide = map(int, rule.split("/"))
        chosen = min(max((units - narrow * count) // (wide - narrow), 0), count)
        order = (log * count + torch.arange(count, 0, -1)).argsort(1, descending=True)
        bits = torch.full_like(log, narrow)
        return bits.scatter(1, order[:, :chosen], wide)
    narrow, wide = map(int, rule.split("-"))
    bits = torch.full_like(log, narrow)
    for row, levels in zip(bits, log, strict=True):
        for threshold in range(int(levels.max()) - 8 * narrow, int(levels.min()) - 8 * wide, -1):
            wanted = ((levels - threshold) >> 3).clamp(narrow, wide)
            more = torch.nonzero(wanted > row).flatten()[: units - int(row.sum())]
            row[more] += 1
            if int(row.sum()) >= units:
                break
    return bits


def quantized(tiles: Tensor, low: Tensor, span: Tensor, grid: str, bits: Tensor) -> Tensor:
    """The nearest level to each value."""
    low, span = low[..., None], span[..., None]
    levels = (2.0**bits)[..., None]
    if grid == "signed":
        step = -2 * low / levels  # of either sign, with the extreme at -levels / 2
        inverse = torch.where(step != 0, 1 / step, torch.zeros(()))
        k = (tiles * inverse).round()
        return torch.minimum(torch.maximum(k, -levels / 2), levels / 2 - 1) * step
    step = span / (levels - (2 if grid == "midtread" else 1))
    inverse = torch.where(step > 0, 1 / step, torch.zeros(()))
    k = torch.minimum(((tiles - low) * inverse).round().clamp(min=0), levels - 1)
    return low + k * step


# zstd.


def zstd_table(sets: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Prints and returns a row for each data set, group and row length."""
    try:
        import zstandard
    except ImportError:
        print("zstd: the package zstandard is not installed")
        return []
    print("\nint4 and zstd level 1: bits a value, parameters included; GB/s of float32 values")
    columns = ["none", "whole", "codes", "pairs", "entropy", "excess,%", "encode", "decode"]
    print(f"{'':48}" + "".join(f"{name:>10}" for name in columns))
    rows = []
    for name in ("gauss", "laplace", "activations, end", "gradients, end", "changes"):
        flat = sets[name].flatten()
        for group in (128, 1024):
            for n in (1024, 32768, 1 << 20):
                if n > flat.numel():
                    continue
                row = zstd_row(zstandard, flat[: flat.numel() // n * n].view(-1, n), group)
                rows.append({"data": name, "group": group, "row": n, **row})
                label = f"{name}, group {group}, rows of {n}"
                print(f"{label:48}" + "".join(f"{v:10.3f}" for v in row.values()), flush=True)
    return rows


def zstd_row(zstandard: Any, x: Tensor, group: int) -> dict[str, float]:
    """Bits a value of the payload of ``x``, before and after zstd, and speeds."""
    payload = codec(f"int4:group={group}").encode(x)
    rows = payload.view(len(x), -1)
    parameters = -(-x.shape[1] // group) * 6
    codes = rows[:, parameters:].contiguous()
    symbols = planes.unpack(codes, x.shape[1], 4)
    share = torch.bincount(symbols.flatten(), minlength=16).double() / x.numel()
    entropy = -float((share * share.clamp(min=1e-300).log2()).sum())
    pairs = symbols[:, 0::2] | symbols[:, 1::2] << 4
    raw = 8 * parameters / x.shape[1]

    def bits(content: Tensor) -> float:
        frame = zstandard.ZstdCompressor(level=1, write_content_size=False)
        return 8 * len(frame.compress(content.contiguous().numpy())) / x.numel()

    frame = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(codes.numpy())
    target = torch.empty(codes.numel(), dtype=torch.uint8)

    def compress() -> None:
        coder = zstandard.ZstdCompressor(level=1, write_content_size=False)
        coder.stream_reader(codes.numpy().ravel()).readinto(target.numpy())

    def decompress() -> None:
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 20).stream_reader(frame)
        if reader.readinto(target.numpy()) != target.numel():
            raise RuntimeError("a short frame")

    alone = bits(codes)
    return {
        "none": 8 * payload.numel() / x.numel(),
        "whole": bits(payload),
        "codes": raw + alone,
        "codes_in_order": raw + bits(pairs),
        "entropy": raw + entropy,
        "excess_percent": 100 * (alone / entropy - 1),
        "encode_gb_s": 4e-9 * x.numel() / seconds(compress),
        "decode_gb_s": 4e-9 * x.numel() / seconds(decompress),
    }


def seconds(work: Callable[[], None]) -> float:
    """Median processor time of seven calls."""
    times = []
    for _ in range(7):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


if __name__ == "__main__":
    raise SystemExit(main())
