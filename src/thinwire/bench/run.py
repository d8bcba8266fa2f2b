"""One run of the benchmark: every size in turn, and the document that comes out of it."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import platform
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from thinwire.bench import ROW, codecs, peers, timing
from thinwire.bench.codecs import Case, Data
from thinwire.bench.timing import Task, Timing
from thinwire.codecs import Codec
from thinwire.errors import SpecError
from thinwire.native import library
from thinwire.train.config import ConfigError
from thinwire.train.size import physical_memory
from thinwire.train.words import one_line

COPIES_A_ROUND = 4

Key = tuple[Case, type[peers.Peer] | None] | str


def named_codecs(specs: Sequence[str]) -> list[Codec]:
    """The codecs of ``--codecs``; raises ConfigError."""
    found: dict[Codec, None] = {}
    for spec in specs:
        try:
            value = tw.parse(spec)
        except SpecError as error:
            raise ConfigError(f"--codecs: {one_line(error)}") from None
        if not isinstance(value, Codec):
            raise ConfigError(f"--codecs: {spec} is a scheme; name its codecs, as int4")
        found[value] = None
    return list(found)


def document(
    sizes: Sequence[int],
    coders: Sequence[Codec] | None,
    ops: Sequence[str],
    rounds: int,
    threads: int,
    heap_kept: bool,
    progress: Callable[[str, bool], None],
) -> dict[str, Any]:
    """Measure; returns ``machine``, ``rows`` and ``peers``, as ``docs/bench.md`` describes them.

    ``sizes`` are numbers of values, multiples of ``ROW``; ``coders`` None: the usual ones;
    ``heap_kept`` is what ``timing.keep_heap`` said. Raises ConfigError where there is nothing to
    measure, or too much.
    """
    _check_memory(max(sizes))
    chosen = list(codecs.cases(coders, ops))
    if not chosen:
        raise ConfigError("--ops and --codecs leave nothing to measure; changes are of int1 … int8")
    described = _machine(threads, rounds, heap_kept)
    rows: list[dict[str, Any]] = []
    remarks: dict[str, str] = {}
    with _threads(threads):
        for numel in sizes:
            timings, sent = _measured(numel, chosen, rounds, threads, progress)
            timing.give_back_heap()
            rows += _rows(numel, timings, sent)
            found = [key[1] for key in timings if isinstance(key, tuple)]
            remarks |= {peer.name: peer.remark for peer in found if peer is not None}
    described["load_average_at_end"] = os.getloadavg()[0]
    described["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {"machine": described, "rows": rows, "peers": remarks}


def _check_memory(numel: int) -> None:
    needed, memory = numel * codecs.BYTES_A_VALUE, physical_memory()
    if memory is not None and needed > memory:
        raise ConfigError(
            f"--sizes: {numel:,} values take {needed / 1e9:.1f} GB, but this machine has "
            f"{memory / 1e9:.1f} GB; name smaller sizes"
        )


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measured(
    numel: int,
    chosen: Sequence[Case],
    rounds: int,
    threads: int,
    progress: Callable[[str, bool], None],
) -> tuple[dict[Key, Timing], dict[Case, int]]:
    """The timings for one size, of copies under their dtype, and the payloads' bytes."""
    data = Data(numel)
    beside = peers.Peers(data)
    work: dict[Key, Task] = {
        dtype: Task(functools.partial(data.copy, dtype), COPIES_A_ROUND)
        for dtype in dict.fromkeys(case.dtype for case in chosen)
    }
    for case in chosen:
        work[case, None] = Task(data.task(case))
        for cls, run in beside.tasks(case):
            work[case, cls] = Task(run)
    _, now = timing.clock(threads)
    size = size_text(numel)

    def show(text: str, stage: bool) -> None:
        progress(f"{size} values: {text}", stage)

    timings = timing.measure(work, rounds, now, show)
    return timings, {case: data.payload_nbytes(case) for case in chosen}


def _rows(
    numel: int, timings: dict[Key, Timing], sent: dict[Case, int]
) -> Iterator[dict[str, Any]]:
    """A row for each case alone and, below it, one for each peer that it was compared to."""
    for key, theirs in timings.items():
        if isinstance(key, str):
            continue
        case, peer = key
        ours, copy = timings[case, None], timings[case.dtype]
        nbytes = numel * codecs.DTYPES[case.dtype].itemsize
        row = {
            "op": case.op,
            "codec": str(case.codec),
            "dtype": case.dtype,
            "numel": numel,
            "reference": case.reference,
            "in_place": case.in_place,
            "group": codecs.group_of(case.codec),
            "level": case.level,
            "bits_per_value": 8 * sent[case] / numel,
            "ms": ours.ms,
            "ms_quartiles": [ours.ms_low, ours.ms_high],
            "gb_per_s": nbytes / ours.ms / 1e6,
            "copy_ms": copy.ms,
            "copy_ms_quartiles": [copy.ms_low, copy.ms_high],
            "x_copy": copy.ms / ours.ms,
            "samples": ours.samples,
            "page_faults": ours.page_faults,
            "peer": None,
            "x_peer": None,
        }
        if peer is not None:
            row |= {
                "peer": peer.name,
                "x_peer": theirs.ms / ours.ms,
                "peer_ms": theirs.ms,
                "peer_ms_quartiles": [theirs.ms_low, theirs.ms_high],
                "peer_x_copy": copy.ms / theirs.ms,
                "peer_samples": theirs.samples,
                "peer_page_faults": theirs.page_faults,
            }
        yield row


def _machine(threads: int, rounds: int, heap_kept: bool) -> dict[str, Any]:
    """What the numbers were measured on, and how."""
    measured, _ = timing.clock(threads)
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "level": library.level(),
        "why_eager": library.why_missing() or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "thinwire": tw.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "threads": threads,
        "rounds": rounds,
        "clock": measured,
        "heap_kept": heap_kept,
        "row": ROW,
        "load_average_at_start": os.getloadavg()[0],
    }


def _cpu() -> str:
    """The model of the processor, as Linux calls it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def size_text(numel: int) -> str:
    """A number of values as ``--sizes`` takes it: 4M for 4 · 2^20."""
    for factor, suffix in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if numel % factor == 0:
            return f"{numel // factor}{suffix}"
    return str(numel)
