"""Zstandard frames of a known size, level 1; what comes from a link is not trusted."""

from __future__ import annotations

import threading

import numpy as np
import torch
import zstandard
from torch import Tensor

_LEVEL = 1
#: What level 1 needs is half of this; a frame may demand no more memory.
_LARGEST_WINDOW = 1 << 20


class _Local(threading.local):
    """Contexts that a thread keeps: to make one costs more than to compress a few kilobytes."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)


_local = _Local()


def compress(data: Tensor) -> Tensor:
    """One frame, 1-D uint8 on the CPU, that holds ``data``, 1-D uint8 on any device."""
    frame = _local.compressor.compress(data.cpu().contiguous().numpy().data)
    # a copy: the tensor may be written to, which bytes may not
    return torch.from_numpy(np.frombuffer(frame, dtype=np.uint8).copy())


def decompress(frame: Tensor, size: int) -> Tensor:
    """The ``size`` bytes, 1-D uint8 on the CPU, that ``frame`` holds.

    Raises ValueError, before any memory is taken, if it announces another size or too large a
    window; and if it is damaged, holds another size than it announces, or ends early or late.
    """
    data = frame.cpu().contiguous().numpy().data
    try:
        header = zstandard.get_frame_parameters(data)
        if header.content_size != size:
            raise ValueError(f"a zstd frame of {header.content_size} bytes, {size} expected")
        if header.window_size > _LARGEST_WINDOW:  # max_window_size is not minded in one go
            raise ValueError(f"a zstd frame with a window of {header.window_size} bytes")
        found = _local.decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"a damaged zstd frame: {error}") from None
    if len(found) != size:
        raise ValueError(f"a zstd frame that holds {len(found)} bytes, not {size} as it says")
    return torch.from_numpy(np.frombuffer(found, dtype=np.uint8).copy())
