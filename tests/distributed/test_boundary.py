"""What else may cross an edge: masks, tables, integers, tensors without gradient, other dtypes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.distributed.pool import Pool
from tests.distributed.setup import DIM, LENGTH, VOCAB, Block, batch

ROWS, CHANNELS = 2, 6


class First(nn.Module):
    """Sends its activation, a second one, a -inf mask, a table, positions and flags."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.block = nn.Embedding(VOCAB, DIM), Block(DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.embed(x)
        rows, length = x.shape
        mask = torch.full((rows, length, length), -math.inf).triu(1)
        table = torch.linspace(0, 1, length * DIM).view(1, length, DIM)
        positions = torch.arange(length).expand(rows, length)  # not contiguous
        return self.block(h), h.transpose(0, 1).transpose(0, 1) * 2, mask, table, positions, x > 7


class Second(nn.Module):
    """Uses some of them; the second activation only where asked."""

    def __init__(self, use_second: bool, seen: list[Any]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.block, self.head = Block(DIM), nn.Linear(DIM, VOCAB)
        self.use_second, self.seen = use_second, seen

    def forward(
        self,
        h: Tensor,
        second: Tensor,
        mask: Tensor,
        table: Tensor,
        positions: Tensor,
        flags: Tensor,
    ) -> Tensor:
        self.seen.append((second.detach(), mask, table, positions, flags))
        mixed = torch.softmax(mask, -1) @ (h + table)
        if self.use_second:
            mixed = mixed + second
        y: Tensor = self.head(self.block(mixed) + positions[..., None] * 0.01)
        return y


def boundaries() -> tuple[Tensor, ...]:
    def hidden() -> Tensor:
        return torch.empty(ROWS, LENGTH, DIM, device="meta", requires_grad=True)

    return (
        hidden(),
        hidden(),
        torch.empty(ROWS, LENGTH, LENGTH, device="meta"),
        torch.empty(1, LENGTH, DIM, device="meta"),
        torch.empty(ROWS, LENGTH, dtype=torch.int64, device="meta"),
        torch.empty(ROWS, LENGTH, dtype=torch.bool, device="meta"),
    )


def many_tensors(rank: int, world_size: int, use_second: bool, forward: str, name: str) -> Any:
    seen: list[Any] = []
    module = First() if rank == 0 else Second(use_second, seen)
    tokens = torch.empty(ROWS, LENGTH, dtype=torch.int64, device="meta")
    logits = torch.empty(ROWS, LENGTH, VOCAB, device="meta", requires_grad=True)
    stage = tw.PipelineStage(
        module,
        rank,
        2,
        "cpu",
        input_args=tokens if rank == 0 else boundaries(),
        output_args=boundaries() if rank == 0 else logits,
    )
    schedule = tw.build_schedule(name, [stage], 4, tw.TokenLoss())
    pipeline = tw.Pipeline(schedule, [stage], tw.Plan(forward, "raw"), deadline=20)
    ids, x, y = batch(0)
    result = pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids)
    pipeline.eval(*((x,) if rank == 0 else ()), target=y)
    seen = seen[:4]  # of the training step
    grads = {n: p.grad for n, p in module.named_parameters()}
    return result.loss, grads, seen, pipeline.link_reports()[0]["kinds"]


def expected(use_second: bool) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    first, second = First(), Second(use_second, [])
    _, x, y = batch(0)
    loss = nn.functional.cross_entropy(second(*first(x)).flatten(0, 1), y.flatten())
    loss.backward()
    return (
        loss.item(),
        {n: p.grad for n, p in first.named_parameters() if p.grad is not None},
        {n: p.grad for n, p in second.named_parameters() if p.grad is not None},
    )


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize("use_second", [True, False])
def test_extra_boundary_tensors_train_as_in_one_process(
    pool: Pool, name: str, use_second: bool
) -> None:
    found = pool.run(many_tensors, use_second, "raw", name, world_size=2)
    loss, *grads = expected(use_second)
    assert found[0][0] == pytest.approx(loss, abs=1e-6)
    for rank in range(2):
        for parameter, grad in grads[rank].items():
            assert torch.allclose(found[rank][1][parameter], grad, atol=1e-6), parameter


def test_masks_tables_integers_and_flags_travel_unquantized(pool: Pool) -> None:
    _, (_, _, seen, kinds) = pool.run(many_tensors, True, "delta(int2)", "GPipe", world_size=2)
    _, x, _ = batch(0)
    for k, (second, mask, table, positions, flags) in enumerate(seen):
        rows = x[2 * k : 2 * k + 2]
        _, exact, *rest = First()(rows)
        assert not torch.equal(second, exact)  # coded
        for got, want in zip((mask, table, positions, flags), rest, strict=True):
            assert torch.equal(got, want)
    assert set(kinds) == {"first", "value"}


class Half(nn.Module):
    """A stage that computes and hands over in another dtype than its neighbour's."""

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(10 + index)
        self.embed = nn.Embedding(VOCAB, DIM) if index == 0 else nn.Identity()
        self.block, self.head = Block(DIM), nn.Linear(DIM, VOCAB) if index else nn.Identity()
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.block(self.embed(x)))
        return y


def two_dtypes(rank: int, world_size: int, forward: str, backward: str) -> Any:
    dtypes = (torch.bfloat16, torch.float32)

    def hidden(dtype: torch.dtype) -> Tensor:
        return torch.empty(ROWS, LENGTH, DIM, device="meta", dtype=dtype, requires_grad=True)

    tokens = torch.empty(ROWS, LENGTH, dtype=torch.int64, device="meta")
    logits = torch.empty(ROWS, LENGTH, VOCAB, device="meta", requires_grad=True)
    stage = tw.PipelineStage(
        Half(rank, dtypes[rank]),
        rank,
        2,
        "cpu",
        input_args=tokens if rank == 0 else hidden(dtypes[1]),
        output_args=hidden(dtypes[0]) if rank == 0 else logits,
    )
    schedule = tw.build_schedule("Interleaved1F1B", [stage], 4, tw.TokenLoss())
    pipeline = tw.Pipeline(schedule, [stage], tw.Plan(forward, backward), deadline=20)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        ids, x, y = batch(0)
        losses.append(pipeline.step(*((x,) if rank == 0 else ()), target=y, sample_ids=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    role = "sender" if rank == 0 else "receiver"
    return losses, pipeline.state_digests()[f"edge 0 forward 0 {role}"]


@pytest.mark.parametrize(
    ("forward", "backward"), [("raw", "raw"), ("bf16", "bf16"), ("delta(int4)", "int8")]
)
def test_a_bf16_stage_feeds_an_fp32_stage(pool: Pool, forward: str, backward: str) -> None:
    first, second = pool.run(two_dtypes, forward, backward, world_size=2)
    assert first == second
    assert first[0][-1] < first[0][0]


class Paint(nn.Module):
    """Half of a network on images, in which all tensors have as many channels."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(20 + index)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.head = nn.Linear(CHANNELS, VOCAB) if index else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        y: Tensor = x if self.head is None else self.head(x.mean((2, 3)))
        return y


def on_images(rank: int, world_size: int, lengths: bool) -> Any:
    shape = (ROWS, CHANNELS, 4, 4)
    images = torch.empty(shape, device="meta")
    hidden = torch.empty(shape, device="meta", requires_grad=True)
    logits = torch.empty(ROWS, VOCAB, device="meta", requires_grad=True)
    arguments = [(images, hidden), (hidden, logits)]
    stages = [
        tw.PipelineStage(Paint(k), k, 2, "cpu", input_args=into, output_args=out)
        for k, (into, out) in enumerate(arguments)
    ]
    schedule = tw.build_schedule("LoopedBFS", stages, 4, tw.ClassLoss())
    pipeline = tw.Pipeline(
        schedule, stages, tw.Plan("raw", "raw"), transport=tw.MemoryTransport(), deadline=20
    )
    x, y = torch.rand(8, CHANNELS, 4, 4), torch.arange(8) % VOCAB
    y[-1] = -100
    valid = torch.full((8,), 2) if lengths else None
    trained = pipeline.step(x, target=y, sample_ids=torch.arange(8), lengths=valid).loss
    evaluated = pipeline.eval(x, target=y)
    predicted = stages[1].submod(stages[0].submod(x)).argmax(1)
    return (
        [b.sequence for s in stages for b in (*s.inputs, *s.outputs)],
        trained,
        evaluated,
        int((predicted == y)[:-1].sum()),
    )


def test_channels_of_images_are_no_sequence_and_right_predictions_are_counted(pool: Pool) -> None:
    ((marked, trained, evaluated, correct),) = pool.run(on_images, False, world_size=1)
    assert not any(marked)
    assert evaluated.tokens == 7
    assert evaluated.correct == correct
    assert evaluated.loss == pytest.approx(trained)
    # the second channel is no last valid position
    ((_, with_lengths, _, _),) = pool.run(on_images, True, world_size=1)
    assert with_lengths == trained
