"""A C++ compiler, for tests that need one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "src/thinwire/native/csrc"
#: The compiler that the build would use; None where there is none.
COMPILER = next(
    filter(None, map(shutil.which, [os.environ.get("CXX", "c++"), "c++", "g++", "clang++"])), None
)


def shared_object(path: Path, source: str) -> Path:
    """Compile C++ ``source`` into the shared object ``path``; skips without a compiler."""
    if COMPILER is None:
        pytest.skip("no C++ compiler: none of c++, g++ and clang++ is on the path")
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", path],
        input=source,
        text=True,
        timeout=60,
        check=True,
    )
    return path


def program(path: Path, source: Path, library: Path, compiler: str) -> Path:
    """Compile ``source`` into the program ``path``, linked with ``library`` where it lies."""
    where = [f"-I{CSRC}", str(source), str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run([compiler, "-std=c++17", "-O1", *where, "-o", path], timeout=300, check=True)
    return path
