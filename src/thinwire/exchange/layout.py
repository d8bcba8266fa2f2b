"""Where the values of a bucket's tensors lie in the buffers of the ranks that average them.

Every tensor is cut into as many parts as there are ranks, at multiples of ``align`` values, so that
groups that share a scale lie within one tensor and one part. Which rank has which values depends on
the tensor alone, not on the bucket that it is in: buckets may be formed anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Values ``start … stop`` of a tensor of the bucket, which lie at ``at`` in a rank's buffer."""

    tensor: int
    start: int
    stop: int
    at: int

    @property
    def here(self) -> slice:
        """Where they lie in the buffer."""
        return slice(self.at, self.at + self.stop - self.start)


def cut(numel: int, number: int, ranks: int, align: int) -> list[int]:
    """Where the parts of tensor ``number`` (of all that are averaged) begin, and the end: the
    parts differ by a unit of ``align`` values or less, and which are larger goes round."""
    units, more = divmod(-(-numel // align), ranks)
    bounds = [0]
    for rank in range(ranks):
        units_here = units + ((rank - number) % ranks < more)
        bounds.append(min(bounds[-1] + units_here * align, numel))
    return bounds


class Layout:
    """Of tensors of ``sizes`` values, which have ``numbers`` among all that are averaged."""

    def __init__(
        self, sizes: Sequence[int], numbers: Sequence[int], ranks: int, align: int
    ) -> None:
        self.sizes = list(sizes)
        self.spans: list[list[Span]] = [[] for _ in range(ranks)]
        self.lengths = [0] * ranks
        for tensor, (numel, number) in enumerate(zip(sizes, numbers, strict=True)):
            bounds = cut(numel, number, ranks, align)
            for rank in range(ranks):
                start, stop = bounds[rank], bounds[rank + 1]
                if start == stop:
                    continue
                self.spans[rank].append(Span(tensor, start, stop, self.lengths[rank]))
                self.lengths[rank] += -(-(stop - start) // align) * align

    def gather(
        self, tensors: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """A new buffer for each rank with the values of 1-D ``tensors``; zeros for those that are
        absent, and between tensors."""
        buffers: list[Tensor] = []
        for spans, length in zip(self.spans, self.lengths, strict=True):
            buffer = torch.empty(length, dtype=dtype, device=device)
            for span in spans:
                tensor = tensors[span.tensor]
                if tensor is None:
                    buffer[span.here] = 0
                else:
                    buffer[span.here] = tensor[span.start : span.stop]
            self.clear_between(buffer, len(buffers))
            buffers.append(buffer)
        return buffers

    def scatter(self, buffers: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
        """The reverse, into those ``tensors`` that are not None."""
        for spans, buffer in zip(self.spans, buffers, strict=True):
            for span in spans:
                tensor = tensors[span.tensor]
                if tensor is not None:
                    tensor[span.start : span.stop] = buffer[span.here]

    def clear_between(self, buffer: Tensor, rank: int) -> None:
        """Make zero what lies between tensors in a rank's buffer, which a codec may change."""
        end = 0
        for span in self.spans[rank]:
            if span.at > end:
                buffer[end : span.at] = 0
            end = span.here.stop
        buffer[end:] = 0

    def of(self, tensors: Sequence[int], rank: int) -> Iterator[slice]:
        """Where values of ``tensors`` lie in a rank's buffer."""
        chosen = set(tensors)
        return (span.here for span in self.spans[rank] if span.tensor in chosen)
