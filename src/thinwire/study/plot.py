"""Plots of a study: what was lost over what was sent, and loss as bytes go by; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker
from matplotlib.lines import Line2D

from thinwire.study.results import Result

_MARKERS = "osv^"


def draw(found: Mapping[str, Any], curves: Mapping[str, Sequence[Result]], file: Path) -> None:
    """Two panels: each plan's score over MB a run, and its validation loss over MB so far. A plan
    has one colour in both."""
    names = [plan["name"] for plan in found["plans"] if plan["runs"]]
    colours = {name: _colour(number, len(names)) for number, name in enumerate(names)}
    height = 4.6 + 0.16 * max(0, len(names) - 4)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, height), layout="constrained")
    _scores(left, found, colours)
    _curves(right, curves, colours)
    for axis in (left, right):
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.grid(alpha=0.3)
    lines = [Line2D([], [], color=colour, marker=".", linewidth=1) for colour in colours.values()]
    figure.legend(lines, colours, loc="outside lower center", ncols=3, fontsize=7)
    figure.suptitle(found["title"])
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def _colour(number: int, of: int) -> Any:
    return pyplot.get_cmap("tab10" if of <= 10 else "tab20")(number % 20)


def _scores(axis: Any, found: Mapping[str, Any], colours: Mapping[str, Any]) -> None:
    plans = [plan for plan in found["plans"] if plan["runs"]]
    has = {name for plan in plans for score in plan["scores"].values() for name in score}
    metric = "accuracy" if "accuracy" in has else "loss"
    markers = dict(zip(_codecs(plans), _MARKERS, strict=False))
    for plan in plans:
        for codec, marker in markers.items():
            if codec in plan["scores"]:
                score = plan["scores"][codec][metric]
                axis.errorbar(
                    plan["mbytes"],
                    score["mean"],
                    yerr=score["error"] or 0.0,
                    fmt=marker,
                    capsize=3,
                    markersize=5,
                    color=colours[plan["name"]],
                )
    shapes = [Line2D([], [], color="gray", marker=m, linewidth=0) for m in markers.values()]
    axis.legend(shapes, [f"codec {codec}" for codec in markers], fontsize=7)
    axis.set_xlabel("MB a run, all links")
    axis.set_ylabel(f"{metric}, {found['split']} split")


def _codecs(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """How scores were found, each once."""
    return list(dict.fromkeys(codec for plan in plans for codec in plan["scores"]))


def _curves(axis: Any, curves: Mapping[str, Sequence[Result]], colours: Mapping[str, Any]) -> None:
    for name, runs in curves.items():
        if runs:
            points = runs[0]["curve"]
            sent = [sum(point["bytes"].values()) / 1e6 for point in points]
            losses = [point["val_loss_codec"] for point in points]
            axis.plot(sent, losses, ".-", linewidth=1, color=colours[name])
    axis.set_yscale("log")  # a plan that breaks down would flatten all others
    axis.yaxis.set_major_formatter(ticker.ScalarFormatter())
    axis.yaxis.set_minor_formatter(ticker.ScalarFormatter())
    axis.tick_params(axis="y", which="minor", labelsize=6)
    axis.set_xlabel("MB so far, all links (first seed)")
    axis.set_ylabel("validation loss, codec on")
