"""The kernels on made-up and damaged input for some seconds, between guard pages.

This runs what is installed, compiled as users have it, and sees every access beyond a buffer that
a caller owns, and every difference between the levels. ``make fuzz SECONDS=600`` runs the same
program with the address and undefined-behaviour sanitizers, which also see inside the kernels;
its build takes minutes, which is why it is no test.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.compiler import COMPILER, program
from thinwire.native import library

SECONDS = 15
SOURCE = Path(__file__).with_name("fuzz.cpp")
LIBRARY = Path(library.__file__).with_name("libthinwire.so")


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, linked with the library that is installed."""
    if COMPILER is None:
        pytest.skip("no C++ compiler: none of c++, g++ and clang++ is on the path")
    if library.why_missing():
        pytest.skip(f"no library: {library.why_missing()}")
    if not sys.platform.startswith("linux"):
        pytest.skip(f"{sys.platform}: the program is linked with the library as Linux does it")
    return program(tmp_path_factory.mktemp("fuzz") / "fuzz", SOURCE, LIBRARY, COMPILER)


def run(fuzz: Path, *arguments: object) -> str:
    words = [str(fuzz), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(200)
def test_hostile_input_stays_within_its_buffers_and_all_levels_agree(fuzz: Path) -> None:
    shown = run(fuzz, SECONDS, random.SystemRandom().randrange(2**63))
    print(shown)
    assert f"levels {' '.join(library.levels())}," in shown


def test_an_iteration_can_be_run_again_by_its_number(fuzz: Path) -> None:
    assert "iteration 12 is fine" in run(fuzz, 0, 1, 12)
