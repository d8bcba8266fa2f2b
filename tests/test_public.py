"""The public names, in a process that has imported nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

import thinwire as tw


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("name", tw.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(tw, name) is not None


def test_importing_the_package_imports_no_torch() -> None:
    assert run("import sys, thinwire; print('torch' in sys.modules)") == "False"


def test_a_scheme_is_known_to_the_first_name_that_is_used() -> None:
    code = (
        "import thinwire as tw\n"
        "try:\n    tw.codec('delta(int4)')\n"
        "except ValueError as error:\n    print(error)"
    )
    assert "is a scheme, which has state" in run(code)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'codex'"):
        _ = tw.codex  # type: ignore[attr-defined]
