"""Slots on disk: none is given twice, a pinned one is left alone, and files keep to their limit."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.store import SlotFiles
from thinwire.store.slots import Slot, slot_size

SIZES = (40, 100, 260, 900)
LIMIT = 20_000

actions = st.lists(
    st.tuples(st.sampled_from(["place", "free", "pin", "unpin"]), st.integers(0, 60)), max_size=200
)


def on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@given(actions, st.sampled_from([None, LIMIT]))
def test_rows_that_are_live_or_pinned_keep_their_bytes_and_files_their_limit(
    actions: list[tuple[str, int]], limit: int | None
) -> None:
    with TemporaryDirectory() as name:
        files = SlotFiles(Path(name), "rows", limit)
        live: dict[int, Slot] = {}
        content: dict[Slot, bytes] = {}
        pinned: list[dict[Slot, bytes]] = []
        for action, key in actions:
            if action == "place":
                row = bytes([key]) * SIZES[key % len(SIZES)]
                slot = files.place(len(row), live.pop(key, None))
                assert slot is not None or limit is not None
                if slot is not None:
                    assert slot not in live.values()
                    assert all(slot not in slots for slots in pinned)
                    files.write(slot, memoryview(row))
                    live[key], content[slot] = slot, row
            elif action == "free" and key in live:
                files.free(live.pop(key))
            elif action == "pin":
                pinned.append({slot: content[slot] for slot in live.values()})
                files.pin(pinned[-1])
            elif action == "unpin" and pinned:
                files.unpin(pinned.pop(0))
            assert limit is None or max(files.nbytes, on_disk(Path(name))) <= limit
        expected = {slot: content[slot] for slot in live.values()}
        for slots in pinned:
            expected |= slots
        for slot, row in expected.items():
            found = bytearray(len(row))
            assert files.read(slot, memoryview(found))
            assert found == row
        files.close()


@pytest.fixture
def files(tmp_path: Path) -> Any:
    made = SlotFiles(tmp_path, "rows", 64 * 10)
    yield made
    made.close()


def test_a_row_has_a_slot_until_the_limit_is_reached(files: SlotFiles) -> None:
    slots = [files.place(64, None) for _ in range(11)]
    assert None not in slots[:10]
    assert slots[10] is None


def test_free_slots_at_the_end_make_room_for_rows_of_another_length(files: SlotFiles) -> None:
    small = [files.place(64, None) for _ in range(10)]
    assert files.place(128, None) is None
    for slot in small[4:]:
        assert slot is not None
        files.free(slot)
    large = [files.place(128, None) for _ in range(4)]
    assert [slot is None for slot in large] == [False, False, False, True]
    assert files.nbytes <= 64 * 10


def test_a_larger_slot_is_taken_where_nothing_else_is_left(files: SlotFiles) -> None:
    large = [files.place(128, None) for _ in range(5)]
    assert large[0] is not None
    files.free(large[0])
    assert files.place(64, None) == large[0]


@given(st.integers(0, 1 << 40))
def test_a_slot_is_at_most_an_eighth_larger_than_its_row(nbytes: int) -> None:
    assert nbytes <= slot_size(nbytes) <= max(nbytes * 9 / 8, nbytes + 16)
    assert slot_size(slot_size(nbytes)) == slot_size(nbytes)


def test_files_of_rows_of_other_sizes_that_are_there_already_count(tmp_path: Path) -> None:
    before = SlotFiles(tmp_path, "rows", LIMIT)
    while (slot := before.place(900, None)) is not None:
        before.write(slot, memoryview(bytes(900)))
    before.close()
    files = SlotFiles(tmp_path, "rows", LIMIT)
    while (slot := files.place(100, None)) is not None:
        files.write(slot, memoryview(bytes(100)))
        assert on_disk(tmp_path) <= LIMIT
    files.close()


def test_a_write_that_comes_after_its_slot_was_given_up_leaves_the_file_short(
    tmp_path: Path,
) -> None:
    files = SlotFiles(tmp_path, "rows", LIMIT)
    slots = []
    while (slot := files.place(900, None)) is not None:
        files.write(slot, memoryview(bytes(900)))
        slots.append(slot)
    for slot in slots:
        files.free(slot)
    while (small := files.place(100, None)) is not None:
        if small.size == slot_size(100):
            files.write(small, memoryview(bytes(100)))
    files.write(slots[-1], memoryview(bytes(900)))
    assert on_disk(tmp_path) <= LIMIT
    files.close()


def test_the_names_of_new_files_are_on_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, synced = SlotFiles(tmp_path, "rows"), []
    assert files.place(100, None) is not None
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    files.sync()
    assert tmp_path.stat().st_ino in synced
    files.close()
