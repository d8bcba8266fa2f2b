"""The command ``thinwire bench``: what it refuses, and what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.bench.arguments import read_options
from thinwire.cli import main

MISTAKES = {
    "nothing to measure": ([], "write thinwire bench codecs"),
    "another thing": (["codec"], "can't measure 'codec'"),
    "an unknown option": (["codecs", "--qiuck"], "did you mean '--quick'?"),
    "a stray word": (["codecs", "int4"], "codecs are named by --codecs"),
    "no size": (["codecs", "--sizes", "large"], "'large' is no number of values"),
    "an empty size": (["codecs", "--sizes", "4M,"], "'' is no number of values"),
    "no whole rows": (["codecs", "--sizes", "1000"], "multiple of 1024"),
    "a size of zero": (["codecs", "--sizes", "0"], "multiple of 1024"),
    "a vast size": (["codecs", "--sizes", "999G"], "to below 2G"),
    "more than the memory": (["codecs", "--sizes", "2047M"], "name smaller sizes"),
    "an unknown codec": (["codecs", "--codecs", "int4,itn8"], "unknown codec or scheme 'itn8'"),
    "a wrong option of a codec": (["codecs", "--codecs", "int4:gruop=64"], "did you mean 'group'?"),
    "a scheme": (["codecs", "--codecs", "delta(int4)"], "is a scheme"),
    "an unknown operation": (["codecs", "--ops", "encode,dekode"], "did you mean 'decode'?"),
    "no change of topk": (["codecs", "--codecs", "topk:0.1", "--ops", "delta_encode"], "nothing"),
    "no rounds": (["codecs", "--rounds", "0"], "--rounds: '0' is not a whole number"),
    "no threads": (["codecs", "--threads", "two"], "--threads: 'two' is not a whole number"),
    "an unknown level": (["codecs", "--level", "v9"], "--level: no 'v9' here"),
    "a folder as file": (["codecs", "--out", "."], "is no file"),
    "a file in no folder": (["codecs", "--out", "nowhere/b.json"], "can't write nowhere/b.json"),
    "a long name": (["codecs", "--out", "x" * 5000], "--out"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    mistake: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("thinwire.bench.timing.keep_heap", lambda: False)  # it would last
    monkeypatch.setattr("thinwire.bench.run.physical_memory", lambda: 1 << 34)
    words, message = MISTAKES[mistake]
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("thinwire: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_command_is_compared_to_bench_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bnech"]) == 2
    assert "did you mean 'bench'?" in capsys.readouterr().err


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "codecs", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--quick", "--sizes", "--codecs", "--rounds", "--threads", "--json", "--out"):
        assert option in shown


def test_quick_can_be_overridden_by_sizes() -> None:
    assert read_options(["--quick"]).sizes == (1 << 22,)
    assert read_options(["--quick", "--sizes", "64k,1M,64K"]).sizes == (1 << 16, 1 << 20)


def test_json_is_all_of_stdout_and_the_same_in_the_file(tmp_path: Path) -> None:
    words = ["--sizes", "8K", "--rounds", "1", "--codecs", "int4:group=64,symmetric,topk:0.1"]
    result = subprocess.run(
        [sys.executable, "-m", "thinwire", "bench", "codecs", *words, "--json", "--out", "b.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert json.loads((tmp_path / "b.json").read_text()) == document
    codecs = {row["codec"] for row in document["rows"]}
    assert codecs == {"int4:group=64,symmetric", "topk:0.1"}
    assert "8K values: round 1 of 1" in result.stderr
    assert "x copy" in result.stderr
