#!/usr/bin/env python3
"""How close is the emulated link to a shaped one? Prints the ratio of times, case by case.

    sudo .venv/bin/python benchmarks/link_emulation.py --json benchmarks/results/link_emulation.json

The shaped link joins two network namespaces: a veth pair with a token bucket (tbf) at either end.
With a latency it is a pair of TAP devices instead, behind the same token buckets, and this process
carries their packets over after the delay (netem, which many kernels lack, is not needed). The
buckets hold little more than a packet, since a physical link saves up nothing: with 64 kB, the
first 64 kB after each pause would pass at once.

A plain socket first checks the rate. Then two processes exchange messages through
``GlooTransport`` over that link, and through ``EmulatedTransport`` over loopback with the same
rate and latency:

* stream: messages sent at once, received in order, sixteen receives posted ahead; the time from the
  arrival of the warm-up's last message to that of the last one, a message;
* both: the same in both directions at the same time;
* ping-pong: one message at a time to and fro; the median time of a round.

Each is run three times, and the median counts. The shaped link needs processor time that a real
one does not, the relay most of all: on two cores it falls behind its own rate at 300 Mbit/s both
ways. What its bucket holds, it lets pass at once: 0.4 ms of each message at 100 Mbit/s.

Needs root, ``ip`` and ``tc``; says so where namespaces cannot be made. Everything that it makes on
the machine is removed at the end, after a failure and on Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import json
import os
import platform
import select
import shlex
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOSTS = ("10.213.0.1", "10.213.0.2")
PORT = 29611
PLAIN_BYTES = 3 << 20
SECONDS_A_CASE = 0.8
REPEATS = 3
SIZES = (1 << 16, 1 << 18, 1 << 20)  # smaller messages would measure the processor
WARM_UP_BYTES = 1 << 20
WINDOW = 16


def main() -> int:
    args = parse_arguments()
    if args.worker:
        work(args)
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    problem = why_not()
    if problem:
        print(f"no shaped link on this machine: {problem}", file=sys.stderr)
        return 1
    results = []
    for rate in args.rate:
        for latency in args.latency:
            try:
                results.append(compare(rate * 1e6, latency * 1e-3, args.burst))
            except (OSError, subprocess.SubprocessError, RuntimeError) as error:
                print(f"{rate:g} Mbit/s, {latency:g} ms: {error}", file=sys.stderr)
                return 1
            show(results[-1])
    worst = max((abs(c["ratio"] - 1) for r in results for c in r["cases"]), default=0.0)
    print(f"largest deviation of the emulated link from the shaped one: {100 * worst:.1f} %")
    if args.json:
        args.json.write_text(json.dumps(report(results, worst), indent=1) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, nargs="+", default=[100, 300], help="Mbit/s")
    parser.add_argument("--latency", type=float, nargs="+", default=[0, 5], help="ms, one way")
    parser.add_argument("--burst", default="5kb", help="of the token buckets, as tc writes it")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def why_not() -> str | None:
    """What keeps this machine from making a shaped link, in a few words."""
    if os.geteuid() != 0:
        return "root is needed to make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (Debian, Ubuntu: apt install iproute2)"
    name = f"tw-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


def report(results: list[dict[str, Any]], worst: float) -> dict[str, Any]:
    import torch

    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "kernel": platform.release().split("-")[0],
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "largest_deviation": round(worst, 4),
        "results": results,
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


# The shaped link.


def run(command: str) -> None:
    done = subprocess.run(
        shlex.split(command), check=False, capture_output=True, text=True, timeout=20
    )
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


@contextlib.contextmanager
def shaped_link(rate: float, latency: float, burst: str) -> Iterator[list[str]]:
    """Two namespaces joined by a shaped link; yields their names."""
    names = [f"tw-{os.getpid()}-{side}" for side in "ab"]
    devices = [f"tw{os.getpid() % 100000}{side}" for side in "ab"]
    with contextlib.ExitStack() as stack:
        for name in names:
            # the namespace's end is the end of the devices in it
            stack.callback(
                subprocess.run, ["ip", "netns", "del", name], check=False, capture_output=True
            )
            run(f"ip netns add {name}")
        if latency:
            relay = stack.enter_context(Relay(devices, latency))
            for name, device in zip(names, devices, strict=True):
                run(f"ip link set {device} netns {name}")
        else:
            run(
                f"ip link add {devices[0]} netns {names[0]} type veth "
                f"peer name {devices[1]} netns {names[1]}"
            )
        for name, device, host in zip(names, devices, HOSTS, strict=True):
            inside = f"ip netns exec {name}"
            run(f"{inside} ip addr add {host}/24 dev {device}")
            run(f"{inside} ip link set lo up")
            run(f"{inside} sysctl -q -w net.ipv4.tcp_congestion_control=reno")
            run(f"{inside} ip link set {device} txqueuelen 10000 up")
            run(
                f"{inside} tc qdisc add dev {device} root tbf rate {rate:.0f}bit "
                f"burst {burst} latency 400ms"
            )
        if latency:
            relay.start()
        yield names


class Relay:
    """Carries packets between two TAP devices, each ``latency`` seconds after it was read.

    Packets keep their offload header (IFF_VNET_HDR), so large segments pass as on a veth pair.
    """

    def __init__(self, devices: list[str], latency: float) -> None:
        self.latency = latency
        self._files: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        for device in devices:
            file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self._files.append(file)
            tap, no_info, offload_header = 0x0002, 0x1000, 0x4000
            request = struct.pack("16sH22x", device.encode(), tap | no_info | offload_header)
            fcntl.ioctl(file, 0x400454CA, request)  # TUNSETIFF
            fcntl.ioctl(file, 0x400454D0, 0x01 | 0x02)  # TUNSETOFFLOAD: checksums, TCP segments

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for file in self._files:
            os.close(file)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        a, b = self._files
        other = {a: b, b: a}
        under_way: deque[tuple[float, int, bytes]] = deque()
        while not self._stop.is_set():
            left = under_way[0][0] - time.monotonic() if under_way else 0.2
            ready, _, _ = select.select(self._files, [], [], max(left, 0))
            now = time.monotonic()
            for file in ready:
                with contextlib.suppress(BlockingIOError):
                    under_way.append((now + self.latency, other[file], os.read(file, 1 << 17)))
            while under_way and under_way[0][0] <= time.monotonic():
                _, target, packet = under_way.popleft()
                with contextlib.suppress(OSError):
                    os.write(target, packet)


def plain_rate(names: list[str]) -> float:
    """bit/s of payload through a plain socket, the bucket's first burst left out."""
    code = f"import link_emulation as m; m.plain_{{}}({HOSTS[1]!r})"
    with contextlib.ExitStack() as stack:
        receiver, sender = (
            stack.enter_context(child(["-c", code.format(role)], name))
            for role, name in (("receive", names[1]), ("send", names[0]))
        )
        (out, _), _ = receiver.communicate(timeout=60), sender.communicate(timeout=60)
    return float(out)


def plain_receive(host: str) -> None:
    with socket.create_server((host, PORT)) as server:
        connection, _ = server.accept()
        with connection:
            skipped, start, count = 0, 0.0, 0
            while data := connection.recv(1 << 16):
                if skipped < PLAIN_BYTES // 3:
                    skipped += len(data)
                    start = time.monotonic()
                else:
                    count += len(data)
                    end = time.monotonic()
    print(8 * count / (end - start))


def plain_send(host: str) -> None:
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            with socket.create_connection((host, PORT)) as connection:
                connection.sendall(bytes(PLAIN_BYTES))
            return
        time.sleep(0.1)


# Runs of both links.


@contextlib.contextmanager
def child(arguments: list[str], namespace: str | None) -> Iterator[subprocess.Popen[str]]:
    """A Python process, in a namespace or not, that ends with the block."""
    source = Path(__file__).resolve().parent
    path = [str(source), str(source.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    inside = ["ip", "netns", "exec", namespace] if namespace else []
    process = subprocess.Popen(
        [*inside, sys.executable, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def compare(rate: float, latency: float, burst: str) -> dict[str, Any]:
    """All cases on both links, and their ratios."""
    with shaped_link(rate, latency, burst) as names:
        found = plain_rate(names)
        shaped = measure(rate, latency, names)
    emulated = measure(rate, latency, None)
    cases = [
        {
            "case": case,
            "bytes": size,
            "shaped_ms": round(1e3 * shaped[case, size], 3),
            "emulated_ms": round(1e3 * emulated[case, size], 3),
            "ratio": round(emulated[case, size] / shaped[case, size], 4),
        }
        for case, size in shaped
    ]
    return {
        "rate_mbit": rate / 1e6,
        "latency_ms": latency * 1e3,
        "burst": burst,
        "plain_socket_mbit": round(found / 1e6, 1),
        "cases": cases,
    }


def measure(rate: float, latency: float, names: list[str] | None) -> dict[tuple[str, int], float]:
    """Seconds by (case, bytes), on the shaped link between ``names``, or on the emulated one."""
    host = HOSTS[0] if names else "127.0.0.1"
    with contextlib.ExitStack() as stack:
        workers = []
        for rank in range(2):
            task = {"rank": rank, "host": host, "rate": rate, "latency": latency}
            task["emulated"] = names is None
            arguments = [__file__, "--worker", json.dumps(task)]
            workers.append(stack.enter_context(child(arguments, names[rank] if names else None)))
        outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError("a measuring process failed; its error is above")
    return {(case, size): seconds for case, size, seconds in json.loads(outputs[1])}


def work(args: argparse.Namespace) -> None:
    """One of the two measuring processes; rank 1 prints what it measured."""
    import torch.distributed as dist

    import thinwire as tw

    task = json.loads(args.worker)
    if not task["emulated"]:
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(HOSTS[task["rank"]])
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{task['host']}:{PORT}",
        rank=task["rank"],
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    transport: tw.Transport = tw.GlooTransport()
    if task["emulated"]:
        transport = tw.EmulatedTransport(transport, task["rate"], task["latency"])
    found = []
    for case in ("stream", "both", "ping-pong"):
        for size in SIZES:
            round_time = 16 * size / task["rate"] + 2 * task["latency"]
            if case == "ping-pong":
                rounds = max(8, int(SECONDS_A_CASE / round_time))
                times = [ping_pong(transport, size, rounds) for _ in range(REPEATS)]
            else:
                count = max(8, int(SECONDS_A_CASE * task["rate"] / (8 * size)))
                times = [
                    stream(transport, size, count, both=case == "both") for _ in range(REPEATS)
                ]
            found.append((case, size, statistics.median(times)))
    if task["rank"] == 1:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def interface_of(address: str) -> str:
    """The name of the network device that has an address."""
    out = subprocess.run(["ip", "-j", "addr"], capture_output=True, text=True, check=True).stdout
    for device in json.loads(out):
        if any(a.get("local") == address for a in device["addr_info"]):
            return str(device["ifname"])
    raise RuntimeError(f"no device has the address {address}")


def stream(transport: Any, size: int, count: int, both: bool) -> float:
    """Seconds a message of a stream from endpoint 0 to 1, and back at the same time if ``both``."""
    peer = 1 - transport.address
    receives = both or transport.address == 1
    warm = max(2, WARM_UP_BYTES // size)
    message = bytes(size)
    handles: deque[Any] = deque()
    synchronize(transport)
    if receives:
        handles.extend(
            transport.post_receive(peer, 1, size) for _ in range(min(WINDOW, warm + count))
        )
    if both or transport.address == 0:
        for _ in range(warm + count):
            transport.send(peer, 1, [message])
    start = 0.0
    for k in range((warm + count) * receives):
        transport.wait(handles.popleft(), 60)
        if k + WINDOW < warm + count:
            handles.append(transport.post_receive(peer, 1, size))
        if k == warm - 1:
            start = time.monotonic()
    end = time.monotonic()
    synchronize(transport)
    transport.flush(60)
    return (end - start) / count


def ping_pong(transport: Any, size: int, rounds: int) -> float:
    """Median seconds of a round of a message to the other side and back."""
    peer = 1 - transport.address
    message = bytes(size)
    times = []
    synchronize(transport)
    handle = transport.post_receive(peer, 2, size)
    for k in range(rounds):
        start = time.monotonic()
        if transport.address == 1:
            transport.send(peer, 2, [message])
        transport.wait(handle, 60)
        if k < rounds - 1:
            handle = transport.post_receive(peer, 2, size)
        if transport.address == 0:
            transport.send(peer, 2, [message])
        times.append(time.monotonic() - start)
    synchronize(transport)
    transport.flush(60)
    return statistics.median(times)


def synchronize(transport: Any) -> None:
    """Both sides are here, with nothing under way."""
    peer = 1 - transport.address
    handle = transport.post_receive(peer, 3, 1)
    transport.send(peer, 3, [b"x"])
    transport.wait(handle, 60)


def show(result: dict[str, Any]) -> None:
    print(
        f"{result['rate_mbit']:g} Mbit/s, {result['latency_ms']:g} ms, burst {result['burst']}: "
        f"plain socket {result['plain_socket_mbit']:.1f} Mbit/s"
    )
    print(f"  {'case':10} {'bytes':>8} {'shaped ms':>10} {'emulated ms':>12} {'ratio':>7}")
    for c in result["cases"]:
        print(
            f"  {c['case']:10} {c['bytes']:8} {c['shaped_ms']:10.3f} {c['emulated_ms']:12.3f} "
            f"{c['ratio']:7.3f}"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
