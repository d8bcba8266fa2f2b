"""The plot of the experiment: loss above fp32 over bits a value sent; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.quality.cases import Case
from benchmarks.quality.paired import against_fp32
from benchmarks.quality.report import by_plan, grouped, noise, title
from benchmarks.quality.results import Results

_FAMILIES = {"delta": "tab:blue", "direct": "tab:red", "tile": "tab:orange", "bf16": "tab:gray"}


def draw(results: Results, file: Path) -> None:
    """One panel a setting that has more than fp32, with bars of one standard error."""
    settings = {
        setting: cases
        for setting, cases in grouped(results).items()
        if setting.layers == 4 and any(c.plan not in ("fp32", "bf16") for c in cases)
    }
    columns = min(3, len(settings))
    rows = -(-len(settings) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    floors = noise(results)
    for axis, (setting, cases) in zip(axes.flat, settings.items(), strict=False):
        _panel(axis, results, cases)
        axis.axhspan(0, max(floors.get(setting, 0.0), 1e-4), color="0.9")
        axis.set_title(title(setting), fontsize=8)
    for axis in list(axes.flat)[len(settings) :]:
        axis.set_visible(False)
    figure.savefig(file, dpi=80)
    pyplot.close(figure)


def _panel(axis: Any, results: Results, cases: list[Case]) -> None:
    axis.set_yscale("symlog", linthresh=1e-3)
    axis.set_xlabel("bits a value, both directions, whole run")
    axis.set_ylabel("validation loss above fp32")
    for plan, same in by_plan(cases).items():
        family = next((name for name in ("delta", "tile", "bf16") if plan.startswith(name)), None)
        found = against_fp32(results, same, "val_loss")
        if plan.startswith("fp32") or "ref=" in plan or found is None:
            continue
        links = next(results[case]["links"] for case in same if "links" in results[case])
        coded = sum(link["payload_bytes"] + link["header_bytes"] for link in links)
        mean_bits = 8 * coded / sum(link["values"] for link in links)
        color = _FAMILIES[family or "direct"]
        axis.errorbar(mean_bits, found.mean, yerr=found.error, fmt="o", color=color, capsize=3)
        axis.annotate(
            plan, (mean_bits, found.mean), textcoords="offset points", xytext=(4, 4), fontsize=6
        )
    axis.margins(x=0.2)
    axis.grid(alpha=0.3)
