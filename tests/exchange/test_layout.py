"""Parts of tensors and where they lie: nothing is lost, whatever the sizes and the ranks."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.exchange.layout import Layout, cut

CPU = torch.device("cpu")
SIZES = st.lists(st.integers(0, 400), min_size=1, max_size=6)


@given(SIZES, st.integers(1, 5), st.sampled_from([1, 8, 128]))
def test_what_is_gathered_is_scattered_again(sizes: list[int], ranks: int, align: int) -> None:
    layout = Layout(sizes, range(len(sizes)), ranks, align)
    tensors = [torch.arange(n, dtype=torch.float32) + 1 for n in sizes]
    found = [torch.full((n,), torch.nan) for n in sizes]
    layout.scatter(layout.gather(tensors, torch.float32, CPU), found)
    assert all(torch.equal(a, b) for a, b in zip(tensors, found, strict=True))


@given(SIZES, st.integers(1, 5), st.sampled_from([8, 128]))
def test_no_group_has_values_of_two_tensors(sizes: list[int], ranks: int, align: int) -> None:
    layout = Layout(sizes, range(len(sizes)), ranks, align)
    tensors = [torch.full((n,), float(k + 1)) for k, n in enumerate(sizes)]
    for buffer in layout.gather(tensors, torch.float32, CPU):
        assert buffer.numel() % align == 0
        for group in buffer.view(-1, align):
            assert len(set(group.tolist()) - {0.0}) <= 1


@given(st.integers(0, 5000), st.integers(0, 9), st.integers(1, 5))
def test_parts_are_alike(numel: int, number: int, ranks: int) -> None:
    bounds = cut(numel, number, ranks, 128)
    parts = [b - a for a, b in itertools.pairwise(bounds)]
    assert sum(parts) == numel
    assert max(parts) - min(parts) < 2 * 128  # the last group may be short


def test_who_has_a_value_depends_on_the_tensor_alone() -> None:
    together = Layout([300, 500], [0, 1], 3, 128)
    alone = Layout([500], [1], 3, 128)
    for rank in range(3):
        ours = [(s.start, s.stop) for s in together.spans[rank] if s.tensor == 1]
        assert ours == [(s.start, s.stop) for s in alone.spans[rank]]


def test_absent_tensors_are_zeros_and_stay_as_they_are() -> None:
    layout = Layout([5, 7], [0, 1], 2, 1)
    buffers = layout.gather([None, torch.ones(7)], torch.float32, CPU)
    assert sum(float(b.sum()) for b in buffers) == 7
    found = torch.zeros(7)
    layout.scatter(buffers, [None, found])
    assert torch.equal(found, torch.ones(7))
