"""A store's part of a checkpoint: with a tier on disk the slots of its rows, else the rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.store.held import signed, unsigned
from thinwire.store.references import ReferenceStore
from thinwire.store.slots import Slot, SlotFiles, slot_size

_MOST_VALUES = 1 << 40  # of a reference


def save(store: ReferenceStore) -> dict[str, Tensor]:
    """Plain tensors from which ``restore`` makes the store as it is now.

    Rows on disk stay where they are, untouched until ``release`` of these tensors.
    """
    tier = store.tier
    if tier is None:
        return store.state_dict()
    tier.write_all(store.everyone)
    everyone = [held for held in store.everyone if held.slot is not None]
    slots = [held.slot for held in everyone if held.slot is not None]
    tier.files.pin(slots)
    hashes = [held.content_hash for held in everyone]
    return {
        **store.table(everyone),
        "slots": torch.tensor(slots, dtype=torch.int64).reshape(-1, 2),
        "hashes": torch.tensor([signed(h) for h in hashes], dtype=torch.int64),
    }


def restore(store: ReferenceStore, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Make a fresh ``store`` what ``save`` was given; rows on disk are read when they are needed.
    Returns what is to be released.

    Rows that the files on disk are too short for are lost. Raises ValueError, with the store as it
    was, where the tensors are no ``save``'s, or rows are on disk and this store has none.
    """
    _check(saved)
    if "slots" not in saved:
        store.load_state_dict(saved)
        return saved
    if store.tier is None:
        raise ValueError("these references are on disk; this store keeps them in RAM alone")
    _check_slots(store, saved)
    saved = _present(store.tier.files, saved)
    slots = _slots(saved)
    store.clear()
    store.tier.files.adopt(slots, live=True)
    everyone = store.fill(saved, [None] * len(slots))
    for held, slot, hash_ in zip(everyone, slots, saved["hashes"].tolist(), strict=True):
        held.slot, held.hash, held.clean = slot, unsigned(hash_), True
    return saved


def hold(store: ReferenceStore, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Leave the rows of another checkpoint that was found untouched until ``release`` of what is
    returned: those that are there. Raises ValueError where the tensors are no ``save``'s."""
    _check(saved)
    if store.tier is None or "slots" not in saved:
        return saved
    _check_slots(store, saved)
    saved = _present(store.tier.files, saved)
    store.tier.files.adopt(_slots(saved), live=False)
    return saved


def release(store: ReferenceStore, saved: Mapping[str, Tensor]) -> None:
    """The checkpoint of which ``saved`` is a part is gone."""
    if store.tier is not None and "slots" in saved:
        store.tier.files.unpin(_slots(saved))


def _slots(saved: Mapping[str, Tensor]) -> list[Slot]:
    return [Slot(size, number) for size, number in saved["slots"].tolist()]


# What was read from a disk is not trusted: its digest tells damage, not who wrote it.

_COLUMNS = ("keys", "versions", "values", "last")


def _check(saved: Mapping[str, Tensor]) -> None:
    """Raise ValueError where ``saved`` has no table of references."""
    count = saved["keys"].numel() if "keys" in saved else 0
    column: tuple[torch.dtype, tuple[int, ...]] = (torch.int64, (count,))
    wanted = dict.fromkeys(_COLUMNS, column) | {"clock": (torch.int64, (2,))}
    if "slots" in saved:
        wanted |= {"slots": (torch.int64, (count, 2)), "hashes": (torch.int64, (count,))}
    else:
        rows = saved["rows"].numel() if "rows" in saved else 0
        wanted["rows"] = (torch.uint8, (rows,))
    for name, form in wanted.items():
        if name not in saved:
            raise ValueError(f"{name} is missing")
        if (saved[name].dtype, tuple(saved[name].shape)) != form:
            raise ValueError(f"{name} is not of the form {form[0]} {form[1]}")
    if saved["keys"].unique().numel() != count:
        raise ValueError("a sample is there twice")
    for name, low, high in (("versions", 1, 1 << 32), ("values", 0, _MOST_VALUES)):
        if bool(((saved[name] < low) | (saved[name] >= high)).any()):
            raise ValueError(f"{name} are not within {low} … {high - 1}")


def _check_slots(store: ReferenceStore, saved: Mapping[str, Tensor]) -> None:
    """Raise ValueError where the rows of ``saved`` cannot lie in its slots."""
    needed = {n: store.keeping.nbytes(n) for n in set(saved["values"].tolist())}
    slots, values = _slots(saved), saved["values"].tolist()
    fitting = all(slot.size >= needed[n] for slot, n in zip(slots, values, strict=True))
    known = all(slot.number >= 0 and slot_size(slot.size) == slot.size for slot in set(slots))
    if not fitting or not known or len(set(slots)) < len(slots):
        raise ValueError("the slots on disk are not those of its rows")


def _present(files: SlotFiles, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """``saved`` without rows that the files are too short for."""
    slots = _slots(saved)
    ends = {size: files.extent(size) for size in {slot.size for slot in slots}}
    there = torch.tensor([s.number * s.size < ends[s.size] for s in slots], dtype=torch.bool)
    return {name: t if name == "clock" else t[there] for name, t in saved.items()}
