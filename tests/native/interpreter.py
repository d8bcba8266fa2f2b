"""A test module run as a script under Triton's interpreter, which is chosen at the start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run_under_the_interpreter(script: str) -> None:
    """``script`` has to end well without a word."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
