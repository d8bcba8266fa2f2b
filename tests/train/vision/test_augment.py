"""Random crops and flips."""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional

from thinwire.train.vision.augment import crop_flip

IMAGES = torch.arange(2 * 3 * 6 * 5, dtype=torch.uint8).view(2, 3, 6, 5).repeat(300, 1, 1, 1)
NUMBERS = torch.arange(600)


def test_each_result_is_a_crop_of_the_padded_image_or_its_mirror() -> None:
    found = crop_flip(IMAGES, 0, NUMBERS, torch.zeros(600, dtype=torch.int64))
    assert found.shape == IMAGES.shape
    assert found.is_contiguous()
    places = list(itertools.product(range(9), range(9), (False, True)))
    drawn = set()
    for image, result in zip(IMAGES[:200], found[:200], strict=True):
        padded = functional.pad(image, [4] * 4)
        crops = [padded[:, top : top + 6, left : left + 5] for top, left, _ in places]
        (place,) = [
            place
            for place, crop in zip(places, crops, strict=True)
            if torch.equal(result, crop.flip(-1) if place[2] else crop)
        ]
        drawn.add(place)
    assert {top for top, _, _ in drawn} == {left for _, left, _ in drawn} == set(range(9))
    assert {flipped for _, _, flipped in drawn} == {False, True}


def test_seed_number_and_variant_alone_decide() -> None:
    variants = NUMBERS % 3
    before = torch.get_rng_state()
    found = crop_flip(IMAGES, 7, NUMBERS, variants)
    assert torch.equal(torch.get_rng_state(), before)
    order = NUMBERS.flip(0)
    again = crop_flip(IMAGES[order], 7, NUMBERS[order], variants[order])
    assert torch.equal(again.flip(0), found)
    for other in (
        crop_flip(IMAGES, 8, NUMBERS, variants),
        crop_flip(IMAGES, 7, NUMBERS + 1, variants),
        crop_flip(IMAGES, 7, NUMBERS, variants + 1),
    ):
        same = (other == found).flatten(1).all(1).float().mean()
        assert same < 0.1
