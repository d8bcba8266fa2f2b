"""The kernels compiled for aarch64 and run by an emulator: their bytes are those of the twin.

To compile them takes more than a minute, which is why ``make test-aarch64`` runs this and not
``make test``. (On an aarch64 machine every test of the kernels is one of these.) Compiled at -O1,
to save time; with the options of a release, or another compiler:

    CMAKE_ARGS=-DCMAKE_BUILD_TYPE=Release make test-aarch64
    CMAKE_ARGS='-DCMAKE_CXX_COMPILER=clang++ -DCMAKE_CXX_COMPILER_TARGET=aarch64-linux-gnu' ...
"""

from __future__ import annotations

import itertools
import os
import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.native import test_hadamard_kernels, test_tile_kernels, test_topk
from tests.native.calls import Calls
from tests.native.compiler import COMPILER, program
from tests.native.kernel_cases import (
    GROUPS,
    MODES,
    format_of,
    needs_library,
    normal,
    some_sizes,
    tensors,
)
from tests.native.test_delta_kernels import REFERENCES, Step, steps
from thinwire.native import library, tile
from thinwire.native.reference import IntegerFormat
from thinwire.native.tile import TileFormat

pytestmark = [needs_library, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/aarch64"
LIBRARY = Path(library.__file__).with_name("libthinwire.so")
CROSS = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = next(filter(None, map(shutil.which, ["qemu-aarch64-static", "qemu-aarch64"])), None)
CMAKE = shutil.which("cmake") or shutil.which("cmake", path=Path(sys.executable).parent)
FUZZED = 30_000


# The programs, here and there.


def there(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a program for aarch64, with the cross compiler's libraries."""
    assert CROSS is not None
    assert EMULATOR is not None
    words = [CROSS, "-print-file-name=libc.so.6"]
    libc = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    return here(EMULATOR, "-L", Path(libc.strip()).resolve().parents[1], *command)


def here(*command: object) -> subprocess.CompletedProcess[str]:
    words = list(map(str, command))
    return subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library for aarch64, in a folder that is kept if it is compiled as usual."""
    if CROSS is None:
        pytest.skip("no aarch64-linux-gnu-g++ (Debian, Ubuntu: apt install g++-aarch64-linux-gnu)")
    if EMULATOR is None:
        pytest.skip("no qemu-aarch64-static (Debian, Ubuntu: apt install qemu-user-static)")
    if CMAKE is None:
        pytest.skip("no cmake (pip install cmake)")
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    target += [f"-DCMAKE_CXX_COMPILER={CROSS}"]
    fast = ["-DCMAKE_BUILD_TYPE=Test", "-DCMAKE_CXX_FLAGS_TEST=-O1"]
    asked = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    folder = tmp_path_factory.mktemp("build") if asked else BUILD
    subprocess.run([CMAKE, "-S", ROOT, "-B", folder, *target, *fast, *asked], check=True)
    subprocess.run([CMAKE, "--build", folder], check=True)
    return folder / "libthinwire.so"


Programs = tuple[Path, Path]


def programs(name: str, compiled: Path, folder: Path) -> Programs:
    """The program ``name``.cpp for this machine, and for aarch64."""
    assert COMPILER is not None
    assert CROSS is not None
    source = Path(__file__).with_name(f"{name}.cpp")
    return (
        program(folder / name, source, LIBRARY, COMPILER),
        program(folder / f"{name}-aarch64", source, compiled, CROSS),
    )


# The cases.


def drawn(strategy: st.SearchStrategy, count: int) -> list[Any]:
    """About ``count`` examples, the same ones every time."""
    found: list[Any] = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found


@st.composite
def integer_cases(draw: st.DrawFn) -> tuple[Tensor, list[int] | None, IntegerFormat]:
    x = draw(tensors(bad=True))
    group = draw(st.sampled_from(GROUPS) | st.integers(8, 600))
    fmt = format_of(draw(st.sampled_from(list(MODES))), draw(st.integers(1, 8)), group)
    return x, some_sizes(draw(st.data()), x), fmt


def integer_calls(calls: Calls) -> None:
    for mode, bits, group in itertools.product(MODES, range(1, 9), GROUPS):
        calls.integer(normal(2, 2500), None, format_of(mode, bits, group))
    for case in drawn(integer_cases(), 1000):
        calls.integer(*case)
    for mode, group in itertools.product(MODES, (64, 128, 100, 0)):
        for place in (0, 5, 17, 63, 64, 127, 1000, 1024, 1040):
            x = normal(2, 1041)
            x[1, place] = (torch.nan, torch.inf, -torch.inf)[place % 3]
            calls.integer(x, None, format_of(mode, 4, group))
    for shape in ((1, 200_001), (1100, 130)):
        calls.integer(normal(*shape), None, format_of("stochastic", 3, 128), threads=2)
    for fmt, (x, sizes) in drawn(
        st.tuples(test_hadamard_kernels.formats(), test_hadamard_kernels.values()), 400
    ):
        calls.integer(x, sizes, fmt)


def delta_calls(calls: Calls) -> None:
    for how in [*REFERENCES.values(), *test_hadamard_kernels.KEPT[2:]]:
        for step in drawn(steps(how), 100):
            calls.step(step, in_place=len(calls.labels) % 2 == 0)
        for step in drawn(steps(how, rotated=True), 40):
            calls.step(step, in_place=len(calls.labels) % 2 == 0)
        for place in (0, 128, 999):
            x = normal(2, 1000)
            x[1, place] = torch.inf
            fmt = format_of("affine", 4, 128)
            calls.step(Step(x, normal(2, 1000, 1), None, fmt, how), in_place=False)


def tile_calls(calls: Calls) -> None:
    for bits, (x, sizes) in drawn(st.tuples(st.integers(3, 8), test_tile_kernels.values()), 300):
        calls.tile(x, sizes, TileFormat(bits))
    for dtype, place in itertools.product(test_tile_kernels.DTYPES, (0, 31, 32, 95, 98)):
        x = normal(3, 99).to(dtype)
        x[2, place] = torch.nan if place % 2 else -torch.inf
        calls.tile(x, None, TileFormat(4))
    shapes = st.tuples(st.integers(3, 8), st.integers(1, 700), st.integers(0, 0x7FF))
    for bits, n, top in drawn(shapes, 150):
        fmt = TileFormat(bits)
        size = (tile.row_nbytes(n, fmt),)
        generator = torch.Generator().manual_seed(n)
        payload = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        payload[0], payload[1] = top & 255, top >> 8
        calls.tile_bytes(payload, None, (1, n), fmt)


def topk_calls(calls: Calls) -> None:
    for x, share, modulus in drawn(
        st.tuples(
            test_topk.rows_of_values(),
            st.floats(0.001, 1.0),
            st.sampled_from(test_topk.MODULI),
        ),
        300,
    ):
        kept = max(1, round(share * len(x)))
        calls.topk(x[None], test_topk.rows_of([len(x)], [kept], modulus, x.itemsize))
    for shape, share in itertools.product(test_topk.SHAPES.values(), (0.001, 0.1, 0.5)):
        x = shape(normal(1, test_topk.LONG)[0])
        kept = round(share * len(x))
        for values in (x, x.to(torch.bfloat16)):
            rows = test_topk.rows_of([len(x)], [kept], 6, values.itemsize)
            calls.topk(values[None], rows)
    for sizes in ([300, 7, 0, 5000], [1, 0, 0, 96]):
        kept_of = [-(-size // 10) for size in sizes]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = normal(len(sizes), max(sizes)).to(dtype)
            rows = test_topk.rows_of(sizes, kept_of, 6, x.itemsize)
            calls.topk(x, rows)
            bad = x.clone()
            bad[3, sizes[3] - 1] = torch.nan
            calls.topk(bad, rows)


CASES = {"integer": integer_calls, "delta": delta_calls, "tile": tile_calls, "topk": topk_calls}


@pytest.fixture(scope="module")
def replay(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return programs("replay", compiled, tmp_path_factory.mktemp("replay"))


@pytest.mark.parametrize("kind", CASES)
def test_calls_give_the_bytes_of_the_twin(kind: str, replay: Programs, tmp_path: Path) -> None:
    path = tmp_path / "calls"
    with path.open("wb") as file:
        calls = Calls(file)
        CASES[kind](calls)
    for done in (here(replay[0], path), there(replay[1], path)):
        last = done.stdout.splitlines()[-1:]
        number = last[0].split()[1].rstrip(",") if done.returncode == 1 and last else ""
        label = calls.labels[int(number)] if number.isdigit() else ""
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{label}"
    assert done.stdout == f"baseline: {len(calls.labels)} calls as expected\n"


def test_the_fuzzer_gets_what_it_gets_here(compiled: Path, tmp_path: Path) -> None:
    fuzz, seed = programs("fuzz", compiled, tmp_path), random.SystemRandom().randrange(2**63)
    arguments = ("0", seed, 0, FUZZED - 1)
    expected, found = here(fuzz[0], *arguments), there(fuzz[1], *arguments)
    assert (expected.returncode, found.returncode) == (0, 0), expected.stderr + found.stderr
    lines = [done.stdout.splitlines()[1:] for done in (expected, found)]
    assert len(lines[0]) == FUZZED
    differ = [line for line, other in zip(*lines, strict=True) if line != other]
    assert not differ, f"seed {seed}: {len(differ)} iterations, first {differ[0]}"
