"""Plots of a study: what was lost over what was sent, and loss as bytes go by; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from thinwire.study.results import Result


def draw(found: Mapping[str, Any], curves: Mapping[str, Sequence[Result]], file: Path) -> None:
    """Two panels: each plan's score over MB a run, and its validation loss over MB so far."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    _scores(left, found)
    _curves(right, curves)
    figure.suptitle(found["title"])
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def _scores(axis: Any, found: Mapping[str, Any]) -> None:
    plans = [plan for plan in found["plans"] if plan["runs"]]
    metric = (
        "accuracy" if any("accuracy" in s for p in plans for s in p["scores"].values()) else "loss"
    )
    for codec, marker in zip(
        dict.fromkeys(c for p in plans for c in p["scores"]), "osv^", strict=False
    ):
        points = [
            (p["mbytes"], p["scores"][codec][metric], p["name"])
            for p in plans
            if codec in p["scores"]
        ]
        axis.errorbar(
            [x for x, _, _ in points],
            [score["mean"] for _, score, _ in points],
            yerr=[score["error"] or 0.0 for _, score, _ in points],
            fmt=marker,
            capsize=3,
            label=f"codec {codec}",
        )
    for plan in plans:
        first = next(iter(plan["scores"].values()))[metric]["mean"]
        axis.annotate(
            plan["name"],
            (plan["mbytes"], first),
            textcoords="offset points",
            xytext=(4, 4),
            fontsize=6,
        )
    axis.set_xscale("log")
    axis.set_xlabel("MB a run, all links")
    axis.set_ylabel(f"{metric}, {found['split']} split")
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3)


def _curves(axis: Any, curves: Mapping[str, Sequence[Result]]) -> None:
    for name, runs in curves.items():
        if runs:
            points = runs[0]["curve"]
            sent = [sum(point["bytes"].values()) / 1e6 for point in points]
            axis.plot(sent, [p["val_loss_codec"] for p in points], ".-", label=name, linewidth=1)
    axis.set_xscale("log")
    axis.set_xlabel("MB so far, all links (first seed)")
    axis.set_ylabel("validation loss, codec on")
    axis.legend(fontsize=6)
    axis.grid(alpha=0.3)
