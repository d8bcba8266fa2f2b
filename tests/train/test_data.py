"""Text, its split, and the batches that come of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.train import data
from thinwire.train.batches import IGNORED
from thinwire.train.config import ConfigError, DataConfig


def test_the_embedded_text_splits_by_topic_and_always_the_same_way() -> None:
    one, two = data.load(DataConfig(), 128), data.load(DataConfig(), 128)
    assert one == two
    assert len(one.sha256) == 64
    assert 0.02 < len(one.validation) / (len(one.train) + len(one.validation)) <= 0.05
    assert one.source == "pydoc_data.topics"


def test_no_paragraph_of_the_validation_text_is_in_the_training_text() -> None:
    text = data.load(DataConfig(), 128)
    held = {p.strip() for p in text.validation.split(b"\n\n")}
    trained = {p.strip() for p in text.train.split(b"\n\n")}
    assert [p for p in held & trained if len(p) >= 80] == []


def test_another_seed_keeps_other_topics() -> None:
    assert data.load(DataConfig(seed=1), 128).sha256 != data.load(DataConfig(), 128).sha256


@given(length=st.integers(2, 300), context=st.integers(1, 64))
def test_chunks_cover_each_byte_once_and_never_overlap(length: int, context: int) -> None:
    text = bytes(i % 251 for i in range(length))
    samples = data.Samples(text, context)
    batch = samples.batch(torch.arange(len(samples)))
    valid = batch.target != IGNORED
    assert batch.inputs[valid].tolist() == list(text[:-1])
    assert batch.target[valid].tolist() == list(text[1:])
    assert batch.lengths is not None
    assert batch.lengths.tolist() == valid.sum(1).tolist()
    assert batch.lengths.min() >= 1


def test_a_sample_is_the_same_in_every_batch() -> None:
    samples = data.Samples(bytes(range(200)), 16)
    together = samples.batch(torch.tensor([3, 7]))
    alone = samples.batch(torch.tensor([7]))
    assert torch.equal(together.inputs[1:], alone.inputs)
    assert torch.equal(together.target[1:], alone.target)


def test_rows_that_fill_a_batch_count_nothing_and_have_ids_of_their_own() -> None:
    samples = data.Samples(bytes(range(100)), 8)
    batch = samples.batch(torch.tensor([3, 12]))
    filled = samples.filled(batch, 5)
    assert filled.inputs.shape == filled.target.shape == (5, 8)
    assert torch.equal(filled.target[:2], batch.target)
    assert (filled.target[2:] == IGNORED).all()
    assert filled.lengths is None
    assert filled.sample_ids.tolist() == [3, 12, *range(len(samples), len(samples) + 3)]


def test_a_single_file_is_cut_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(65, 91)) * 100)
    text = data.load(DataConfig(path=str(file), validation=0.1), 16)
    assert text.train + text.validation == file.read_bytes()
    assert len(text.validation) == 260


def test_a_folder_is_read_in_order_without_what_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b.txt").write_text("b" * 300)
    (tmp_path / "sub" / "a.txt").write_text("a" * 300)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    (tmp_path / ".hidden" / "c.txt").write_text("c" * 300)
    text = data.load(DataConfig(path=str(tmp_path), validation=0.1), 8)
    assert text.train + text.validation == b"b" * 300 + b"\n\n" + b"a" * 300


def test_files_that_are_left_out_are_counted_by_the_reason(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("b" * 600)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "blob").write_bytes(b"a\0")
    (tmp_path / "nothing.txt").touch()
    (tmp_path / ".hidden").write_text("c" * 300)
    assert data.load(DataConfig(path=str(tmp_path), validation=0.1), 8).skipped == {
        "not UTF-8 text": 1,
        "binary, not text": 1,
        "empty": 1,
        "hidden": 1,
    }


def test_many_files_are_kept_whole(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(chr(65 + number) * 100)
    text = data.load(DataConfig(path=str(tmp_path), validation=0.1), 16)
    assert not set(text.train) & set(text.validation) - set(b"\n")


def test_many_files_of_which_one_is_nearly_all_are_cut_at_the_end(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number:02}.txt").write_text("small")
    (tmp_path / "large.txt").write_text("large" * 1000)
    text = data.load(DataConfig(path=str(tmp_path), validation=0.1), 16)
    assert len(text.validation) == pytest.approx(0.1 * 5100, abs=10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xff\xfe12345", "is not UTF-8 text"),
        (b"abc\0def", "is binary"),
        (b"short", "fewer than the 129 of one sample"),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_one_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        data.load(DataConfig(path=str(file)), 128)


def test_a_missing_path_and_a_folder_without_text_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read .*No such file"):
        data.load(DataConfig(path=str(tmp_path / "nowhere")), 128)
    (tmp_path / "blob").write_bytes(b"\0" * 500)
    with pytest.raises(ConfigError, match="no UTF-8 text among the 1 files"):
        data.load(DataConfig(path=str(tmp_path)), 128)
