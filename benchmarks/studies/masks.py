"""Where the energy of a gradient lies that TopK thins out: at values that went forward, or not?

Trains the embedded default in four stages on TopK's activations for some steps: with the gradients'
positions their own, or those of the activations, of each sample, as the codec has it, or of each
token. Prints for each cut which share of the gradient's energy lies at values that were not sent,
which share of the tokens has no value left at all, and what those alone hold. One process.

    python -m benchmarks.studies.masks --share 0.1 --steps 81
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.train import check
from thinwire.train.arguments import read_arguments
from thinwire.train.batches import IGNORED, training_numbers
from thinwire.train.loop import learning_rate
from thinwire.train.tasks import task_of

_EVERY = 20
Found = tuple[float, float, float]  # energy not sent forward, empty tokens, energy of those


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=81)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for by_token in (False, True):
        for shared in (False, True):
            whose = "those of the activations" if shared else "their own"
            print(f"by {'token' if by_token else 'sample'}, positions of gradients {whose}")
            _train(given.share, given.steps, shared, by_token)


def _train(share: float, steps: int, shared: bool, by_token: bool) -> None:
    config = check.resolved(read_arguments(["--pipeline.stages=4", "--link.transport=memory"]))
    task = task_of(config)
    data = task.load(config)
    samples = task.split(config, data).training
    stages = task.model(config, data).stages(range(4))
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.train.lr)
    upcoming = training_numbers(len(samples), config.train.batch, 8, config.train.seed)
    total = config.train.epochs * (len(samples) // config.train.batch)
    for step in range(1, steps + 1):
        batch = samples.batch(next(upcoming)[1])
        found: list[Found] = []
        x = batch.inputs
        for stage in stages[:-1]:
            x = stage(x)
            shape = x.shape
            rows = x.flatten(0, 1) if by_token else x
            x = _Thinned.apply(rows, share, shared, found).view(shape)
        loss = functional.cross_entropy(
            stages[-1](x).flatten(0, 1), batch.target.flatten(), ignore_index=IGNORED
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total, config.train)
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.train.clip))
        optimizer.step()
        if step % _EVERY == 1:
            cuts = "  ".join("{:.4f} {:.4f} {:.4f}".format(*one) for one in reversed(found))
            print(f"step {step:4}  loss {loss.item():.3f}  norm {norm:9.3g}  {cuts}", flush=True)


class _Thinned(torch.autograd.Function):
    """The largest values of each row; and of its gradient those, or its own largest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, shared: bool, found: list[Found]) -> Tensor:
        mask = _largest(x, share)
        ctx.save_for_backward(mask)
        ctx.given = share, shared, found
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        share, shared, found = ctx.given
        energy = gradient.square()
        empty = mask.sum(-1) == 0
        of_empty = energy.sum(-1)[empty].sum() / energy.sum()
        unsent = (energy * (1 - mask)).sum() / energy.sum()
        found.append((unsent.item(), empty.float().mean().item(), of_empty.item()))
        kept = mask if shared else _largest(gradient, share)
        return gradient * kept, None, None, None


def _largest(x: Tensor, share: float) -> Tensor:
    """One at the largest values of each row, else zero."""
    rows = x.reshape(len(x), -1)
    places = rows.abs().topk(math.ceil(share * rows.shape[1]), dim=1).indices
    return torch.zeros_like(rows).scatter_(1, places, 1.0).view_as(x)


if __name__ == "__main__":
    main()
