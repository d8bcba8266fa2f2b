"""CIFAR's binary version, and the pickled one that is never loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.images import cifar_bytes
from thinwire.train.config import ConfigError
from thinwire.train.vision import files
from thinwire.train.vision.parts import Found


def loaded(folder: Path) -> Found:
    return files.load(str(folder), None)


def test_batches_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in range(1, 12):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(cifar_bytes([number % 10]))
    (tmp_path / "test_batch.bin").write_bytes(cifar_bytes([9, 0]))
    found = loaded(tmp_path)
    assert found.train.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert found.train.pixels.shape == (11, 3, 32, 32)
    assert found.test is not None
    assert found.test.labels.tolist() == [9, 0]
    assert found.classes == 10


def test_the_hundred_classes_are_the_fine_ones(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(content := cifar_bytes([99, 3], label_bytes=2))
    found = loaded(tmp_path)
    assert found.train.labels.tolist() == [99, 3]
    assert found.classes == 100
    assert found.test is None
    red_row = torch.tensor(list(content[2:34]), dtype=torch.uint8)
    assert torch.equal(found.train.pixels[0, 0, 0], red_row)


FAULTS = {
    "cut": ({"data_batch_1.bin": cifar_bytes([1])[:-1]}, "has 3,072 bytes, not a multiple of the"),
    "empty": ({"data_batch_1.bin": b""}, "has 0 bytes"),
    "fine": ({"train.bin": cifar_bytes([1])}, "has 3,073 bytes, not a multiple of the 3,074"),
    "label": (
        {"data_batch_1.bin": cifar_bytes([1, 10])},
        "has label 10 at image 1; there are 10 classes, from 0",
    ),
    "fine label": ({"train.bin": cifar_bytes([100], label_bytes=2)}, "has label 100 at image 0"),
    "missing": ({"data_batch_2.bin": cifar_bytes([1])}, "has no data_batch_1.bin"),
    "test": (
        {"data_batch_1.bin": cifar_bytes([1]), "test_batch.bin": b"x"},
        "test_batch.bin has 1 bytes",
    ),
    "pickled": ({"data_batch_1": b"\x80", "batches.meta": b"\x80"}, "pickled and could run any"),
    "pickled fine": ({"train": b"\x80", "test": b"\x80", "meta": b"\x80"}, "take the binary"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_is_damaged_missing_or_pickled_is_one_line(case: str, tmp_path: Path) -> None:
    contents, message = FAULTS[case]
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_size_is_for_folders_of_pictures_only(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(cifar_bytes([1], label_bytes=2))
    with pytest.raises(ConfigError, match=r"--data\.size 16 is for folders of PNG and JPEG"):
        files.load(str(tmp_path), 16)
