"""The wheel that pip builds, with a compiler and without.

Needs the package index, for what builds it; so it is run by ``make test-wheel`` and not with the
other tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.native.compiler import COMPILER

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
LIBRARY = "thinwire/native/libthinwire.so"


def build(folder: Path, **environment: str) -> Path:
    """Build the wheel of this tree into ``folder``."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps"]
    subprocess.run(
        # unoptimized, since this is about what is in it: optimizing takes minutes
        [*pip, "--config-settings=cmake.build-type=Debug", "--wheel-dir", folder, ROOT],
        env={**os.environ, **environment},
        check=True,
    )
    [wheel] = folder.iterdir()
    return wheel


def files(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def level(wheel: Path, folder: Path) -> str:
    """The level at which the wheel's own package runs, unpacked in ``folder``."""
    zipfile.ZipFile(wheel).extractall(folder)
    code = (
        "from thinwire.native import library\n"
        f"assert library.__file__.startswith({str(folder)!r}), library.__file__\n"
        "print(library.level())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on the path")
def test_a_wheel_has_the_library_and_serves_every_python(tmp_path: Path) -> None:
    wheel = build(tmp_path / "wheel")
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none")
    assert platform != "any"
    assert LIBRARY in files(wheel)
    assert "thinwire/py.typed" in files(wheel)
    assert not [name for name in files(wheel) if "csrc" in name]
    assert level(wheel, tmp_path / "unpacked") != "eager"


def test_without_a_compiler_the_wheel_is_pure_python_and_works(tmp_path: Path) -> None:
    wheel = build(tmp_path / "wheel", CXX="/bin/false")
    assert wheel.stem.endswith("-py3-none-any")
    assert not [name for name in files(wheel) if name.endswith(".so") or "csrc" in name]
    assert level(wheel, tmp_path / "unpacked") == "eager"
