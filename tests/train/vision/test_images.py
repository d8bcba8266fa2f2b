"""Images as samples: their split, their scale, and the keys of their variants."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.images import idx_in, labelled, write_idx
from thinwire.train.batches import IGNORED
from thinwire.train.config import ConfigError, DataConfig
from thinwire.train.vision import images
from thinwire.train.vision.images import Augmentation, Images, Samples


def loaded(folder: Path, **more: object) -> Images:
    return images.load(DataConfig(path=idx_in(folder), **more))  # type: ignore[arg-type]


def trained_on(data: Images, augmentation: Augmentation | None = None) -> Samples:
    return Samples(data.train, data.training, data.scale, augmentation)


def test_validation_is_split_off_by_the_seed_and_the_test_part_stays_whole(tmp_path: Path) -> None:
    data = loaded(tmp_path, validation=0.2)
    assert len(data.validation) == 10
    assert sorted([*data.training.tolist(), *data.validation.tolist()]) == list(range(50))
    again, other = loaded(tmp_path, validation=0.2), loaded(tmp_path, validation=0.2, seed=1)
    assert again.sha256 == data.sha256 != other.sha256
    assert torch.equal(again.validation, data.validation)
    assert not torch.equal(other.validation, data.validation)
    assert data.test is not None
    assert len(data.test.labels) == 8
    assert data.facts["test_images"] == 8


def test_images_are_scaled_by_those_that_are_trained_on(tmp_path: Path) -> None:
    data = loaded(tmp_path, validation=0.2)
    raw = data.train.pixels[data.training].double() / 255
    assert data.scale.mean == pytest.approx([float(raw.mean())])
    assert data.scale.std == pytest.approx([float(raw.std(correction=0))])
    samples = trained_on(data)
    batch = samples.batch(torch.arange(len(samples)))
    assert batch.inputs.dtype == torch.float32
    assert batch.inputs.shape == (40, 1, 8, 8)
    assert float(batch.inputs.mean()) == pytest.approx(0, abs=1e-5)
    assert float(batch.inputs.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert torch.equal(batch.target, data.train.labels[data.training])
    assert batch.lengths is None


def test_images_that_are_all_alike_are_no_division_by_zero(tmp_path: Path) -> None:
    pixels, labels = labelled(6)
    write_idx(tmp_path / "flat", "train-", pixels * 0 + 7, labels)
    data = images.load(DataConfig(path=str(tmp_path / "flat")))
    assert trained_on(data).batch(torch.arange(3)).inputs.eq(0).all()


def test_one_changed_pixel_or_label_makes_other_data(tmp_path: Path) -> None:
    before = loaded(tmp_path).sha256
    for name, at in (("train-images-idx3", -1), ("t10k-images-idx3", 20), ("t10k-labels-idx1", -2)):
        path = tmp_path / "images" / f"{name}-ubyte"
        content = bytearray(good := path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
        assert images.load(DataConfig(path=str(tmp_path / "images"))).sha256 != before
        path.write_bytes(good)


def test_one_image_or_one_class_is_refused(tmp_path: Path) -> None:
    write_idx(tmp_path, "train-", *labelled(3, classes=1))
    with pytest.raises(ConfigError, match="has one class only"):
        images.load(DataConfig(path=str(tmp_path)))
    pixels, labels = labelled(1)
    write_idx(tmp_path, "train-", pixels, labels + 1)
    with pytest.raises(ConfigError, match="none would be left for validation"):
        images.load(DataConfig(path=str(tmp_path)))


def test_variants_recur_with_their_keys(tmp_path: Path) -> None:
    data = loaded(tmp_path)
    numbers = torch.tensor([5, 2])
    samples = trained_on(data, Augmentation(seed=0, variants=2))
    seen = [samples.batch(numbers, epoch) for epoch in range(4)]
    assert [batch.sample_ids.tolist() for batch in seen] == [
        [[5, k % 2], [2, k % 2]] for k in range(4)
    ]
    assert torch.equal(seen[0].inputs, seen[2].inputs)
    assert torch.equal(seen[1].inputs, seen[3].inputs)
    assert not torch.equal(seen[0].inputs, seen[1].inputs)
    alone = samples.batch(torch.tensor([2]), epoch=3)
    assert torch.equal(alone.inputs[0], seen[1].inputs[1])


def test_without_variants_each_epoch_has_keys_of_its_own(tmp_path: Path) -> None:
    samples = trained_on(loaded(tmp_path), Augmentation(seed=0, variants=0))
    numbers = torch.arange(3)
    keys = {tuple(pair) for epoch in range(5) for pair in samples.ids(numbers, epoch).tolist()}
    assert len(keys) == 15
    assert samples.variants == 0


@pytest.mark.parametrize("augmentation", [None, Augmentation(0, 2)])
def test_rows_that_fill_a_batch_are_copies_that_count_nothing(
    augmentation: Augmentation | None, tmp_path: Path
) -> None:
    samples = trained_on(loaded(tmp_path), augmentation)
    batch = samples.batch(torch.tensor([3, 1]))
    filled = samples.filled(batch, 5)
    assert torch.equal(filled.inputs, batch.inputs[[0, 1, 0, 1, 0]])
    assert filled.target.tolist() == [*batch.target.tolist(), *[IGNORED] * 3]
    ids = filled.sample_ids[:, 0] if augmentation else filled.sample_ids
    assert ids.tolist() == [3, 1, len(samples), len(samples) + 1, len(samples) + 2]
