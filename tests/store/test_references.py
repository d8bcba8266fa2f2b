"""The store of references: rows by key, versions that count visits, digests that compare ends."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codecs.keeping import KEEPINGS
from thinwire.store import ReferenceStore


def put(store: ReferenceStore, keys: list[int], rows: list[list[float]]) -> list[Tensor]:
    kept = [store.keeping.keep(torch.tensor([row]), None)[0] for row in rows]
    return store.put(keys, kept, [len(row) for row in rows])


def read(store: ReferenceStore, key: int) -> list[float]:
    found: list[float] = store.read([key])[0].tolist()
    return found


def filled(ref: str = "fp32") -> ReferenceStore:
    store = ReferenceStore(KEEPINGS[ref])
    put(store, [5, -3], [[1.0, 2.0], [3.0, 4.0]])
    put(store, [5], [[7.0, 8.0]])
    put(store, [11], [[9.0]])
    return store


def test_a_key_never_written_has_version_0():
    assert ReferenceStore().versions([1, 2]) == [0, 0]


def test_versions_count_the_visits_of_each_key():
    store = filled()
    store.touch([11])
    assert store.versions([5, -3, 11, 4]) == [2, 1, 2, 0]


@pytest.mark.parametrize("ref", ["fp32", "bf16"])
def test_what_is_held_of_a_key_is_what_came_last(ref):
    assert [read(filled(ref), key) for key in (-3, 5, 11)] == [[3.0, 4.0], [7.0, 8.0], [9.0]]


def test_asking_for_an_unknown_key_is_an_error():
    with pytest.raises(KeyError):
        filled().rows([4])


def test_a_row_that_is_replaced_is_given_back_unless_its_length_changes():
    store = filled()
    assert [row.tolist() for row in put(store, [5, 11], [[1.0, 1.0], [2.0]])] == [[7.0, 8.0], [9.0]]
    assert put(store, [5], [[1.0]]) == []
    assert store.versions([5]) == [4]


@pytest.mark.parametrize("ref", sorted(KEEPINGS))
def test_lengths_and_bytes_follow_the_rows(ref):
    store = filled(ref)
    put(store, [5], [[0.0, 0.0, 0.0]])
    assert dict(store.lengths) == {5: 3, -3: 2, 11: 1}
    assert store.nbytes == sum(row.nbytes for row in store.rows([5, -3, 11]))
    if ref == "fp32":
        assert store.nbytes == 4 * 6
    assert len(store) == 3


def test_a_dropped_key_was_never_seen():
    store = filled()
    store.drop([5, 4])
    assert len(store) == 2
    assert store.versions([5]) == [0]
    assert 5 not in store.lengths
    assert store.nbytes == 12


def test_equal_stores_have_equal_digests_whatever_the_order_of_writing():
    other = ReferenceStore()
    put(other, [11], [[9.0]])
    put(other, [5], [[0.0, 0.0]])
    put(other, [5, -3], [[7.0, 8.0], [3.0, 4.0]])
    assert other.digest() == filled().digest()


@pytest.mark.parametrize("change", ["a bit", "a version", "a key", "a sign of zero", "a length"])
def test_the_digest_tells_stores_apart_by(change):
    a, b = filled(), filled()
    if change == "a bit":
        state = b.state_dict()
        state["rows"][0] ^= 1
        b.load_state_dict(state)
    elif change == "a version":
        b.touch([11])
    elif change == "a key":
        b.drop([11])
    elif change == "a length":
        put(a, [11], [[0.0]])
        put(b, [11], [[0.0, 0.0]])
    else:
        put(a, [11], [[0.0]])
        put(b, [11], [[-0.0]])
    assert a.digest() != b.digest()
    assert sum(x != y for x, y in zip(a.digests(), b.digests(), strict=True)) == 1


def test_only_the_keys_of_unlike_parts_are_dropped():
    a, b = filled(), filled()
    b.touch([5])
    unlike = [k for k, (x, y) in enumerate(zip(a.digests(), b.digests(), strict=True)) if x != y]
    assert a.drop_parts(unlike) == b.drop_parts(unlike) == [5]
    assert a.digest() == b.digest()


def test_what_is_held_of_some_keys_has_a_hash_that_tells_versions_and_lengths():
    a, b = filled(), filled()
    assert a.standing([5, 4]) == b.standing([5, 4])
    b.touch([5])
    assert a.standing([5, 4]) != b.standing([5, 4])
    assert a.standing([11, 4]) == b.standing([11, 4])


def test_a_row_without_values_is_kept_and_hashed():
    store = ReferenceStore()
    put(store, [1], [[]])
    assert store.versions([1]) == [1]
    assert store.digest() != ReferenceStore().digest()


keys = st.dictionaries(
    st.integers(-(2**63), 2**63 - 1), st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=4)
)


@given(keys, st.sampled_from(sorted(KEEPINGS)))
def test_a_state_dict_restores_everything(rows, ref):
    store, other = ReferenceStore(KEEPINGS[ref]), filled(ref)
    for key, row in rows.items():
        put(store, [key], [row])
    other.load_state_dict(store.state_dict())
    assert other.digest() == store.digest()
    assert dict(other.lengths) == dict(store.lengths)
    assert other.nbytes == store.nbytes


def test_a_state_dict_holds_plain_tensors_that_do_not_alias_the_store():
    store = filled()
    state = store.state_dict()
    assert all(type(value) is Tensor for value in state.values())
    other = ReferenceStore()
    other.load_state_dict(state)
    state["rows"].zero_()
    assert other.digest() == store.digest() == filled().digest()
