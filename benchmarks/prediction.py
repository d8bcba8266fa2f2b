"""What predictors that both ends share are worth on the embedded default, in dB at equal width.

Trains the default in one process on exact values, cut after half of its blocks, and predicts what
would cross the link from what both ends know: tables by token (of a position and of the one before
it, of its target), learned in whole numbers from what was decoded, and linear maps of the reference
or the activation, both less their tables' means. Printed is the energy of the value (a group's mean
left out, as integer codecs do), or of the change, over that of what the prediction leaves.

    python -m benchmarks.prediction --epochs 2
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.predict import Map, Tables
from thinwire.train import check
from thinwire.train.arguments import read_arguments
from thinwire.train.batches import IGNORED, Batch, training_numbers
from thinwire.train.loop import learning_rate
from thinwire.train.tasks import task_of

_TOKENS = 256
_NONE = _TOKENS  # the token before the first
_EVERY = 50
_REFIT = 10
_MEMORY = 0.9  # of a step, when the next comes
_RIDGE = 1e-3


class Predictor:
    """Tables, and a map from a source less its own tables to what those of the target leave."""

    def __init__(self, tables: int, width: int) -> None:
        self._of_target, self._of_source = Tables(tables), Tables(tables)
        self._inner = torch.zeros(width, width, dtype=torch.float64)
        self._outer = torch.zeros(width, width, dtype=torch.float64)
        self._map: Map | None = None
        self._steps = 0
        self.spent: dict[str, list[float]] = {}

    def step(self, ids: list[Tensor], target: Tensor, base: Tensor, source: Tensor | None) -> None:
        """Predict ``target`` [n, width], count what is left of it beside ``base``, and learn."""
        left = _rest(self._of_target, ids, target)
        self._count("tables", base, left)
        if source is not None:
            codes, scales = self._of_source.centred(ids, source)
            self._count(
                "and map", base, left if self._map is None else left - self._map(codes, scales)
            )
            self._fit((codes * scales[:, None]).double(), left.double())
            _learn(self._of_source, ids, source)
        _learn(self._of_target, ids, target)

    def _fit(self, source: Tensor, target: Tensor) -> None:
        self._steps += 1
        self._inner = _MEMORY * self._inner + source.T @ source
        self._outer = _MEMORY * self._outer + source.T @ target
        if self._steps % _REFIT == 0:
            ridge = _RIDGE * self._inner.diagonal().mean() * torch.eye(len(self._inner))
            self._map = Map.of(torch.linalg.solve(self._inner + ridge, self._outer))

    def _count(self, name: str, base: Tensor, left: Tensor) -> None:
        sums = self.spent.setdefault(name, [0.0, 0.0])
        sums[0] += float(base.square().sum())
        sums[1] += float(left.square().sum())

    def gains(self) -> str:
        """In dB, since the last call."""
        shown = [f"{name} {10 * math.log10(a / b):5.2f}" for name, (a, b) in self.spent.items()]
        self.spent.clear()
        return ", ".join(shown)


def _rest(tables: Tables, ids: list[Tensor], x: Tensor) -> Tensor:
    """What the tables leave of ``x``."""
    known = tables(ids)
    return x if known is None else x - known


def _learn(tables: Tables, ids: list[Tensor], x: Tensor) -> None:
    tables.learn(ids, x.clone(), x.abs().amax(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    words = [f"--train.seed={given.seed}", "--pipeline.stages=2", "--link.transport=memory"]
    config = check.resolved(read_arguments(words))
    task = task_of(config)
    data = task.load(config)
    samples = task.split(config, data).training
    stages = task.model(config, data).stages(range(2))
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.train.lr)
    width, per_epoch = config.model.dim, len(samples) // config.train.batch
    forward = {"first visit": Predictor(2, width), "change": Predictor(2, width)}
    backward = Predictor(2, width)
    held: dict[int, Tensor] = {}
    upcoming = training_numbers(len(samples), config.train.batch, 8, config.train.seed)
    for step in range(1, given.epochs * per_epoch + 1):
        batch = samples.batch(next(upcoming)[1])
        sent = stages[0](batch.inputs)
        crossed = sent.detach().requires_grad_()
        loss = functional.cross_entropy(
            stages[1](crossed).flatten(0, 1), batch.target.flatten(), ignore_index=IGNORED
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.train.epochs * per_epoch, config.train)
        optimizer.zero_grad()
        loss.backward()
        assert crossed.grad is not None
        sent.backward(crossed.grad)
        torch.nn.utils.clip_grad_norm_(parameters, config.train.clip)
        optimizer.step()
        _predict(batch, crossed.detach(), crossed.grad, held, forward, backward)
        if step % _EVERY == 0:
            found = {**forward, "gradient": backward}
            told = [f"{name}: {one.gains()}" for name, one in found.items() if one.spent]
            print(f"step {step:4}  loss {loss.item():.3f}  dB  " + "; ".join(told), flush=True)


def _predict(
    batch: Batch,
    value: Tensor,
    gradient: Tensor,
    held: dict[int, Tensor],
    forward: dict[str, Predictor],
    backward: Predictor,
) -> None:
    """One message each way; references are exact here."""
    before = torch.cat([torch.full_like(batch.inputs[:, :1], _NONE), batch.inputs[:, :-1]], dim=1)
    valid = batch.target != IGNORED
    seen = torch.tensor([key in held for key in batch.sample_ids.tolist()])
    for kind, rows in (("first visit", ~seen), ("change", seen)):
        there = valid & rows[:, None]
        if not bool(there.any()):
            continue
        ids, v = [batch.inputs[there], before[there]], value[there]
        if kind == "first visit":
            forward[kind].step(ids, v, v - v.mean(1, keepdim=True), None)
            continue
        keys = batch.sample_ids[rows].tolist()
        m = torch.stack([held[key] for key in keys])[valid[rows]]
        forward[kind].step(ids, v - m, v - m, m)
    g = gradient[valid] * int(valid.sum())
    backward.step([batch.target[valid], batch.inputs[valid]], g, g, value[valid])
    held |= dict(zip(batch.sample_ids.tolist(), value, strict=True))


if __name__ == "__main__":
    main()
