#!/usr/bin/env python3
"""What a step of two replicas takes over a shaped link: ours, and the hooks that torch has.

    sudo .venv/bin/python -m benchmarks.gradient_exchange --json results.json

Two processes in two network namespaces train one model (16 layers of 512 x 512, 4.2 million
parameters, batches of 32) under DistributedDataParallel; the plans take turns, so that each meets
what else the machine does. Median time of a step after the first ones, over all turns, and the
bytes that a rank has sent in one, by the interface's own counter. A plan that does not end within
its time is said to hang, one that torch refuses with its reason. One thread a process.

Needs root, ``ip`` and ``tc``, as benchmarks/link_emulation.py, which makes the link.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.link_emulation import HOSTS, cpu_name, shaped_link, why_not

WIDTH, LAYERS, ROWS = 512, 16, 32
WARM_UP, PORT, SECONDS = 3, 29631, 90.0
#: Name, and what makes it: torch's own, or our spec.
PLANS = {
    "torch fp32": "torch",
    "torch bf16 hook": "torch-bf16",
    "torch PowerSGD hook, rank 4": "torch-powersgd",
    "raw": "raw",
    "bf16": "bf16",
    "ef(int4:symmetric)": "ef(int4:symmetric)",
    "ef(sign)": "ef(sign)",
    "ef(topk:0.01)": "ef(topk:0.01)",
    "powersgd:4": "powersgd:4",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, nargs="+", default=[100, 1000], help="Mbit/s")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of a turn, after the first ones")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker))
        return 0
    problem = why_not()
    if problem:
        print(f"no shaped link on this machine: {problem}", file=sys.stderr)
        return 1
    rows = [row for rate in args.rate for row in measured(rate, args.turns, args.steps)]
    if args.json:
        found = {
            "command": shlex.join(["python", "-m", "benchmarks.gradient_exchange", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "rows": rows,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measured(rate: float, turns: int, steps: int) -> list[dict[str, Any]]:
    """A row a plan."""
    times: dict[str, list[float]] = {name: [] for name in PLANS}
    sent: dict[str, float] = {}
    failed: dict[str, str] = {}
    with shaped_link(rate * 1e6, 0.0, "20kb") as names:
        for _ in range(turns):
            for name, plan in PLANS.items():
                if name in failed:
                    continue
                result = turn(names, plan, steps)
                if isinstance(result, str):
                    failed[name] = result
                else:
                    times[name] += result["ms"]
                    sent[name] = result["bytes"]
    base = statistics.median(times["torch fp32"])
    rows = []
    for name in PLANS:
        row: dict[str, Any] = {"rate_mbit": rate, "plan": name}
        if name in failed:
            row["failed"] = failed[name]
            print(f"{rate:6g} Mbit/s  {name:28s}  {failed[name]}", flush=True)
        else:
            ms = statistics.median(times[name])
            row |= {"step_ms": round(ms, 1), "bytes_sent": round(sent[name])}
            row["speed_up"] = round(base / ms, 3)
            print(
                f"{rate:6g} Mbit/s  {name:28s} {ms:8.0f} ms, {sent[name] / 1e6:7.3f} MB, "
                f"{base / ms:5.2f} x torch fp32",
                flush=True,
            )
        rows.append(row)
    return rows


def turn(names: list[str], plan: str, steps: int) -> dict[str, Any] | str:
    """One turn of a plan: its steps' times and bytes, or why there are none."""
    workers = []
    for rank, name in enumerate(names):
        asked = json.dumps({"rank": rank, "plan": plan, "steps": steps})
        command = [
            "ip",
            "netns",
            "exec",
            name,
            sys.executable,
            "-m",
            "benchmarks.gradient_exchange",
        ]
        workers.append(
            subprocess.Popen(
                [*command, "--worker", asked],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": device_of(name)},
            )
        )
    try:
        outputs = [worker.communicate(timeout=SECONDS) for worker in workers]
    except subprocess.TimeoutExpired:
        return f"hangs: no end within {SECONDS:g} s"
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(worker.returncode for worker in workers):
        lines = [line for _, error in outputs for line in error.splitlines() if "Error" in line]
        return f"refused: {(lines or ['no reason'])[0]}"
    found: dict[str, Any] = json.loads(outputs[0][0].splitlines()[-1])
    return found


def device_of(namespace: str) -> str:
    """The device of a shaped link in its namespace."""
    _, pid, side = namespace.split("-")
    return f"tw{int(pid) % 100000}{side}"


def work(asked: dict[str, Any]) -> None:
    """One replica: train, and print the times of steps."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    address = f"tcp://{HOSTS[0]}:{PORT}"
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=address, rank=asked["rank"], world_size=2, timeout=timeout
    )
    torch.manual_seed(0)
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    ddp = DistributedDataParallel(nn.Sequential(*layers))
    hook_for(asked["plan"])(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(asked["rank"])
    device = os.environ["GLOO_SOCKET_IFNAME"]
    counter = Path(f"/sys/class/net/{device}/statistics/tx_bytes")
    times, before = [], 0
    for step in range(WARM_UP + asked["steps"]):
        if step == WARM_UP:
            before = int(counter.read_text())
        begun = time.perf_counter()
        optimizer.zero_grad()
        ddp(torch.randn(ROWS, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        if step >= WARM_UP:
            times.append(1e3 * (time.perf_counter() - begun))
    dist.barrier()
    sent = (int(counter.read_text()) - before) / asked["steps"]
    print(json.dumps({"ms": times, "bytes": sent}), flush=True)
    os._exit(0)


def hook_for(plan: str) -> Callable[[Any], None]:
    """What a plan does to a model."""

    def attach(ddp: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        import thinwire as tw

        if plan == "torch":
            return
        if plan == "torch-bf16":
            ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        elif plan == "torch-powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=2
            )
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            tw.compress_ddp(ddp, plan)

    return attach


if __name__ == "__main__":
    sys.exit(main())
