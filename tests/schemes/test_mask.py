"""A mask that the two directions of an edge share: gradients at what was transmitted."""

import math

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.schemes.links import Link, full, normal, visit
from thinwire.errors import FrameError, SpecError
from thinwire.schemes import Visit, scheme

N = 1000


class Edge:
    """Both links of an edge."""

    def __init__(self, forward: str, backward: str) -> None:
        self.forward, self.backward = Link(forward), Link(backward)
        self.forward.receiver.supports = self.backward.sender.masks
        self.forward.sender.supports = self.backward.receiver.masks

    def begin(self, *visits: Visit, dense: bool = False) -> None:
        self.forward.begin(*visits, dense=dense)
        self.backward.begin(*visits, dense=dense)

    def step(self, x: Tensor, grad: Tensor, there: Visit) -> tuple[Tensor, Tensor]:
        self.begin(there)
        y = self.forward.move(x, 0, there)
        self.forward.sender.end_step()
        return y, self.backward.move(grad, 0, there)


@pytest.mark.parametrize("forward", ["topk:0.1", "topk:0.1/int4", "ef(topk:0.1/int8)"])
def test_gradients_come_back_where_values_went(forward):
    edge = Edge(forward, "topk:0.1,mask=shared")
    x, grad = normal(3, N), normal(3, N, seed=1)
    x[2, :990] = 0  # ten values: of the hundred that are kept most are zeros
    _, back = edge.step(x, grad, full([1, 2, 3], N))
    sent = back != 0
    assert sent.sum(1).tolist() == [100, 100, 100]  # also where a kept value is zero
    assert back[sent].equal(grad[sent])
    assert sent[0].nonzero().flatten().tolist() == sorted(x[0].abs().topk(100).indices.tolist())


def test_the_gradient_is_that_of_the_masked_network():
    edge = Edge("topk:0.1", "topk:0.1,mask=shared")
    x = normal(2, N).requires_grad_()
    weight = normal(2, N, seed=3)
    y, _ = edge.step(x.detach(), torch.zeros(2, N), full([1, 2], N))
    mask = y != 0
    ((x * mask) ** 2 * weight).sum().backward()
    leaf = y.clone().requires_grad_()
    (leaf**2 * weight).sum().backward()
    assert leaf.grad is not None
    _, back = edge.step(x.detach(), leaf.grad, full([1, 2], N))
    assert x.grad is not None
    assert back.equal(x.grad)


def test_each_micro_batch_has_its_own_mask():
    edge = Edge("topk:0.1", "topk:0.1,mask=shared")
    there = [full([1], N), full([2], N)]
    edge.begin(*there)
    xs = [normal(1, N, seed=k) for k in range(2)]
    ys = [edge.forward.move(x, k, there[k]) for k, x in enumerate(xs)]
    for k in (1, 0):
        back = edge.backward.move(torch.ones(1, N), k, there[k])
        assert (back != 0).equal(ys[k] != 0)
    with pytest.raises(FrameError, match="has transmitted no such values"):
        edge.backward.move(torch.ones(1, N), 0, there[0])


def test_rows_of_several_lengths():
    edge = Edge("topk:0.1/int8", "topk:0.1/bf16,mask=shared")
    there = visit([1, 2], [400, N], N)
    grad = normal(2, N, seed=1)
    _, back = edge.step(normal(2, N), grad, there)
    assert (back != 0).sum(1).tolist() == [40, 100]
    assert not back[0, 400:].any()
    assert float((back - grad * (back != 0)).abs().max()) < 0.02


def test_before_compression_all_gradients_come_back():
    edge = Edge("topk:0.1", "topk:0.1,mask=shared")
    there, grad = full([1], N), normal(1, N, seed=1)
    edge.begin(there, dense=True)
    assert edge.forward.move(normal(1, N), 0, there).count_nonzero() == N
    assert edge.backward.move(grad, 0, there).equal(grad)


def test_no_positions_are_sent():
    n = 1 << 16
    edge = Edge("topk:0.1/bf16", "topk:0.1/bf16,mask=shared")
    there = full([1], n)
    edge.begin(there)
    x = normal(1, n)
    (out,) = edge.forward.sender.encode(x, 0, there)
    assert 8 * out.payload.numel() / n <= 2.15
    edge.forward.receiver.decode([out], 0, there)
    (back,) = edge.backward.sender.encode(x, 0, there)
    assert back.payload.numel() == 2 * math.ceil(n / 10)  # 1.6 bits a value


def test_a_mask_needs_a_forward_link_that_tells_it():
    tw.Plan(forward="topk:0.1", backward="topk:0.1/int8,mask=shared")
    tw.Plan(forward="ef(topk:0.1/int4)", backward="topk:0.1,mask=shared")
    for forward in ("int4", "delta(topk:0.1)", "ef21(topk:0.1)", "efmixed(topk:0.1)", "raw"):
        with pytest.raises(SpecError, match="takes its mask from the forward link, but"):
            tw.Plan(forward=forward, backward="topk:0.1,mask=shared")
    with pytest.raises(SpecError, match=r"keeps another share than forward topk:0\.2"):
        tw.Plan(forward="topk:0.2", backward="topk:0.1,mask=shared")
    with pytest.raises(SpecError, match="share it on the backward"):
        tw.Plan(forward="topk:0.1,mask=shared", backward="topk:0.1,mask=shared")


@pytest.mark.parametrize("spec", ["delta({})", "ef({})", "ef21({})", "efmixed({})"])
def test_a_scheme_with_state_takes_no_shared_mask(spec):
    with pytest.raises(SpecError, match="decoded by another link's frames"):
        scheme(spec.format("topk:0.1,mask=shared"))


def test_by_itself_it_codes_nothing():
    with pytest.raises(ValueError, match="the mask is that of a pipeline's forward link"):
        tw.codec("topk:0.1,mask=shared").encode(normal(2, 10))
    with pytest.raises(ValueError, match="the mask is that of a pipeline's forward link"):
        tw.pack(normal(2, 10), "topk:0.1,mask=shared")
