"""A manifest whose digest is right is still not trusted."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from tests.distributed.pool import Pool, WorkerError
from tests.distributed.runs import TINY, Ending, loaded, run, text_in
from thinwire.train import disk
from thinwire.train.config import ConfigError
from thinwire.train.home import read
from thinwire.train.manifest import fault
from thinwire.train.metrics import read_metrics


@pytest.fixture
def folder(pool: Pool, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    options = [*TINY, "--data.path", text_in(tmp_path), "--checkpoint.every=2"]
    options += ["--link.transport=memory", "--pipeline.stages=2"]
    pool.run(run, options, str(tmp_path / "run"), ending=Ending(crash_after=5), world_size=1)
    return tmp_path / "run"


def forge(part: Path, manifest: dict[str, Any]) -> None:
    """Write ``manifest`` with digests that are right."""
    for name, file in manifest["files"].items():
        data = (part / name).read_bytes()
        file |= {"bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}
    digest = xxhash.xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode())
    (part / disk.MANIFEST).write_text(json.dumps({"xxh3": digest, "manifest": manifest}))


def places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value, however deep."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def test_no_value_of_another_type_passes(folder: Path) -> None:
    manifest = disk.read(folder / "rank-0" / "step-00000004").manifest
    assert fault(manifest) is None
    wrong: Any
    for *path, last in places(manifest):
        if "plan" in path or last in ("format", "plan"):  # not read
            continue
        for wrong in (0.5 if last == "broken" else None, {"odd": object}, [[]]):
            changed = copy.deepcopy(manifest)
            inner: Any = changed
            for key in path:
                inner = inner[key]
            inner[last] = wrong
            assert fault(changed) is not None, (*path, last, wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", 10**30),
        ("step", -1),
        ("step", 5),
        ("world_size", 10**9),
        ("world_size", 0),
        ("rank", 1),
        ("files", {"../../x": {"bytes": 1, "xxh3": "0"}}),
        ("stages", None),
    ],
)
def test_a_forged_manifest_is_skipped_in_one_line(
    name: str, value: Any, folder: Path, pool: Pool
) -> None:
    part = folder / "rank-0" / "step-00000004"
    manifest = disk.read(part).manifest
    if name == "files":
        (folder / "x").write_bytes(b"x")
    forge(part, {**manifest, name: value})
    ((_, shown),) = pool.run(loaded, [], str(folder), world_size=1)
    assert "resume: rank-0/step-00000004: manifest.json is" in shown
    assert "goes on after step 2" in shown


FORGED: dict[str, Callable[[Path], object]] = {
    "shape": lambda file: save_file({n: t.flatten()[:1] for n, t in load_file(file).items()}, file),
    "dtype": lambda file: save_file(
        {n: t.to(torch.int8) for n, t in load_file(file).items()}, file
    ),
    "names": lambda file: save_file({f"x{n}": t for n, t in load_file(file).items()}, file),
    "no tensors": lambda file: file.write_bytes(b"7" * 99),
}


@pytest.mark.parametrize("name", ["model", "optimizer", "progress"])
@pytest.mark.parametrize("how", FORGED)
def test_forged_tensors_are_one_error_that_names_the_part(
    how: str, name: str, folder: Path, pool: Pool
) -> None:
    part = folder / "rank-0" / "step-00000004"
    manifest = disk.read(part).manifest
    FORGED[how](part / f"{name}.safetensors")
    forge(part, manifest)
    if (name, how) == ("optimizer", "names"):
        return  # no state of these parameters: the optimizer begins anew
    with pytest.raises(WorkerError, match="step-00000004 is not a part of this run"):
        pool.run(loaded, [], str(folder), world_size=1)


def test_only_a_damaged_line_of_the_metrics_is_lost(tmp_path: Path) -> None:
    lines = ['{"step": 1}', '{"step": "2"}', "[" * 100_000, "\xff", "5", '{"step": 3}', '{"st']
    lines.insert(2, '{"step": 2, "checkpoint": {"bytes": "x"}}')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="latin-1")
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 3]


@pytest.mark.parametrize(
    "text", ["", "5", "[" * 100_000, '{"run": 5}', '{"run": "x", "parts": [5]}', "\0"]
)
def test_a_damaged_run_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        read(tmp_path)


def test_what_lies_in_the_place_of_a_part_is_no_obstacle(tmp_path: Path) -> None:
    elsewhere, own = tmp_path / "elsewhere", tmp_path / "rank-0"
    elsewhere.mkdir()
    own.mkdir()
    (own / "step-00000003").symlink_to(elsewhere)
    (own / "step-00000004").write_text("")
    (own / ".step-00000003").write_text("")
    (own / ".step-00000004").symlink_to(elsewhere)
    (own / ".step-00000004.deleted").symlink_to(tmp_path / "nowhere")
    for step in (3, 4):
        disk.write(own, step, lambda folder: {})
    assert elsewhere.is_dir()
    assert sorted(path.name for path in own.iterdir()) == ["step-00000003", "step-00000004"]
    (own / "step-00000003" / disk.MANIFEST).unlink()
    os.mkfifo(own / "step-00000003" / disk.MANIFEST)
    with pytest.raises(disk.DamagedError, match="is no file"):
        disk.read(own / "step-00000003")
