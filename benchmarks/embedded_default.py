"""The embedded default under several plans and links: validation loss, bytes, and step time.

    python benchmarks/embedded_default.py --out benchmarks/results/embedded_default.json

Each run is `thinwire train` in processes of its own, as a user would start it. Runs that the result
file holds already are skipped, so an interrupted series goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from runs import train, where_and_when

PLANS = {
    "fp32": ("raw", "raw"),
    "bf16": ("bf16", "bf16"),
    "delta(int4) / int8": ("delta(int4)", "int8"),
    "delta(int4) / int4": ("delta(int4)", "int4"),
    "int4 / int4": ("int4", "int4"),
    "delta(int2) / int4": ("delta(int2)", "int4"),
}
KEPT = ("val_loss", "val_loss_codec", "tokens_per_s", "step_ms_median", "train_s", "steps")


def main() -> None:
    """Run what is missing, and write after each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file, made or continued")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--rates", nargs="+", default=["100mbit"], help="link rates")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--args", default="", help="further options of thinwire train, in one string"
    )
    options = parser.parse_args()
    document: dict[str, Any] = {"runs": []}
    if options.out.exists():
        document = json.loads(options.out.read_text())
    done = {(r["plan"], r["rate"], r["seed"], r["args"]) for r in document["runs"]}
    for seed in options.seeds:
        for rate in options.rates:
            for plan in options.plans:
                if (plan, rate, seed, options.args) in done:
                    continue
                run = one_run(plan, rate, seed, options.args)
                document["runs"].append(run)
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(document, indent=1) + "\n")
                print(
                    f"{plan:20} {rate:8} seed {seed}: {run['val_loss']:.4f}, "
                    f"{run['step_ms_median']:.0f} ms a step",
                    flush=True,
                )


def one_run(plan: str, rate: str, seed: int, extra: str) -> dict[str, Any]:
    """One `thinwire train`; what its summary says, and where and how it ran."""
    forward, backward = PLANS[plan]
    words = ["--forward", forward, "--backward", backward, "--link.rate", rate]
    words += ["--train.seed", str(seed), *extra.split()]
    summary, _ = train(words)
    return {
        "plan": plan,
        "rate": rate,
        "seed": seed,
        "args": extra,
        **where_and_when(words, summary),
        "data_sha256": summary["data"]["sha256"],
        **{key: summary[key] for key in KEPT},
        "links": [
            {
                k: link[k]
                for k in (
                    "direction",
                    "codec",
                    "bits_per_value",
                    "steady_bits_per_value",
                    "payload_bytes",
                    "header_bytes",
                    "raw_bytes",
                )
            }
            for link in summary["links"]
        ],
        "bound": summary["bound"],
    }


if __name__ == "__main__":
    main()
