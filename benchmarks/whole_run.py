"""What a whole run gains: epochs of first visits and of changes, timed apart on emulated links.

python benchmarks/whole_run.py run --out benchmarks/results/whole_run.json
python benchmarks/whole_run.py report benchmarks/results/whole_run.json

Each case is `thinwire train --quick` (256 samples, two stages, two processes) for some epochs, all
plans of a rate one after the other, then again; the median step of the first epoch and that of the
later ones give the time of a run of E epochs: first + (E - 1) later. Bytes are counted. Resumable:
cases already in the file are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from runs import train, where_and_when

PLANS = {
    "fp32": ("raw", "raw"),
    "bf16": ("bf16", "bf16"),
    "int4 / int8": ("int4", "int8"),
    "delta(int4) / int8": ("delta(int4)", "int8"),
    "delta(int4) / int4": ("delta(int4)", "int4"),
    "delta(int2) / int4": ("delta(int2)", "int4"),
    "tile / int6": ("tile", "int6"),
    "predicted 2/4": (
        "delta(int2,first=int4,by=token+previous+drift)",
        "predicted(int4,by=target+token+activation)",
    ),
    "predicted 2/3": (
        "delta(int2,first=int4,by=token+previous+drift)",
        "predicted(int3,by=target+token+activation)",
    ),
}
RATES = ("1000mbit", "500mbit", "300mbit", "100mbit", "30mbit", "10mbit", "3mbit")
EPOCHS = (3, 10)
MEASURED_EPOCHS = 3
#: What speed-ups are over.
AGAINST = ("fp32", "bf16", "delta(int4) / int8")


def main() -> None:
    """Run what is missing, or show what there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--out", type=Path, required=True, help="result file, made or continued")
    run.add_argument("--rates", nargs="+", default=list(RATES))
    run.add_argument("--repeats", type=int, default=2)
    run.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    report = commands.add_parser("report")
    report.add_argument("results", type=Path)
    options = parser.parse_args()
    if options.command == "report":
        print(table(json.loads(options.results.read_text())["runs"]))
        return
    document: dict[str, Any] = {"runs": []}
    if options.out.exists():
        document = json.loads(options.out.read_text())
    done = {(r["plan"], r["rate"], r["repeat"]) for r in document["runs"]}
    for rate in options.rates:
        for repeat in range(options.repeats):
            for plan in options.plans:
                if (plan, rate, repeat) in done:
                    continue
                found = measure(plan, rate) | {"repeat": repeat}
                document["runs"].append(found)
                options.out.write_text(json.dumps(document, indent=1) + "\n")
                print(
                    f"{rate:9} {plan:20} first {found['first_ms']:.0f} ms, "
                    f"later {found['later_ms']:.0f} ms",
                    flush=True,
                )


def measure(plan: str, rate: str) -> dict[str, Any]:
    """Median steps of the first and of the later epochs, and bytes a step, of one run."""
    forward, backward = PLANS[plan]
    words = ["--quick", "--train.epochs", str(MEASURED_EPOCHS), "--link.rate", rate]
    words += ["--forward", forward, "--backward", backward, "--train.log_every", "1"]
    summary, steps = train(words)
    return {
        "plan": plan,
        "rate": rate,
        "first_ms": statistics.median(s["step_ms"] for s in steps[2:] if s["epoch"] == 1),
        "later_ms": statistics.median(s["step_ms"] for s in steps if s["epoch"] > 1),
        "bytes": {
            name: [_bytes(steps, name, first=True), _bytes(steps, name, first=False)]
            for name in ("forward", "backward")
        },
        "latency": summary["config"]["link"]["latency"],
        **where_and_when(words, summary),
    }


def _bytes(steps: list[dict[str, Any]], direction: str, first: bool) -> float:
    """Mean bytes a step of the first epoch, or of the later ones."""
    sums = [
        sum(
            link["payload_bytes"] + link["header_bytes"]
            for link in s["links"]
            if link["direction"] == direction
        )
        for s in steps
    ]
    last = max(k for k, s in enumerate(steps) if s["epoch"] == 1)
    if first:
        return sums[last] / (last + 1)
    return (sums[-1] - sums[last]) / (len(sums) - 1 - last)


def table(runs: list[dict[str, Any]]) -> str:
    """Speed-ups of whole runs over some plans, as Markdown."""
    lines = [
        "| rate | plan | MB a step: first, later (forward + backward) | ms a step: first, later | "
        + " | ".join(f"{e} epochs: × {', × '.join(AGAINST)}" for e in EPOCHS)
        + " |",
        "|---|---|---|---|" + "---|" * len(EPOCHS),
    ]
    for rate in dict.fromkeys(r["rate"] for r in runs):
        times = {
            plan: [
                statistics.median(r[key] for r in runs if (r["plan"], r["rate"]) == (plan, rate))
                for key in ("first_ms", "later_ms")
            ]
            for plan in PLANS
            if any((r["plan"], r["rate"]) == (plan, rate) for r in runs)
        }
        for plan, (first, later) in times.items():
            one = next(r for r in runs if (r["plan"], r["rate"]) == (plan, rate))
            sent = [sum(one["bytes"][d][k] for d in one["bytes"]) / 1e6 for k in (0, 1)]
            cells = []
            for epochs in EPOCHS:
                total = {p: a + (epochs - 1) * b for p, (a, b) in times.items()}
                against = [f"{total[p] / total[plan]:.2f}" if p in total else "–" for p in AGAINST]
                cells.append(", ".join(against))
            lines.append(
                f"| {rate} | `{plan}` | {sent[0]:.2f}, {sent[1]:.2f} | {first:.0f}, {later:.0f} | "
                + " | ".join(cells)
                + " |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
