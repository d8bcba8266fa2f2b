"""The comparison of a compressed run with the same one in fp32 and in bf16."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from thinwire.train.report import new_table, sent_bytes
from thinwire.train.words import counted

#: Of a summary, those that are compared where they are there.
_NUMBERS = [
    f"{part}_{what}{codec}"
    for part in ("val", "test")
    for what in ("loss", "accuracy")
    for codec in ("", "_codec")
]


def compared(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Speed and loss of the run ``compressed`` against ``fp32`` and ``bf16``, from summaries."""
    ours = runs["compressed"]
    return {
        f"against_{name}": {
            "speedup_step": other["step_ms_median"] / ours["step_ms_median"],
            "speedup_run": other["train_s"] / ours["train_s"],
            "traffic_ratio": (
                sent_bytes(other["links"]) / sent_bytes(ours["links"]) if ours["links"] else None
            ),
            **{f"{n}_difference": ours[n] - other[n] for n in _NUMBERS if n in ours},
        }
        for name, other in runs.items()
        if name != "compressed"
    }


def sentence(differences: dict[str, Any], runs: dict[str, dict[str, Any]]) -> str:
    """The comparison in words, with what it rests on."""
    parts = [
        f"{against['speedup_run']:.2f}x as fast as {name.removeprefix('against_')} "
        f"({against['speedup_step']:.2f}x by the median step), "
        f"validation loss {against['val_loss_difference']:+.4f}{_accuracy(against)}"
        for name, against in differences.items()
    ]
    ours = runs["compressed"]
    over = f"Over {counted(ours['steps'], 'step')}"
    if any("first" in link["kinds"] for link in ours["links"]):
        over += ", first visits included,"
    return f"{over} the compressed run is {'; '.join(parts)}."


def _accuracy(against: dict[str, float]) -> str:
    """The difference in accuracy, in points of a hundred, where there is one."""
    difference = against.get("val_accuracy_difference")
    return "" if difference is None else f", accuracy {100 * difference:+.2f} points"


def table(runs: dict[str, dict[str, Any]]) -> Table:
    """One row a run: validation loss codec off and on, times, traffic, against fp32 the speed-up by
    the median step and by the run, and the difference in loss; and the accuracy, codec off.
    """
    made = new_table("Compared on the same schedule and link", "run")
    headings = ["loss", "codec on", "step ms", "run s", "MB", "x step", "x run", "- fp32"]
    fp32 = runs["fp32"]
    has_accuracy = "val_accuracy" in fp32
    for heading in [*headings, "accuracy"] if has_accuracy else headings:
        made.add_column(heading, justify="right", no_wrap=True)
    for name, run in runs.items():
        plan = run["config"]["plan"]
        made.add_row(
            f"{name} {plan['forward']} {plan['backward']}",
            f"{run['val_loss']:.4f}",
            f"{run['val_loss_codec']:.4f}",
            f"{run['step_ms_median']:.1f}",
            f"{run['train_s']:.1f}",
            f"{sent_bytes(run['links']) / 1e6:.1f}",
            f"{fp32['step_ms_median'] / run['step_ms_median']:.2f}x",
            f"{fp32['train_s'] / run['train_s']:.2f}x",
            f"{run['val_loss'] - fp32['val_loss']:+.4f}",
            *([f"{100 * run['val_accuracy']:.2f} %"] if has_accuracy else []),
        )
    return made
