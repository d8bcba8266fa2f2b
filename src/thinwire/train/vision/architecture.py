"""The networks on images: of which blocks they are made, and what the forward of each costs.

He et al. 2016, "Deep Residual Learning for Image Recognition", in the form for small images
(section 4.2): a 3x3 stem and no max-pool, halving the size at the first block of each layer after
the first.
"""

from __future__ import annotations

from typing import NamedTuple

_CHANNELS = 3  # of an image, for the stem's cost, which hardly depends on them


class Block(NamedTuple):
    """Two 3x3 convolutions from ``inputs`` to ``outputs`` channels; ``layer`` counts from 0."""

    name: str
    layer: int
    inputs: int
    outputs: int

    @property
    def stride(self) -> int:
        """Of the first convolution."""
        return 1 if self.inputs == self.outputs or self.layer == 0 else 2


def _blocks(widths: tuple[int, ...], depth: int) -> tuple[Block, ...]:
    """``depth`` blocks for each layer of so many channels."""
    found: list[Block] = []
    for layer, width in enumerate(widths):
        for block in range(depth):
            inputs = found[-1].outputs if found else width
            found.append(Block(f"layer{layer + 1}.{block}", layer, inputs, width))
    return tuple(found)


#: The blocks of each kind of model, in order.
BLOCKS = {
    "resnet8": _blocks((16, 32, 64), 1),
    "resnet10": _blocks((16, 32, 64, 128), 1),
    "resnet20": _blocks((16, 32, 64), 3),
    "resnet18": _blocks((64, 128, 256, 512), 2),
}


def kept(kind: str, height: int, width: int) -> int:
    """Values that the forward of an image keeps for its backward, at least: of each block what
    enters and what leaves both convolutions."""
    total = 0
    for block in BLOCKS[kind]:
        height, width = -(-height // block.stride), -(-width // block.stride)
        total += 4 * block.outputs * height * width
    return total


def costs(kind: str) -> list[int]:
    """Multiplications of each block's forward on an image, in a unit of the network; the stem's
    are the first one's."""
    blocks = BLOCKS[kind]
    last = blocks[-1].layer
    found = [(9 * _CHANNELS * blocks[0].inputs) << 2 * last]
    found += [0] * (len(blocks) - 1)
    for index, block in enumerate(blocks):
        weights = 9 * block.outputs * (block.inputs + block.outputs)
        if block.inputs != block.outputs:
            weights += block.inputs * block.outputs
        found[index] += weights << 2 * (
            last - block.layer
        )  # each layer has a quarter of the pixels
    return found
