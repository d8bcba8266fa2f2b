"""What it costs a step to have references on disk instead of in RAM.

python benchmarks/reference_tiers.py --out benchmarks/results/reference_tiers.json

`thinwire train --quick` on the bare link, in turns: all references in RAM; as little RAM as is
allowed, the rest on disk; and both again. Medians of the steps after the first epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from runs import train, where_and_when

#: A sample's reference is 17,152 bytes; three steps of 16 samples are in RAM at once.
TIERS = {"RAM": [], "disk": ["--ref.budget", "900kb"]}
WORDS = ["--quick", "--link.rate", "none", "--forward", "delta(int4)"]


def main() -> None:
    """Run in turns, and write after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    medians: dict[str, list[float]] = {tier: [] for tier in TIERS}
    document: dict[str, Any] = {"step_ms": medians}
    for _ in range(options.turns):
        for tier, more in TIERS.items():
            words = [*WORDS, "--train.epochs", str(options.epochs), *more]
            summary, steps = train(words)
            medians[tier].append(statistics.median(s["step_ms"] for s in steps if s["epoch"] > 1))
            kept = ("read_bytes", "written_bytes", "late", "stalled_s", "ram_bytes", "disk_bytes")
            document[tier] = {
                "references": [{k: one[k] for k in kept} for one in summary["references"]],
                **where_and_when(words, summary),
            }
            ratios = [d / r for r, d in zip(medians["RAM"], medians["disk"], strict=False)]
            document["disk_by_ram"] = statistics.median(ratios) if ratios else None
            options.out.write_text(json.dumps(document, indent=1) + "\n")
            print(f"{tier:5} {medians[tier][-1]:.1f} ms a step", flush=True)
    print(f"disk by RAM: {document['disk_by_ram']:.3f}")


if __name__ == "__main__":
    main()
