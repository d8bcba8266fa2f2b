"""Pairs of endpoints in one process, for each transport."""

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.network import EmulatedTransport, GlooTransport, MemoryTransport

distributed: Any = dist  # which does not declare all that it exports

FAST = 1e12  # bit/s: an emulated link that adds nothing to speak of
GROUP_SECONDS = 20


def memory(size: int = 2) -> list[Any]:
    first = MemoryTransport(size)
    return [first.endpoint(address) for address in range(size)]


def gloo(size: int = 2) -> list[Any]:
    """Endpoints that are joined by real sockets within this process."""
    store = distributed.HashStore()
    groups: dict[int, Any] = {}

    def join(rank: int) -> None:
        groups[rank] = distributed.ProcessGroupGloo(
            store, rank, size, timedelta(seconds=GROUP_SECONDS)
        )

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [GlooTransport(groups[rank]) for rank in range(size)]


def emulated(inner: list[Any], rate: float = FAST, latency: float = 0.0) -> list[Any]:
    """Each endpoint behind a slow link of its own."""
    if inner[0].in_process:
        first = EmulatedTransport(inner[0], rate, latency)
        return [first.endpoint(address) for address in range(len(inner))]
    return [EmulatedTransport(endpoint, rate, latency) for endpoint in inner]


KINDS: dict[str, Callable[..., list[Any]]] = {
    "memory": memory,
    "gloo": gloo,
    "emulated memory": lambda size=2: emulated(memory(size)),
    "emulated gloo": lambda size=2: emulated(gloo(size)),
}


def tcp_sockets() -> dict[str, int]:
    """File descriptors of this process's connected TCP sockets, by inode."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, or a listening socket
            target = str(path.readlink())
            if target.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as copy:
                    if copy.type == socket.SOCK_STREAM and copy.family != socket.AF_UNIX:
                        copy.getpeername()
                        found[target] = int(path.name)
    return found


def socket_bytes(descriptor: int) -> tuple[int, int]:
    """(bytes sent and acknowledged, bytes received) of a TCP socket, from the kernel."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    sent, received = struct.unpack_from("<QQ", info, 120)  # tcpi_bytes_acked, tcpi_bytes_received
    return sent, received
