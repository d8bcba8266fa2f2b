"""The command as a user calls it, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinwire.cli import main


def thinwire(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "thinwire", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_help_lists_every_section_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    for part in ("--nproc", "--link.rate", "--forward", "--pipeline.schedule", "torchrun"):
        assert part in shown


def test_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("thinwire ")


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "thinwire train" in capsys.readouterr().out


MISTAKES = {
    "a wrong command": (["trian"], "unknown command 'trian'; did you mean 'train'?"),
    "a wrong option": (["--versoin"], "unknown option '--versoin'"),
    "two dashes alone": (["--"], "unknown option '--'"),
    "a wrong codec": (["train", "--forward", "delta(itn4)"], "did you mean 'int4'"),
    "a bad rate": (["train", "--link.rate", "fast"], "link.rate"),
    "a missing text": (["train", "--data.path", "nowhere.txt"], "can't read nowhere.txt"),
    "too many stages": (["train", "--nproc", "9"], "9 stages but model.layers is 4"),
    "a rate without unit": (["train", "--link.rate", "30"], "write 30mbit"),
    "a codec of the gradients": (["train", "--backward", "int99"], "--backward: "),
    "a long folder": (["train", "--out", "x" * 5000], "too long"),
    "an empty path": (["train", "--data.path", ""], "--data.path is empty"),
    "a full folder": (["train", "--out", "full"], "not empty"),
    "resuming nothing": (["train", "--resume", "full"], "full is no run folder"),
    "resuming without a name": (["train", "--resume"], "expected one argument"),
    "resuming a file of settings": (
        ["train", "run.toml", "--resume", "full"],
        "leave run.toml out",
    ),
    "no interval": (["train", "--checkpoint.every", "0"], "checkpoint.every is 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    mistake: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    arguments, message = MISTAKES[mistake]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("thinwire: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert [p.name for p in tmp_path.iterdir()] == ["full"]  # no run folder was begun


def test_a_mistake_ends_the_process_with_exit_code_2_and_no_traceback(tmp_path: Path) -> None:
    result = thinwire("train", "--forward", "nonsense", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("thinwire: error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["selftest", "--json"], ["selftest"]])
def test_a_command_whose_output_nobody_reads_ends_without_traceback(
    words: list[str], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "thinwire", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (141, "")


@pytest.mark.parametrize("delay", [0.2, 0.8])
def test_an_interrupt_while_starting_is_exit_code_130_without_traceback(
    delay: float, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "thinwire", "train", "--quick"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "thinwire: stopped\n"
