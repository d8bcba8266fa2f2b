"""A folder of pictures for each class."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.train.config import ConfigError
from thinwire.train.vision import files

Image: Any = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def picture(path: Path, size: tuple[int, int] = (4, 3), mode: str = "RGB", **more: Any) -> None:
    """A picture ``size`` wide and high whose values count up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = size[0] * size[1] * {"L": 1, "I;16": 2, "RGB": 3}[mode]
    Image.frombytes(mode, size, bytes(i % 251 for i in range(count))).save(path, **more)


def test_classes_are_folders_in_the_order_of_their_names(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "b.png")
    picture(tmp_path / "cat" / "a.PNG", mode="L")
    picture(tmp_path / "ant" / "deeper" / "c.png")
    (tmp_path / "ant" / "notes.txt").touch()
    (tmp_path / "ant" / ".hidden.png").touch()
    (tmp_path / ".git").mkdir()
    found = files.load(str(tmp_path), None)
    assert (found.classes, found.test) == (2, None)
    assert found.train.labels.tolist() == [0, 1, 1]
    assert found.train.pixels.shape == (3, 3, 3, 4)
    assert found.train.pixels[0, :, 0, 1].tolist() == [3, 4, 5]  # colours of the second pixel
    assert found.train.pixels[1, :, 0, 1].tolist() == [1, 1, 1]  # a gray one among others
    assert found.skipped == {"no PNG or JPEG": 1, "hidden": 1}


def test_gray_pictures_have_one_channel_and_a_test_part_its_own_folder(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("a", "b"):
            picture(tmp_path / part / name / "x.png", mode="L")
    found = files.load(str(tmp_path), None)
    assert found.train.pixels.shape == (2, 1, 3, 4)
    assert found.test is not None
    assert found.test.labels.tolist() == [0, 1]


def test_a_part_besides_is_refused_and_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "val/a"):
        picture(tmp_path / "split" / name / "x.png")
    with pytest.raises(ConfigError, match="has val beside train; only train and test are read"):
        files.load(str(tmp_path / "split"), None)
    for name in ("bus", "train", "val"):
        picture(tmp_path / "vehicles" / name / "x.png")
    assert files.load(str(tmp_path / "vehicles"), None).classes == 3


def test_pictures_of_many_sizes_get_one_if_it_is_given(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "x.png", (8, 4))
    picture(tmp_path / "b" / "x.jpg", (5, 9))
    with pytest.raises(ConfigError, match=r"x\.jpg is 9×5, others are 4×8; set --data\.size"):
        files.load(str(tmp_path), None)
    found = files.load(str(tmp_path), 4)
    assert found.train.pixels.shape == (2, 3, 4, 4)
    whole = torch.tensor(list(Image.open(tmp_path / "a" / "x.png").tobytes())).view(4, 8, 3)
    assert torch.equal(found.train.pixels[0].long(), whole[:, 2:6].permute(2, 0, 1))  # the middle


def test_a_picture_lies_as_its_camera_says(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x112] = 6
    picture(tmp_path / "a" / "x.png", (3, 4))
    picture(tmp_path / "b" / "x.png", (4, 3), exif=turned)
    assert files.load(str(tmp_path), None).train.pixels.shape == (2, 3, 4, 3)


def cut(folder: Path) -> None:
    picture(path := folder / "b" / "y.png", (40, 30))
    path.write_bytes(path.read_bytes()[:-80])


def claiming(folder: Path) -> None:
    picture(path := folder / "b" / "y.png")
    content = bytearray(path.read_bytes())
    content[16:24] = (1 << 20).to_bytes(4, "big") * 2  # its width and height
    path.write_bytes(content)


FAULTS: dict[str, tuple[Any, str]] = {
    "cut": (cut, r"y\.png is damaged: "),
    "no picture": (lambda folder: (folder / "b" / "y.png").write_text("x"), r"y\.png is damaged: "),
    "claims much": (claiming, r"y\.png (is damaged|claims more than 67,108,864 pixels)"),
    "16 bits": (lambda folder: picture(folder / "b" / "y.png", (2, 6), "I;16"), "more than 8 bits"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_picture_that_cannot_be_read_is_one_line(case: str, tmp_path: Path) -> None:
    spoil, message = FAULTS[case]
    for name in ("a", "b"):
        picture(tmp_path / name / "x.png", (40, 30))
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        files.load(str(tmp_path), None)
    assert "\n" not in str(caught.value)


def test_whatever_pillow_raises_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(tmp_path / "a" / "x.png")
    picture(tmp_path / "b" / "x.png")

    def junk(image: Any) -> Any:
        raise struct.error("required argument is not an integer")

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", junk)
    with pytest.raises(ConfigError, match=r"x\.png is damaged: required argument is not an int"):
        files.load(str(tmp_path), None)


def test_folders_without_classes_or_pictures_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no images in"):
        files.load(str(tmp_path), None)
    with pytest.raises(ConfigError, match=r"can't read .*nowhere: No such file"):
        files.load(str(tmp_path / "nowhere"), None)
    picture(tmp_path / "a" / "x.png")
    with pytest.raises(ConfigError, match="has 1 folders of images"):
        files.load(str(tmp_path), None)
    with pytest.raises(ConfigError, match="is a file; unpack it"):
        files.load(str(tmp_path / "a" / "x.png"), None)
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match="b has no PNG or JPEG"):
        files.load(str(tmp_path), None)
    for name in ("train/a", "train/b"):
        picture(tmp_path / "split" / name / "x.png")
    (tmp_path / "split" / "test").mkdir()
    with pytest.raises(ConfigError, match="test has no PNG or JPEG"):
        files.load(str(tmp_path / "split"), None)


def test_a_class_that_is_only_tested_on_is_refused(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "test/a", "test/c"):
        picture(tmp_path / name / "x.png")
    with pytest.raises(ConfigError, match="c is a class that is not trained on"):
        files.load(str(tmp_path), None)


def test_without_pillow_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(tmp_path / "a" / "x.png")
    for name in ("PIL", "PIL.Image", "PIL.ImageOps"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="needs Pillow, which is not installed; pip install"):
        files.load(str(tmp_path), None)
