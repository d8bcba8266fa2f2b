"""Residual networks for small images, cut into stages between their blocks.

The boundary is one float tensor ``[rows, channels, height, width]``, as it leaves the ReLU at the
end of a block. A parameter's first value depends on its global name and the seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.train.config import Config
from thinwire.train.stage import Stage, draw
from thinwire.train.task import Model
from thinwire.train.vision import architecture
from thinwire.train.vision.architecture import BLOCKS
from thinwire.train.vision.cuts import stops


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each with BatchNorm, beside a shortcut."""

    def __init__(self, block: architecture.Block) -> None:
        super().__init__()
        self.conv1 = _convolution(block.inputs, block.outputs, 3, block.stride)
        self.bn1 = nn.BatchNorm2d(block.outputs)
        self.conv2 = _convolution(block.outputs, block.outputs, 3, 1)
        self.bn2 = nn.BatchNorm2d(block.outputs)
        self.downsample = None
        if block.inputs != block.outputs:
            self.downsample = nn.Sequential(
                _convolution(block.inputs, block.outputs, 1, block.stride),
                nn.BatchNorm2d(block.outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class ResNetStage(Stage):
    """The blocks ``first`` to before ``stop``; the first stage has the stem, the last the head."""

    def __init__(
        self, kind: str, stage_index: int, first: int, stop: int, channels: int, classes: int
    ) -> None:
        super().__init__(stage_index)
        blocks = BLOCKS[kind]
        self.has_stem, self.has_head = first == 0, stop == len(blocks)
        if self.has_stem:
            self.conv1 = _convolution(channels, blocks[0].inputs, 3, 1)
            self.bn1 = nn.BatchNorm2d(blocks[0].inputs)
        self.names = [block.name for block in blocks[first:stop]]
        for block in blocks[first:stop]:
            layer, _, number = block.name.partition(".")
            if not hasattr(self, layer):
                self.add_module(layer, nn.ModuleDict())
            self.get_submodule(layer).add_module(number, BasicBlock(block))
        if self.has_head:
            self.fc = nn.Linear(blocks[-1].outputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.has_stem:
            x = functional.relu(self.bn1(self.conv1(x)))
        for name in self.names:
            x = self.get_submodule(name)(x)
        if self.has_head:
            x = self.fc(x.mean((2, 3)))
        return x

    def freeze(self, names: Sequence[str]) -> None:
        """Leave blocks as they are, and the stem; BatchNorm in them uses its running statistics,
        which do not move."""
        frozen = [self.get_submodule(name) for name in self.names if name in names]
        if self.has_stem and names:
            frozen += [self.conv1, self.bn1]
        for module in frozen:
            module.requires_grad_(False).eval()


class ResNet(Model):
    """The network of a run, for images of ``shape``: channels, height and width."""

    draws = False

    def __init__(self, config: Config, shape: tuple[int, int, int], classes: int) -> None:
        self.config, self.shape, self.classes = config, shape, classes
        self.kind = config.model.kind
        self._stops = stops(config)
        self._frozen = [block.name for block in BLOCKS[self.kind][: config.train.frozen]]

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            stages = [self._stage(index) for index in range(len(self._stops))]
        return sum(p.numel() for stage in stages for p in stage.parameters())

    @property
    def frozen(self) -> str:
        return f"the stem and {len(self._frozen)} of {len(BLOCKS[self.kind])} blocks"

    def _stage(self, index: int) -> ResNetStage:
        first = self._stops[index - 1] if index else 0
        return ResNetStage(self.kind, index, first, self._stops[index], self.shape[0], self.classes)

    def stages(self, indices: Sequence[int]) -> list[Stage]:
        found: list[Stage] = []
        for index in indices:
            with torch.device("meta"):
                stage = self._stage(index)
            stage.to_empty(device="cpu")
            _initialise(stage, self.config.train.seed)
            stage.freeze(self._frozen)
            found.append(stage)
        return found

    def inputs(self, rows: int) -> Tensor:
        return torch.empty(rows, *self.shape, device="meta")

    def boundary(self, edge: int, rows: int) -> Tensor:
        stop = self._stops[edge]
        before = BLOCKS[self.kind][:stop]
        _, height, width = self.shape
        for block in before:
            height, width = -(-height // block.stride), -(-width // block.stride)
        shape = (rows, before[-1].outputs, height, width)
        return torch.empty(shape, device="meta", requires_grad=stop > len(self._frozen))

    def outputs(self, rows: int) -> Tensor:
        return torch.empty(rows, self.classes, device="meta", requires_grad=True)

    def named_tensors(self, stages: Sequence[Stage]) -> dict[str, Tensor]:
        return {
            name: tensor
            for stage in stages
            for name, tensor in stage.state_dict(keep_vars=True).items()
        }


def _initialise(stage: ResNetStage, seed: int) -> None:
    """He et al.'s scale by the outputs of a convolution, drawn from a uniform distribution; of the
    head the square root of its inputs."""
    with torch.no_grad():
        for module in stage.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
        for name, parameter in stage.named_parameters():
            if parameter.ndim == 4:
                outputs, _, height, width = parameter.shape
                draw(parameter, math.sqrt(6 / (outputs * height * width)), seed, name)
            elif parameter.ndim == 2:
                draw(parameter, 1 / math.sqrt(parameter.shape[1]), seed, name)
            else:
                parameter.fill_(float(name.endswith("weight")))
