"""``thinwire inspect``: what a run folder tells."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.distributed.runs import TINY, Ending, run, text_in
from thinwire.cli import main
from thinwire.codecs.keeping import KEEPINGS


def test_progress_checkpoints_references_and_traffic_are_shown(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), "--checkpoint.every=2"]
    folder = tmp_path / "run"
    pool.run(run, options, str(folder), ending=Ending(crash_after=7), world_size=2)
    shutil.copytree(folder / "rank-1" / "step-00000006", folder / "rank-1" / ".step-00000008")
    (folder / "rank-0" / "step-00000004" / "model.safetensors").unlink()

    assert main(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["complete"], found["step"], found["steps"]) == (False, 7, 9)
    assert found["plan"] == {"forward": "delta(int4)", "backward": "int8"}
    assert (found["stages"], found["processes"], found["resumable_step"]) == (2, 2, 6)
    states = {(one["rank"], one["step"]): one["state"] for one in found["checkpoints"]}
    assert states == {
        (0, 4): "damaged",
        (0, 6): "complete",
        (1, 4): "complete",
        (1, 6): "complete",
        (1, None): "partial",
    }
    sender, receiver = found["references"]
    assert (sender["role"], receiver["role"]) == ("sender", "receiver")
    assert sender["keys"] == receiver["keys"] > 0
    sample = KEEPINGS["int8"].nbytes(16 * 16)  # context × dim; the last one is shorter
    assert (sender["keys"] - 1) * sample < sender["bytes"] <= sender["keys"] * sample
    assert sender["precision"] == "int8"
    assert 0 < sender["hits"] == receiver["hits"] == found["links"][0]["hit_rate"] < 1
    rows = [sum(f.stat().st_size for f in folder.glob(f"rank-{r}/references/*")) for r in range(2)]
    assert [one["bytes"] for one in found["reference_files"]] == rows
    assert min(rows) > sender["bytes"]
    assert [link["messages"] for link in found["links"]] == [6 * 4, 6 * 4]
    assert found["versions"].keys() == {"torch", "python", "thinwire"}

    assert main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "step 7 of 9, not complete",
        "model.safetensors is missing",
        "forward 0→1",
        "references on disk",
    ):
        assert part in shown
    assert f"goes on after step 6 with: thinwire train --resume {folder}" in shown


@pytest.mark.parametrize("words", [["nowhere"], ["."], ["file"], [], [".", "--jsn"]])
def test_what_is_no_run_is_one_line_and_exit_code_2(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["inspect", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("thinwire: error: ")
    assert captured.err.count("\n") == 1
