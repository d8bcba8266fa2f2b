"""What a store takes back from a disk that is not trusted."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from thinwire.codecs.keeping import KEEPINGS
from thinwire.store import Background, ReferenceStore, SlotFiles, Tier, saved

N = 64
KEEPING = KEEPINGS["int8"]
Make = Callable[[], ReferenceStore]


PLACES = ("in RAM", "on disk")
on_disk = pytest.mark.parametrize("make", ["on disk"], indirect=True)


@pytest.fixture(params=PLACES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes stores of one place; those on disk share their files."""
    background = Background()

    def one() -> ReferenceStore:
        store = ReferenceStore(KEEPING)
        if request.param == "on disk":
            files = SlotFiles(tmp_path, "rows")
            store.tier = Tier(files, background, KEEPING, None, torch.device("cpu"))
        return store

    yield one
    background.close()


def filled(store: ReferenceStore) -> Mapping[str, Tensor]:
    rows = KEEPING.keep(torch.randn(5, N), None)
    store.put(range(5), rows, [N] * 5)
    return saved.save(store)


def test_a_store_is_what_was_saved(make: Make) -> None:
    store, other = make(), make()
    state = filled(store)
    saved.release(other, saved.restore(other, state))
    assert other.digest() == store.digest()
    other.acquire(range(5))
    assert torch.equal(other.read(range(5)), store.read(range(5)))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "short": lambda t: t[:-1],
    "of floats": lambda t: t.float(),
    "of three dimensions": lambda t: t[None, None],
    "negative": lambda t: torch.full_like(t, -5),
    "huge": lambda t: torch.full_like(t, 1 << 62),
}
HARMLESS = {(name, how) for name in ("last", "clock", "hashes") for how in ("negative", "huge")}


@pytest.mark.parametrize(
    ("name", "make"),
    [(name, place) for name in ("keys", "versions", "values", "last", "clock") for place in PLACES]
    + [("slots", "on disk"), ("hashes", "on disk")],
    indirect=["make"],
)
def test_tensors_that_are_no_store_are_refused_and_leave_it_as_it_was(
    name: str, make: Make
) -> None:
    state = dict(filled(make()))
    harmed = {"missing": {n: t for n, t in state.items() if n != name}}
    for how, change in CHANGES.items():
        if (name, how) not in HARMLESS:
            harmed[how] = {**state, name: change(state[name])}
    for how, tensors in harmed.items():
        store = make()
        with pytest.raises(ValueError, match=r"missing|form|within|twice|slots"):
            saved.restore(store, tensors)
        with pytest.raises(ValueError, match=r"missing|form|within|twice|slots"):
            saved.hold(store, tensors)
        assert len(store) == 0, how


@on_disk
def test_a_slot_far_behind_the_end_of_the_file_costs_its_row_alone(
    make: Make, tmp_path: Path
) -> None:
    state = dict(filled(make()))
    state["slots"] = state["slots"].clone()
    state["slots"][0, 1] = 1 << 55
    store = make()
    pinned = saved.restore(store, state)
    assert sorted(store.lengths) == [1, 2, 3, 4]
    saved.release(store, saved.hold(store, state))
    saved.release(store, pinned)
    for file in tmp_path.iterdir():
        file.unlink()
    store = make()
    saved.restore(store, state)
    assert len(store) == 0
    assert list(tmp_path.iterdir()) == []


@on_disk
def test_a_slot_may_be_pinned_by_any_number_of_checkpoints(make: Make) -> None:
    store = make()
    states = [filled(store)]
    before = {held.slot for held in store.everyone}
    states += [saved.save(store) for _ in range(256 - 1)]
    store.put(range(5), KEEPING.keep(torch.randn(5, N), None), [N] * 5)
    saved.save(store)
    assert before.isdisjoint({held.slot for held in store.everyone})
