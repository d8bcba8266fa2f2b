"""References on disk: what is stored is what was computed, whatever the timing and the tier."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.schemes.links import WIDTH, Link, mixed_step, visits_of
from thinwire.store import Background, SlotFiles, Tier, saved
from thinwire.store.slots import Slot, slot_size


class SlowFiles(SlotFiles):
    """A disk that takes its time, more or less of it."""

    def __init__(self, *args: Any, seconds: float = 0.0) -> None:
        super().__init__(*args)
        self.seconds, self.chance = seconds, random.Random(0)

    def write(self, slot: Slot, row: memoryview) -> None:
        time.sleep(self.seconds * self.chance.random())
        super().write(slot, row)

    def read(self, slot: Slot, row: memoryview) -> bool:
        time.sleep(self.seconds * self.chance.random())
        return super().read(slot, row)


@pytest.fixture
def on_disk(tmp_path: Path) -> Any:
    """Gives one end of a link a tier: (end, bytes of RAM, seconds an access takes)."""
    opened: list[Background] = []

    def give(end: Any, ram: int | None, seconds: float = 0.0, limit: int | None = None) -> Tier:
        opened.append(Background())
        folder = tmp_path / f"{len(opened)}"
        folder.mkdir()
        files = SlowFiles(folder, "rows", limit, seconds=seconds)
        tier = Tier(files, opened[-1], end.store.keeping, ram, torch.device("cpu"))
        end.store.tier = tier
        return tier

    yield give
    for background in opened:
        background.close()


def keys_of(number: int) -> list[int]:
    return [key for keys, _ in mixed_step(number)[0] for key in keys]


def run(link: Link, steps: int, announce: Callable[[int], bool] = lambda n: True) -> list[float]:
    """Mixed steps through a link as a pipeline would have them; what the receiver computed on."""
    found = []
    for number in range(steps):
        step, visits = mixed_step(number), visits_of(number, mixed_step(number))
        following = keys_of(number + 1) if announce(number) else []
        for end in (link.sender, link.receiver):
            end.store.acquire(keys_of(number), following)
        assert link.sender.store.standing(keys_of(number)) == link.receiver.store.standing(
            keys_of(number)
        )
        link.begin(*visits)
        for end in (link.sender, link.receiver):
            end.store.fetch(following)
        for k, (there, x) in enumerate(zip(visits, step[1], strict=True)):
            found.append(float(link.move(x, k, there).sum()))
        for end in (link.sender, link.receiver):
            end.store.settle()
        if number % 50 == 49:
            assert link.sender.digest() == link.receiver.digest()
    return found


SPEC = "delta(int4)"
ROW = 102  # bytes of a full reference
SLOT = slot_size(ROW)


@pytest.mark.parametrize("ref", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("announced", [True, False])
def test_a_tier_changes_nothing_that_is_computed(on_disk: Any, ref: str, announced: bool) -> None:
    spec = f"{SPEC[:-1]},ref={ref})"
    plain, link = Link(spec), Link(spec)
    tier = on_disk(link.sender, 0)
    expected = run(plain, 150)
    assert run(link, 150, lambda n: announced or n % 3 == 0) == expected
    assert tier.traffic.read_bytes > 0
    assert (tier.traffic.late == 0) == announced
    assert tier.traffic.lost == 0


def test_ends_with_different_tiers_and_speeds_agree_after_1000_steps_with_eviction(
    on_disk: Any,
) -> None:
    link = Link(SPEC)
    on_disk(link.sender, 8 * ROW, 0.0002, limit=36 * SLOT)  # there are three lengths
    on_disk(link.receiver, 0, 0.0005, limit=36 * SLOT)
    for end in (link.sender, link.receiver):
        end.store.bound(12 * SLOT)
    run(link, 1000)
    assert link.sender.digest() == link.receiver.digest()
    for end in (link.sender, link.receiver):
        assert end.store.nbytes <= 12 * SLOT
        assert end.store.tier.files.nbytes <= 36 * SLOT
        assert end.store.tier.traffic.lost == 0
    assert WIDTH == 96


def test_a_row_for_which_there_is_no_room_is_lost_by_its_next_visit(on_disk: Any) -> None:
    link = Link(SPEC)
    tier = on_disk(link.sender, 0, limit=2 * SLOT)
    for keys in ([1, 2], [3], [4]):
        link.sender.store.acquire(keys)
        link.step(torch.randn(len(keys), WIDTH), keys)
    link.sender.store.acquire([1, 2, 3])
    assert sorted(link.sender.store.lengths) == [1, 2, 4]
    assert tier.traffic.lost == 1
    state = saved.save(link.sender.store)
    assert sorted(state["keys"].tolist()) == [1, 2]


def test_what_was_written_to_a_slow_disk_is_what_was_computed(on_disk: Any) -> None:
    link = Link(SPEC)
    tier = on_disk(link.sender, 0, 0.002)
    run(link, 100)
    tier.write_all(link.sender.store.everyone)
    for held in link.sender.store.everyone:
        expected = link.receiver.store.rows([held.key])[0]
        row = torch.empty_like(expected)
        assert tier.files.read(held.slot, row.numpy().data)
        assert row.equal(expected)


def test_a_row_that_was_damaged_on_disk_is_lost_and_not_used(on_disk: Any) -> None:
    link = Link(SPEC)
    tier = on_disk(link.sender, 0)
    run(link, 60)
    tier.write_all(link.sender.store.everyone)
    store = link.sender.store
    damaged = next(h for h in store.everyone if h.row is None)
    tier.files.write(damaged.slot, memoryview(bytes(ROW)))
    store.acquire([damaged.key])
    assert store.versions([damaged.key]) == [0]
    assert tier.traffic.lost == 1


def test_a_disk_that_fails_is_an_error_of_the_step(on_disk: Any) -> None:
    link = Link(SPEC)
    tier = on_disk(link.sender, 0)

    def full(slot: Slot, row: memoryview) -> None:
        raise OSError(28, "No space left on device")

    tier.files.write = full
    with pytest.raises(OSError, match="No space left"):
        run(link, 20)
