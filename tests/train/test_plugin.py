"""A codec of one's own in a run: recorded with it, and loaded by each of its processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tests.distributed.runs import TEXT, TINY
from tests.test_plugins import SIGN, written
from tests.train.test_launch import run, summary_of
from thinwire import plugins
from thinwire.cli import main
from thinwire.train import check, data, spelling, worker
from thinwire.train import config as configuration
from thinwire.train.arguments import read_arguments, read_train
from thinwire.train.asked import read_eval, read_recalibrate
from thinwire.train.config import ConfigError
from thinwire.train.inspection import describe
from thinwire.train.spelling import to_toml


@pytest.mark.timeout(100)
def test_a_run_with_a_codec_of_ones_own_goes_on_from_where_its_file_is_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT * 2)
    written(tmp_path, SIGN, "sign.py")
    words = [*TINY, "--data.path", "text.txt", "--forward", "delta(sign)", "--backward", "sign"]
    run(*words, "--steps", "4", "--plugin", "sign.py", "--out", "run", cwd=tmp_path)
    found = tomllib.loads(Path("run/config.toml").read_text())
    assert found["plugin"] == [str(tmp_path / "sign.py")]
    links = summary_of(tmp_path / "run")["links"]
    assert [link["codec"] for link in links] == ["delta(sign)", "sign"]
    assert links[1]["payload_bytes"] < links[1]["raw_bytes"] / 20

    Path("moved").mkdir()
    shutil.move("sign.py", "moved/it.py")
    assert main(["train", "--resume", "run", "--steps", "6"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("thinwire: error: --resume run: its plugin ")
    assert line.endswith("sign.py is not there; name where it is with --plugin")
    assert describe(Path("run"))["resumable_step"] == 4  # what is shown needs no plugin

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["--resume", "run", "--steps", "6", "--plugin", "moved/it.py"]
    subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "-m", "thinwire", "train", *words],
        capture_output=True,
        timeout=100,
        check=True,
    )
    assert summary_of(tmp_path / "run")["steps"] == 6
    found = tomllib.loads(Path("run/config.toml").read_text())
    assert found["plugin"] == [str(tmp_path / "moved" / "it.py")]


def test_files_are_given_one_by_one_and_written_as_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read = read_arguments(["--plugin", "a.py", "--plugin=b c.py", "--quick"])
    assert read.plugin == ("a.py", "b c.py")
    resolved = check.resolved(read)
    assert resolved.plugin == (str(tmp_path / "a.py"), str(tmp_path / "b c.py"))
    (tmp_path / "run.toml").write_text(spelling.to_toml(resolved))
    assert read_arguments(["run.toml"]) == resolved
    assert read_arguments(["run.toml", "--plugin", "d.py"]).plugin == ("d.py",)
    assert read_arguments([]).plugin == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('plugin = "a.py"', "plugin = 'a.py' is not a list of texts"),
        ("plugin = [1]", r"plugin = \[1\] is not a list of texts"),
        ('[train]\nplugin = ["a.py"]', "unknown setting 'train.plugin'"),
    ],
)
def test_a_file_of_settings_with_something_else_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_arguments([str(tmp_path / "run.toml")])


def test_ranks_whose_files_differ_refuse_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(written(tmp_path, SIGN))
    config = configuration.build({"nproc": 2, "plugin": (file,)})
    text = data.Text(b"", b"", sha256="00" * 32, source="a text")

    def gather(every: list[torch.Tensor], own: torch.Tensor) -> None:
        every[0].copy_(own)
        Path(file).write_text(SIGN + "\n")
        there = plugins.digest([file])
        every[1].copy_(own)
        every[1][-1] = torch.frombuffer(bytearray(there), dtype=torch.uint8)

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather", gather)
    with pytest.raises(ConfigError, match="rank 1 has other plugins than rank 0"):
        worker._agree(config, text)


def test_where_the_file_is_says_nothing_of_what_was_trained(tmp_path: Path) -> None:
    made = configuration.build({"nproc": 2, "plugin": ("/elsewhere/own.py",)})
    (tmp_path / "config.toml").write_text(spelling.to_toml(made))
    given = ["--resume", str(tmp_path), "--plugin", "here.py"]
    assert read_train(given)[0].plugin == ("here.py",)
    with pytest.raises(ConfigError, match=r"plugin /elsewhere/own\.py is not there"):
        read_train(given[:2])


def test_a_run_is_evaluated_with_its_own_plugins_and_those_that_are_given(tmp_path: Path) -> None:
    there, gone = written(tmp_path, SIGN), "/elsewhere/own.py"
    made = configuration.build({"nproc": 2, "plugin": (str(there), gone)})
    (tmp_path / "config.toml").write_text(to_toml(made))
    with pytest.raises(ConfigError, match=r"plugin /elsewhere/own\.py is not there; name where"):
        read_eval([str(tmp_path)])
    words = ["--plugin", "moved.py", "--codec", "sign"]
    assert read_eval([str(tmp_path), *words])[0].plugin == (str(there), "moved.py")
    words = ["--plugin", f"elsewhere/{there.name}"]
    assert read_recalibrate([str(tmp_path), *words])[0].plugin == (words[1],)
