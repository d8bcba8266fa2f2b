"""The command ``thinwire check``: what it refuses, what it shows, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.blocks import block
from tests.test_plugins import SIGN, written
from thinwire.cli import main

pytestmark = pytest.mark.usefixtures("registry")

WRONG = SIGN.replace("x.abs().mean(1)", "x.abs().mean().expand(len(x))")
TWO = (
    block("plugins.md", "last")
    + """

@tw.register_codec("bare")
@dataclasses.dataclass(frozen=True)
class Bare(tw.TensorCodec):
    bits: int

    def encode(self, x):
        return {"x": x.half()}

    def decode(self, parts, n):
        return parts["x"].float()
"""
)

MISTAKES = {
    "nothing": ([], "nothing to check: name a Python file, or a codec by --spec"),
    "a wrong option": (["--sepc", "int4"], "unknown option --sepc; did you mean '--spec'?"),
    "no spec": (["--spec"], "expected one argument"),
    "an unknown codec": (["--spec", "itn4"], "--spec: in spec 'itn4': unknown codec or scheme"),
    "an option that is not there": (["own.py", "--spec", "sign:lot=1"], "sign has no option 'lot'"),
    "a missing file": (["nowhere.py"], "can't read the plugin nowhere.py: No such file"),
    "a missing plugin": (["--plugin", "nowhere.py", "--spec", "int4"], "can't read the plugin"),
    "a file that fails": (["bad.py"], "bad.py:2: NameError: name 'y' is not defined"),
    "a file without codecs": (["empty.py"], "empty.py registers nothing"),
    "what needs an option": (["two.py"], "bare needs bits, of which no example is known; give it"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    mistake: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, SIGN)
    written(tmp_path, TWO, "two.py")
    written(tmp_path, "x = 1\nx = y\n", "bad.py")
    written(tmp_path, "x = 1\n", "empty.py")
    words, message = MISTAKES[mistake]
    assert main(["check", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("thinwire: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_what_a_file_registers_is_checked_and_exit_code_0_if_all_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, SIGN)
    assert main(["check", str(path), "--spec", "sign:loudness=2", "--spec", "sign"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for spec in ("sign", "sign:loudness=2"):
        assert f"codec {spec} " in captured.out
        assert f"{spec}: 23 requirements: 22 passed, 0 failed, 1 not applicable" in captured.out
    assert captured.out.count("codec sign") == 2  # what is given twice is checked once


def test_what_fails_is_a_row_with_input_and_expectation_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, WRONG)
    assert main(["check", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.err == "thinwire: error: sign fails rows\n"
    shown = " ".join(captured.out.split())
    assert "rows failed float32 (2, 1): byte 1 is another one alone; compute nothing" in shown


def test_a_scheme_is_checked_over_a_built_in_codec_and_the_document_tells_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, TWO, "two.py")
    assert main(["check", str(path), "--spec", "bare:bits=3", "--json"]) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["ok"] is False
    assert [(one["spec"], one["kind"], one["ok"]) for one in document["checked"]] == [
        ("last(int8)", "scheme", True),
        ("bare:bits=3", "codec", False),
    ]
    failed = [r for r in document["checked"][1]["requirements"] if r["status"] == "failed"]
    assert [one["requirement"] for one in failed] == ["scales"]
    assert failed[0]["given"] == "float32 (2, 64) times 2^18"
    assert failed[0].keys() == {"requirement", "expected", "status", "given", "found", "note"}
    assert captured.err.splitlines()[-1] == "thinwire: error: bare:bits=3 fails scales"
