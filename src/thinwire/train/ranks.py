"""What the ranks of a run tell each other outside its pipeline: JSON values and bytes.

Over the default process group, and never as pickles, as torch's ``all_gather_object`` would.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import LinkError


def gather_json(value: Any) -> list[Any]:
    """Every rank's JSON value, in rank order (collective). Raises LinkError if a rank is gone."""
    text = json.dumps(value, separators=(",", ":")).encode()
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    with _naming_the_loss():
        size = torch.tensor([own.numel()])
        sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, size)
        longest = max(int(n) for n in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        every = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(every, padded)
    return [json.loads(bytes(got[: int(n)].numpy())) for got, n in zip(every, sizes, strict=True)]


def send_bytes(data: bytes, target: int) -> None:
    """Send ``data`` to the rank ``target``, which calls ``receive_bytes``."""
    with _naming_the_loss():
        dist.send(torch.tensor([len(data)]), target)
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), target)


def receive_bytes(source: int) -> bytes:
    """What the rank ``source`` sends by ``send_bytes``."""
    with _naming_the_loss():
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, source)
    return data.numpy().tobytes()


@contextlib.contextmanager
def _naming_the_loss() -> Iterator[None]:
    """Raise what gloo says of a lost rank as the LinkError that it is."""
    try:
        yield
    except RuntimeError as error:
        raise LinkError(f"another rank is gone: {' '.join(str(error).split())}") from error
