"""A small pipeline model for distributed tests, and runs of it on torch's stages and on ours."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed import pipelining

import thinwire as tw

VOCAB, DIM, LENGTH, BATCH, SAMPLES = 40, 32, 12, 8, 24


class Block(nn.Module):
    """A causal mixing layer with a residual, cheap and sensitive to every position."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        past = h.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        y: Tensor = x + self.down(torch.nn.functional.gelu(self.up(h + past)))
        return y


class Stage(nn.Module):
    """One stage of the model: embedding first, head last, one block each."""

    def __init__(self, index: int, count: int, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.embed = nn.Embedding(VOCAB, DIM) if index == 0 else nn.Identity()
        self.block = Block(DIM)
        self.head = nn.Linear(DIM, VOCAB) if index == count - 1 else nn.Identity()
        if frozen:
            self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.block(self.embed(x)))
        return result


@dataclasses.dataclass(frozen=True)
class Case:
    """What a run does."""

    schedule: str = "Interleaved1F1B"
    num_stages: int = 2
    microbatches: int = 4
    steps: int = 6
    forward: str = "raw"
    backward: str = "raw"
    transport: str = "gloo"  # gloo, memory, or stock: torch's own stage
    clip: float | None = None
    lengths: bool = False
    lr: float = 0.05
    seed: int = 0
    frozen: int = 0  # stages, from the first on


@dataclasses.dataclass
class Outcome:
    """What a rank saw: losses (all ranks alike under ours), parameters, counters, states."""

    losses: list[float]
    parameters: dict[int, str]
    links: list[dict[str, Any]]
    digests: dict[str, int]


def batch(step: int, rows: int = BATCH, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, tokens, targets): each sample's tokens follow from its id."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randperm(SAMPLES, generator=generator)[:rows]
    tokens = torch.stack(
        [
            torch.randint(VOCAB, (length + 1,), generator=torch.Generator().manual_seed(int(i)))
            for i in ids
        ]
    )
    return ids, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def boundary(
    index: int, count: int, rows: int, length: int = LENGTH, frozen: int = 0
) -> dict[str, Tensor]:
    """Meta example tensors of a stage, of which the first ``frozen`` are."""

    def hidden(edge: int) -> Tensor:
        return torch.empty(rows, length, DIM, device="meta", requires_grad=edge >= frozen)

    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    logits = torch.empty(rows, length, VOCAB, device="meta", requires_grad=True)
    return {
        "input_args": tokens if index == 0 else hidden(index - 1),
        "output_args": logits if index == count - 1 else hidden(index),
    }


def build(
    rank: int, world_size: int, case: Case, modules: dict[int, nn.Module] | None = None
) -> tuple[list[Any], Any, tw.TokenLoss]:
    """(stages, schedule, loss) of one rank."""
    kind = pipelining.PipelineStage if case.transport == "stock" else tw.PipelineStage
    rows = -(-BATCH // case.microbatches)
    stages = []
    for index in tw.stages_of_rank(case.schedule, rank, world_size, case.num_stages):
        module = (modules or {}).get(index) or Stage(index, case.num_stages, index < case.frozen)
        example: dict[str, Any] = boundary(index, case.num_stages, rows, frozen=case.frozen)
        if case.transport == "stock":  # torch builds its buffers from real tensors' metadata
            example = {
                k: torch.zeros(v.shape, dtype=v.dtype, requires_grad=v.requires_grad)
                for k, v in example.items()
            }
        stages.append(kind(module, index, case.num_stages, torch.device("cpu"), **example))
    loss = tw.TokenLoss()
    return stages, tw.build_schedule(case.schedule, stages, case.microbatches, loss), loss


def transport_of(case: Case) -> tw.Transport | None:
    return tw.MemoryTransport() if case.transport == "memory" else None


def run(rank: int, world_size: int, case: Case) -> Outcome:
    """Train for some steps; under ``stock`` with torch's stage and the same arithmetic."""
    stages, schedule, loss = build(rank, world_size, case)
    parameters = [p for s in stages for p in s.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=case.lr, momentum=0.9)
    pipeline = None
    if case.transport != "stock":
        plan = tw.Plan(case.forward, case.backward)
        pipeline = tw.Pipeline(
            schedule,
            stages,
            plan,
            transport=transport_of(case),
            max_grad_norm=case.clip,
            deadline=30,
            seed=case.seed,
        )
    losses = []
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    for step in range(case.steps):
        ids, x, y = batch(step)
        if pipeline is not None:
            inputs = (x,) if first else ()
            known: dict[str, Any] = {"sample_ids": ids} if first else {}
            result = pipeline.step(*inputs, target=y if last else None, **known)
            losses.append(result.loss)
        else:
            loss.count = y.numel()
            found: list[Tensor] = []
            schedule.step(*((x,) if first else ()), target=y if last else None, losses=found)
            if last:
                losses.append(sum(float(x.detach()) for x in found))
        optimizer.step()
        optimizer.zero_grad()
    outcome = Outcome(
        losses,
        {s.stage_index: parameter_hash(s.submod) for s in stages},
        pipeline.link_reports() if pipeline else [],
        pipeline.state_digests() if pipeline else {},
    )
    if pipeline:
        pipeline.close()
    return outcome


def parameter_hash(module: nn.Module) -> str:
    """A hash over all parameters' bytes."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def merged(outcomes: list[Outcome]) -> dict[int, str]:
    """All stages' parameter hashes."""
    return {k: v for o in outcomes for k, v in o.parameters.items()}


def tensor_hash(x: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(x.contiguous().numpy().tobytes())


def barrier() -> None:
    dist.barrier()


def without_run(outcomes: list[Outcome]) -> list[tuple[list[float], dict[int, str]]]:
    """Losses and parameters of each rank."""
    return [(o.losses, o.parameters) for o in outcomes]
