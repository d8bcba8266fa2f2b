"""The loader: which level runs, and what is said where there is no library."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.native.compiler import COMPILER, shared_object
from thinwire.native import library
from thinwire.native.library import ABI_VERSION, EAGER, Loader

needs_library = pytest.mark.skipif(
    library.why_missing() != "", reason=f"no library: {library.why_missing()}"
)


@pytest.fixture
def absent(tmp_path: Path) -> Loader:
    return Loader(tmp_path / "libthinwire.so")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on the path")
def test_the_library_is_there_wherever_there_is_a_compiler() -> None:
    assert library.why_missing() == ""
    assert library.levels()[-1] == "baseline"


@needs_library
def test_the_best_level_is_in_use_in_a_new_process() -> None:
    code = "from thinwire.native import library as l; print(l.level(), *l.levels())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    level, *levels = done.stdout.split()
    assert level == levels[0]
    assert levels == library.levels()


@needs_library
def test_every_level_can_be_set() -> None:
    before = library.level()
    for level in library.levels():
        library.set_level(level)
        assert library.level() == level
    library.set_level(before)


@needs_library
@pytest.mark.parametrize("level", ["v5", "", EAGER])
def test_an_unknown_level_is_refused_with_the_known_ones(level: str) -> None:
    before = library.level()
    with pytest.raises(ValueError, match=r"there is: .*baseline"):
        library.set_level(level)
    assert library.level() == before


@needs_library
@pytest.mark.parametrize("level", [*library.levels(), EAGER])
def test_a_forced_level_ends_with_the_block(level: str) -> None:
    before = library.level()
    with contextlib.suppress(KeyError), library.forced(level):
        assert library.level() == level
        assert (library.library() is None) == (level == EAGER)
        raise KeyError  # the block need not end well
    assert library.level() == before
    assert library.library() is not None


@needs_library
def test_forced_levels_nest() -> None:
    outer = library.level()
    with library.forced(EAGER):
        with library.forced("baseline"):
            assert library.level() == "baseline"
        assert library.level() == EAGER
        with pytest.raises(ValueError, match="no level 'v5'"), library.forced("v5"):
            pass
        assert library.library() is None
    assert library.level() == outer


def test_without_a_library_the_eager_twin_is_in_use(absent: Loader) -> None:
    assert absent.library() is None
    assert absent.levels() == []
    assert absent.level() == EAGER
    with absent.forced(EAGER):
        assert absent.level() == EAGER
    with pytest.raises(ValueError, match="no level 'baseline' here; there is: none"):
        absent.set_level("baseline")


def test_a_missing_library_is_logged_once(absent: Loader, caplog: pytest.LogCaptureFixture) -> None:
    assert absent.level() == EAGER  # asking for what is there is no reason to complain
    assert caplog.records == []
    threads = [threading.Thread(target=absent.library) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert absent.library() is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "thinwire's kernels are not there (not built when thinwire was installed, for want of a "
        "working C++17 compiler: install one, then run pip install again): "
        "codecs run on the slower torch twin, with the same bytes"
    )


def test_forcing_the_eager_twin_logs_nothing(
    absent: Loader, caplog: pytest.LogCaptureFixture
) -> None:
    with absent.forced(EAGER):
        assert absent.library() is None
    assert caplog.records == []


def test_what_is_no_library_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "libthinwire.so"
    path.write_text("no\nlibrary\n")
    reason = Loader(path).why_missing()
    assert reason.startswith("not loadable: ")
    assert str(path) in reason
    assert "\n" not in reason


def test_another_abi_version_is_refused(tmp_path: Path) -> None:
    path = shared_object(
        tmp_path / "libthinwire.so", 'extern "C" int tw_abi_version() { return 999; }'
    )
    other = Loader(path)
    assert other.library() is None
    assert other.why_missing() == (
        f"of another version: {path} has ABI 999, expected {ABI_VERSION}; run pip install again"
    )


@pytest.mark.parametrize("functions", ["", f"int tw_abi_version() {{ return {ABI_VERSION}; }}"])
def test_a_library_without_our_functions_is_refused(functions: str, tmp_path: Path) -> None:
    path = shared_object(tmp_path / "libthinwire.so", f'extern "C" {{ {functions} }}')
    reason = Loader(path).why_missing()
    assert reason.startswith("of another version: ")
    assert "undefined symbol: tw_" in reason or "symbol not found" in reason
