"""A store's part of a checkpoint: with a tier on disk the slots of its rows, else the rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.store.references import ReferenceStore
from thinwire.store.slots import Slot

_WRAP = 1 << 64


def save(store: ReferenceStore) -> dict[str, Tensor]:
    """Plain tensors from which ``restore`` makes the store as it is now.

    Rows on disk stay where they are, untouched until ``release`` of these tensors.
    """
    tier = store.tier
    if tier is None:
        return store.state_dict()
    tier.write_all(store.everyone)
    slots = [held.slot for held in store.everyone if held.slot is not None]
    tier.files.pin(slots)
    hashes = [held.content_hash for held in store.everyone]
    return {
        **store.table(),
        "slots": torch.tensor(slots, dtype=torch.int64).reshape(-1, 2),
        "hashes": torch.tensor([h - _WRAP * (h >> 63) for h in hashes], dtype=torch.int64),
    }


def restore(store: ReferenceStore, saved: Mapping[str, Tensor]) -> None:
    """Make a fresh ``store`` what ``save`` was given; rows on disk are read when they are needed.

    Raises ValueError where they are on disk, and this store has none.
    """
    if "slots" not in saved:
        store.load_state_dict(saved)
        return
    if store.tier is None:
        raise ValueError("these references are on disk; this store keeps them in RAM alone")
    slots = _slots(saved)
    everyone = store.fill(saved, [None] * len(slots))
    for held, slot, hash_ in zip(everyone, slots, saved["hashes"].tolist(), strict=True):
        held.slot, held.hash, held.clean = slot, hash_ % _WRAP, True
    store.tier.files.adopt(slots, live=True)


def hold(store: ReferenceStore, saved: Mapping[str, Tensor]) -> None:
    """Leave the rows of another checkpoint that was found untouched until it is released."""
    if store.tier is not None and "slots" in saved:
        store.tier.files.adopt(_slots(saved), live=False)


def release(store: ReferenceStore, saved: Mapping[str, Tensor]) -> None:
    """The checkpoint of which ``saved`` is a part is gone."""
    if store.tier is not None and "slots" in saved:
        store.tier.files.unpin(_slots(saved))


def _slots(saved: Mapping[str, Tensor]) -> list[Slot]:
    return [Slot(size, number) for size, number in saved["slots"].tolist()]
