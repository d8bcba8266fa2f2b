"""Running statistics of batch normalization, estimated anew on training samples.

They were fitted to what the codecs of training let through; with another codec at inference, or
none, the inputs of a layer have another mean and variance. One forward pass sees them: each layer
normalizes by the micro-batch at hand, as in training, while mean and variance over all samples are
summed up in float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.train import ranks
from thinwire.train.build import Run
from thinwire.train.config import ConfigError

NAMES = ("running_mean", "running_var")


class _Sums:
    """Of what enters a layer, by channel."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, x: Tensor) -> None:
        """``x`` [rows, channels, …]."""
        over = [d for d in range(x.dim()) if d != 1]
        wide = x.detach().to(torch.float64)
        self.count += x.numel() // x.shape[1]
        self.total = self.total + wide.sum(over)
        self.squares = self.squares + wide.square().sum(over)


def layers(modules: Iterable[nn.Module]) -> list[_BatchNorm]:
    """The batch normalizations that keep running statistics."""
    found = (m for module in modules for m in module.modules() if isinstance(m, _BatchNorm))
    return [layer for layer in found if layer.running_mean is not None]


def estimate(run: Run, codec: bool, samples: int) -> None:
    """Replace the running statistics of all stages by those of so many training samples, with the
    plan's codecs on the links or without (collective)."""
    device = run.place.device
    training = run.samples.training
    found = layers(run.stages)
    sums = [_Sums() for _ in found]
    upcoming = run.upcoming()
    with _watched(found, sums):
        seen = 0
        while seen < min(samples, len(training)):
            epoch, numbers = next(upcoming)
            part = run.sized(training.batch(numbers, epoch), training)
            run.pipeline.eval(
                part.inputs.to(device),
                target=part.target.to(device),
                lengths=part.lengths,
                codec=codec,
                context=run.context_of(part) if codec else None,
            )
            seen += len(numbers)
    for layer, one in zip(found, sums, strict=True):
        mean = one.total / one.count
        # unbiased, as torch keeps it
        variance = (one.squares / one.count - mean * mean) * one.count / max(one.count - 1, 1)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        layer.running_mean.copy_(torch.as_tensor(mean))
        layer.running_var.copy_(torch.as_tensor(variance).clamp(min=0))


@contextlib.contextmanager
def _watched(found: Iterable[_BatchNorm], sums: Iterable[_Sums]) -> Iterator[None]:
    """Meanwhile each layer normalizes by what it is given, and adds it to its sums."""
    changed = []
    for layer, one in zip(found, sums, strict=True):
        layer.forward = partial(_normalized, layer, one)  # type: ignore[method-assign]
        changed.append(layer)
    try:
        yield
    finally:
        for layer in changed:
            del layer.forward


def _normalized(layer: _BatchNorm, sums: _Sums, x: Tensor) -> Tensor:
    sums.add(x)
    return functional.batch_norm(
        x, None, None, layer.weight, layer.bias, training=True, eps=layer.eps
    )


def gathered(run: Run) -> dict[str, Tensor]:
    """The running statistics of all stages on all ranks, by global name (collective)."""
    own = {
        name: tensor.tolist()
        for name, tensor in run.model.named_tensors(run.stages).items()
        if name.rpartition(".")[2] in NAMES
    }
    return {
        name: torch.tensor(values, dtype=torch.float32)
        for one in ranks.gather_json(own)
        for name, values in one.items()
    }


def put(run: Run, statistics: Mapping[str, Tensor]) -> None:
    """Give this rank's stages ``statistics``; raises ConfigError where they are another model's."""
    for name, tensor in run.model.named_tensors(run.stages).items():
        if name.rpartition(".")[2] not in NAMES:
            continue
        if name not in statistics or statistics[name].shape != tensor.shape:
            raise ConfigError(f"the statistics are those of another model: {name} does not fit")
        given = statistics[name]
        sound = given.dtype == tensor.dtype and bool(torch.isfinite(given).all())
        if not sound or (name.endswith("running_var") and bool((given < 0).any())):
            raise ConfigError(
                f"the statistics are damaged: {name} has values that no layer can have"
            )
        with torch.no_grad():
            tensor.copy_(statistics[name])
