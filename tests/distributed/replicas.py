"""Replicas of a small model, trained in worker processes in each of the ways that there are."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

ROWS = 6


class Model(nn.Module):
    """Matrices, vectors, a scalar, odd sizes, a strided weight, one that is frozen, and one that
    is used in some steps only."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 3)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.up, self.norm, self.down = nn.Linear(5, 67), nn.LayerNorm(67), nn.Linear(67, 3)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.seldom = nn.Parameter(torch.zeros(3))
        self.to(dtype)

    def forward(self, x: Tensor, seldom: bool = False) -> Tensor:
        h = functional.relu(self.conv(x)).mean((2, 3))
        y = self.down(self.norm(functional.gelu(self.up(h)))) * self.gain + self.frozen
        found: Tensor = y + self.seldom if seldom else y
        return found


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(ROWS, 3, 6, 6, generator=generator, dtype=dtype)
    return x, (x.mean((1, 2, 3)) * 30).long().clamp(0, 2)


def loss(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x, target = batch(rank, step, dtype)
    return functional.cross_entropy(model(x), target)


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def alone(rank: int, world: int, replicas: int, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """One process on all replicas' data."""
    model = Model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([loss(model, r, step, dtype) for r in range(replicas)]).mean().backward()
        optimizer.step()
    return values(model)


def reduced(
    rank: int, world: int, spec: str, steps: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    model = Model(dtype)
    reducer = tw.GradientReducer(model.named_parameters(), None, spec)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 3e-3)
    if spec.startswith("dgc"):
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, rank, step, dtype).backward()
        assert not reducer.reduce()
        optimizer.step()
    reducer.close()
    return values(model)


def hooked(
    rank: int,
    world: int,
    spec: str | None,
    steps: int,
    dtype: torch.dtype = torch.float32,
    accumulate: int = 1,
) -> list[Tensor]:
    model = Model(dtype)
    # buckets of some values each: torch forms them anew after the first step
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005, find_unused_parameters=True)
    state = None if spec is None else tw.compress_ddp(ddp, spec)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate - 1):
            with ddp.no_sync():
                loss(ddp, rank, 7000 + step * accumulate + part, dtype).backward()
        loss(ddp, rank, step, dtype).backward()
        assert state is None or not state.skipped
        optimizer.step()
    return values(model)


Stepped = tuple[Any, Callable[[int], None], Callable[[], dict[str, Any]], Callable[[Any], None]]


def trainer(kind: str, group: dist.ProcessGroup | None, rank: int) -> Stepped:
    """(model, a step, what it saves, what loads that) of one way to train."""
    model = Model()
    parameters = list(model.named_parameters())
    way, _, spec = kind.partition(" ")
    if way == "adam":
        exchanging: Any = tw.QuantizedAdam(
            model.parameters(), 3e-3, warmup=3, group=group, spec=spec
        )
        optimizer: Any = exchanging
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        if way == "local":
            exchanging = tw.LocalSteps(parameters, 2, group, spec)
        elif way == "ddp":
            ddp = DistributedDataParallel(
                model, process_group=group, bucket_cap_mb=0.0005, find_unused_parameters=True
            )
            exchanging = tw.compress_ddp(ddp, spec)
        else:
            exchanging = tw.GradientReducer(parameters, group, spec)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss(ddp if way == "ddp" else model, rank, number).backward()
        if way == "reduce":
            exchanging.reduce()
        optimizer.step()
        if way == "local":
            exchanging.step()

    def save() -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict(), exchanging.state_dict()], buffer)
        return {"bytes": buffer.getvalue()}

    def load(saved: dict[str, Any]) -> None:
        one, two, three = torch.load(io.BytesIO(saved["bytes"]), weights_only=True)
        model.load_state_dict(one)
        optimizer.load_state_dict(two)
        if exchanging is not optimizer:
            exchanging.load_state_dict(three)

    return model, step, save, load


def resumed(rank: int, world: int, kind: str) -> bool:
    """Whether, in a sub-group, going on from a checkpoint is the same as not having stopped."""
    half = [r for r in range(world) if r % 2 == rank % 2]
    group = dist.new_group(half, use_local_synchronization=True)
    model, step, save, _ = trainer(kind, group, rank)
    for number in range(5):
        step(number)
    saved = save()
    for number in range(5, 9):
        step(number)
    again, step, _, load = trainer(kind, group, rank)
    load(saved)
    for number in range(5, 9):
        step(number)
    return all(torch.equal(a, b) for a, b in zip(values(model), values(again), strict=True))


def trained(rank: int, world: int, kind: str, steps: int) -> list[Tensor]:
    """Parameters after so many steps of one way to train."""
    model, step, _, _ = trainer(kind, None, rank)
    for number in range(steps):
        step(number)
    return values(model)
