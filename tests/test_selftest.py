"""``thinwire selftest``: agreement is exit code 0; anything else is 1 and a line that says what."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from thinwire import selftest
from thinwire.cli import main
from thinwire.native import library


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One codec and one scheme, since what is printed does not depend on how many there are."""
    monkeypatch.setattr(selftest, "CODECS", {"int4": selftest.CODECS["int4"]})
    monkeypatch.setattr(selftest, "SCHEMES", {"delta(int4)": selftest.SCHEMES["delta(int4)"]})


def test_every_level_here_agrees_with_the_recorded_hashes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["selftest"]) == 0
    shown = capsys.readouterr()
    lines = [line for line in shown.out.splitlines() if " not " not in line]
    assert [line.split()[0] for line in lines] == selftest.levels()
    assert all(line.endswith("  ok") for line in lines)
    assert shown.err == ""


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("hashes", "kind", "spec"),
    [("CODECS", "codec", "int4"), ("SCHEMES", "scheme", "delta(int4)")],
)
def test_another_hash_is_exit_code_1_and_one_line(
    hashes: str,
    kind: str,
    spec: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = getattr(selftest, hashes)[spec]
    monkeypatch.setitem(getattr(selftest, hashes), spec, "0123456789abcdef")
    assert main(["selftest"]) == 1
    shown = capsys.readouterr()
    [line] = shown.err.splitlines()
    assert f"{kind} {spec} at level {selftest.levels()[0]} gives {good}, not 0123456789ab" in line
    assert "report this, and do not train this machine together with others" in line
    assert "1 WRONG" in shown.out


@pytest.mark.usefixtures("few")
def test_a_codec_that_fails_is_reported_like_a_wrong_hash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> str:
        raise ValueError("the payload holds\nan invalid scale")

    monkeypatch.setattr(selftest, "codec_digest", fail)
    assert main(["selftest"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "gives ValueError: the payload holds an invalid scale, not" in line


@pytest.mark.usefixtures("few")
def test_json_is_one_document_with_every_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    found = [(r["level"], r["spec"], r["ok"]) for r in document["results"]]
    specs = ["int4", "delta(int4)"]
    assert found == [(level, spec, True) for level in selftest.levels() for spec in specs]


@pytest.mark.usefixtures("few")
def test_without_kernels_the_eager_twin_is_tested_and_the_reason_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "why_missing", lambda: "not built")
    monkeypatch.setattr(library, "levels", list)
    assert main(["selftest"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "kernels    not here: not built"
    assert any(line.startswith("eager ") for line in shown)


@pytest.mark.usefixtures("few")
def test_what_keeps_triton_from_being_tested_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["selftest"]) == 0
    assert "triton     not tested: there is no CUDA device" in capsys.readouterr().out.splitlines()


def test_triton_gives_the_recorded_hashes_under_its_interpreter() -> None:
    pytest.importorskip("triton")
    code = (
        "from thinwire import selftest as s; s.levels = lambda: ['triton'];"
        "s.CODECS = {spec: s.CODECS[spec] for spec in ['int4', 'int8:symmetric']};"
        "s.SCHEMES = {spec: s.SCHEMES[spec] for spec in ['delta(int4)']};"
        "raise SystemExit(s.run([]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == "triton       2 codecs, 1 schemes  ok\n"
    assert done.returncode == 0


def test_a_wrong_option_is_exit_code_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--jsno"]) == 2
    assert capsys.readouterr().err == "thinwire: error: unrecognized arguments: --jsno\n"
