"""The order of samples, and the batches that come of it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.train import batches, data


def test_each_epoch_visits_each_sample_once_in_an_order_of_its_own() -> None:
    first, second = batches.epoch_order(100, 0, 0), batches.epoch_order(100, 0, 1)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(100))
    assert not torch.equal(first, second)
    assert torch.equal(first, batches.epoch_order(100, 0, 0))
    assert not torch.equal(first, batches.epoch_order(100, 1, 0))


@given(count=st.integers(4, 100), batch=st.integers(4, 20), least=st.integers(1, 4))
def test_only_a_rest_that_is_too_small_is_left_out(count: int, batch: int, least: int) -> None:
    per_epoch = batches.steps_per_epoch(count, batch, least)
    numbers = batches.training_numbers(count, batch, least, 0)
    sizes = [len(next(numbers)[1]) for _ in range(per_epoch)]
    assert next(numbers)[0] == 1  # the next one is of the second epoch
    assert min(sizes) >= least
    assert count - sum(sizes) == (count % batch if count % batch < least else 0)


@given(count=st.integers(8, 100), batch=st.integers(4, 20), least=st.integers(1, 4))
def test_fixed_batches_come_again_in_another_order(count: int, batch: int, least: int) -> None:
    per_epoch = batches.steps_per_epoch(count, batch, least)
    numbers = batches.training_numbers(count, batch, least, 0, fixed=True)
    first, second = ([next(numbers)[1].tolist() for _ in range(per_epoch)] for _ in range(2))
    assert sorted(first) == sorted(second)
    free = batches.training_numbers(count, batch, least, 0)
    assert [next(free)[1].tolist() for _ in range(per_epoch)] == first
    late = batches.training_numbers(count, batch, least, 0, per_epoch, fixed=True)
    assert [next(late)[1].tolist() for _ in range(per_epoch)] == second


def test_the_order_of_fixed_batches_changes() -> None:
    numbers = batches.training_numbers(100, 4, 1, 0, fixed=True)
    first, second = ([next(numbers)[1].tolist() for _ in range(25)] for _ in range(2))
    assert first != second


@given(count=st.integers(1, 50), batch=st.integers(4, 20), parts=st.integers(1, 4))
def test_evaluation_counts_each_token_once(count: int, batch: int, parts: int) -> None:
    samples = data.Samples(bytes(8 * count + 1), 8)
    found = list(batches.evaluation_batches(samples, batch, parts))
    assert sum(int((b.target != batches.IGNORED).sum()) for b in found) == 8 * count
    assert min(len(b.inputs) for b in found) >= parts
