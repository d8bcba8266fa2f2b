"""IDX files: read whole, or refused in one line."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.images import Bytes, idx_bytes, labelled, write_idx
from thinwire.train.config import ConfigError
from thinwire.train.vision import files, idx, parts
from thinwire.train.vision.parts import Found, Part


def loaded(folder: Path) -> Found:
    return files.load(str(folder), None)


def assert_is(part: Part | None, images: tuple[Bytes, Bytes]) -> None:
    assert part is not None
    assert np.array_equal(part.pixels[:, 0].numpy(), images[0])
    assert part.labels.tolist() == images[1].tolist()
    assert part.labels.dtype == torch.int64


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("test", ["t10k-", "test-", None])
def test_images_are_read_with_and_without_a_part_to_test_on(
    ending: str, test: str | None, tmp_path: Path
) -> None:
    train, tested = labelled(7), labelled(4, seed=1)
    write_idx(tmp_path, "train-" if test else "", *train, ending)
    if test:
        write_idx(tmp_path, test, *tested, ending)
    found = loaded(tmp_path)
    assert_is(found.train, train)
    assert found.classes == 3
    if test:
        assert_is(found.test, tested)
    else:
        assert found.test is None


def test_a_dot_before_idx_and_a_name_before_the_part_are_as_good(tmp_path: Path) -> None:
    for prefix in ("emnist-letters-train-", "emnist-letters-test-"):
        write_idx(tmp_path, prefix, *labelled(5))
    for path in [*tmp_path.iterdir()]:
        path.rename(tmp_path / path.name.replace("-idx", ".idx"))
    found = loaded(tmp_path)
    assert found.test is not None
    assert len(found.train.labels) == len(found.test.labels) == 5


PIXELS, LABELS = labelled(5)
GOOD = idx_bytes(PIXELS)
#: What the file of images to train on holds, and what is said of it.
DAMAGES = {
    "empty": (b"", "begins with nothing, not with 00 00 08 03"),
    "magic": (b"\x01" + GOOD[1:], "begins with 01 00 08 03, not with 00 00 08 03"),
    "type": (GOOD[:2] + b"\x0d" + GOOD[3:], "begins with 00 00 0d 03"),
    "labels": (idx_bytes(LABELS), "begins with 00 00 08 01, not with 00 00 08 03"),
    "head": (GOOD[:9], "ends within its header"),
    "cut": (GOOD[:-1], "is cut off: its header says (5, 8, 8)"),
    "longer": (GOOD + b"x", "goes on after the (5, 8, 8) of its header"),
    "nothing": (idx_bytes(PIXELS[:0]), "is empty: its header says (0, 8, 8)"),
    "huge": (GOOD[:4] + b"\xff" * 12, "is cut off: its header says (4294967295, "),
    "fewer": (idx_bytes(PIXELS[:4]), "has 4 images, but"),
}


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_what_it_should_be_is_one_line(
    damage: str, ending: str, tmp_path: Path
) -> None:
    content, message = DAMAGES[damage]
    write_idx(tmp_path, "train-", PIXELS, LABELS, ending)
    path = tmp_path / f"train-images-idx3-ubyte{ending}"
    path.write_bytes(gzip.compress(content) if ending else content)
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_gzip_is_one_line(tmp_path: Path) -> None:
    write_idx(tmp_path, "train-", *labelled(50), ".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    good = path.read_bytes()
    for bad in (b"no gzip", good[:-9], good[:60] + bytes(9) + good[69:], good[:-4] + bytes(4)):
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match=r"is damaged: |is cut off"):
            loaded(tmp_path)


def test_what_the_machine_cannot_hold_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_idx(tmp_path, "train-", *labelled(50), ".gz")
    monkeypatch.setattr(parts, "physical_memory", lambda: 3000)
    with pytest.raises(ConfigError, match="but this machine has"):
        loaded(tmp_path)


def test_a_bomb_is_read_no_further_than_its_header_says(tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(GOOD + bytes(1 << 24)))
    with pytest.raises(ConfigError, match="goes on after"):
        idx.read(path, 3)


NAMES = {
    "no labels": (["train-images-idx3-ubyte"], "but no labels beside it"),
    "no images": (["train-labels-idx1-ubyte"], "but no images beside it"),
    "only a test": (["t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"], "one file of images"),
    "two to train on": (
        [f"{a}-{b}-ubyte" for a in "ab" for b in ("images-idx3", "labels-idx1")],
        "has a-images-idx3-ubyte, b-images-idx3-ubyte; name a folder with one file",
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_files_that_are_missing_or_too_many_are_named(case: str, tmp_path: Path) -> None:
    names, message = NAMES[case]
    for name in names:
        (tmp_path / name).write_bytes(GOOD)
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path)


def test_a_test_part_of_other_classes_or_sizes_is_refused(tmp_path: Path) -> None:
    write_idx(tmp_path, "train-", *labelled(9, classes=2))
    write_idx(tmp_path, "t10k-", *labelled(9, classes=4))
    with pytest.raises(ConfigError, match="label 3 in its test part, but labels from 0 to 1"):
        loaded(tmp_path)
    write_idx(tmp_path, "t10k-", *labelled(9, size=9))
    with pytest.raises(ConfigError, match="trains on 8×8 and tests on 9×9"):
        loaded(tmp_path)


@given(at=st.integers(0, len(GOOD) + 2), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_whatever_a_file_holds_it_is_read_or_refused_in_one_line(
    at: int, value: int, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(GOOD + b"xx")
    content[at % len(content)] = value
    path = tmp_path_factory.getbasetemp() / "train-images-idx3-ubyte"
    path.write_bytes(content[: max(0, len(content) - cut)])
    try:
        values = idx.read(path, 3)
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017  either is right
    else:
        assert values.numel() == path.stat().st_size - 16
