"""The store in RAM: references by key, versions that count visits, digests that compare ends."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.store import MemoryStore


def filled() -> MemoryStore:
    store = MemoryStore()
    store.write([5, -3], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    store.write([5], torch.tensor([[7.0, 8.0]]))
    store.write([11], torch.tensor([[9.0]]))
    return store


def test_a_key_never_written_has_version_0():
    assert MemoryStore().versions([1, 2]) == [0, 0]


def test_versions_count_the_writes_of_each_key():
    assert filled().versions([5, -3, 11, 4]) == [2, 1, 1, 0]


def test_read_gives_the_last_written_rows_in_the_order_asked():
    assert filled().read([-3, 5]).tolist() == [[3.0, 4.0], [7.0, 8.0]]


def test_reading_an_unknown_key_is_an_error():
    with pytest.raises(KeyError):
        filled().read([4])


def test_what_is_read_does_not_alias_the_store():
    store = filled()
    store.read([5]).zero_()
    assert store.read([5]).tolist() == [[7.0, 8.0]]


def test_what_was_written_does_not_alias_the_store():
    store, rows = MemoryStore(), torch.ones(1, 2)
    store.write([1], rows)
    rows.zero_()
    store.write([2], rows)
    rows.fill_(5)
    store.write([1], rows + 1)
    assert store.read([1, 2]).tolist() == [[6.0, 6.0], [0.0, 0.0]]


def test_lengths_and_bytes_follow_the_rows():
    store = filled()
    store.write([5], torch.zeros(1, 3))
    assert dict(store.lengths) == {5: 3, -3: 2, 11: 1}
    assert store.nbytes == 4 * 6
    assert len(store) == 3


def test_a_dropped_key_was_never_seen():
    store = filled()
    store.drop([5, 4])
    assert len(store) == 2
    assert store.versions([5]) == [0]
    assert 5 not in store.lengths


def test_equal_stores_have_equal_digests_whatever_the_order_of_writing():
    other = MemoryStore()
    other.write([11], torch.tensor([[9.0]]))
    other.write([5], torch.tensor([[0.0, 0.0]]))
    other.write([5, -3], torch.tensor([[7.0, 8.0], [3.0, 4.0]]))
    assert other.digest() == filled().digest()


@pytest.mark.parametrize("change", ["a bit", "a version", "a key", "a sign of zero"])
def test_the_digest_tells_stores_apart_by(change):
    a, b = filled(), filled()
    if change == "a bit":
        state = b.state_dict()
        state["values"][0] = state["values"][0].nextafter(torch.tensor(100.0))
        b.load_state_dict(state)
    elif change == "a version":
        b.write([11], b.read([11]))
    elif change == "a key":
        b.drop([11])
    else:
        a.write([11], torch.tensor([[0.0]]))
        b.write([11], torch.tensor([[-0.0]]))
    assert a.digest() != b.digest()


def test_a_row_without_values_is_kept_and_hashed():
    store = MemoryStore()
    store.write([1], torch.empty(1, 0))
    other = MemoryStore()
    assert store.versions([1]) == [1]
    assert store.digest() != other.digest()


keys = st.dictionaries(st.integers(-(2**63), 2**63 - 1), st.lists(st.floats(width=32), max_size=4))


@given(keys)
def test_a_state_dict_restores_everything(rows):
    store = MemoryStore()
    for key, row in rows.items():
        store.write([key], torch.tensor([row], dtype=torch.float32))
    other = filled()
    other.load_state_dict(store.state_dict())
    assert other.digest() == store.digest()
    assert dict(other.lengths) == dict(store.lengths)


def test_a_state_dict_holds_plain_tensors_that_do_not_alias_the_store():
    store = filled()
    state = store.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    other = MemoryStore()
    other.load_state_dict(state)
    state["values"].zero_()
    assert store.digest() == filled().digest()
    assert other.digest() == filled().digest()
