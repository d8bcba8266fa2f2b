"""The tables of the experiment, from its result files: ``tables.md``, and the plot beside it."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality import expectations
from benchmarks.quality.cases import DIRECT, LR, Case, delta
from benchmarks.quality.expectations import Plans, planned
from benchmarks.quality.paired import against_fp32, baseline, between
from benchmarks.quality.results import Results
from thinwire.study.paired import Difference

_HERE = Path(__file__).parent
_WIDE = ("int4", "delta(int4)")  # whose gradients are compared in 4 and 8 bits


def write(results: Results, folder: Path = _HERE) -> None:
    """Write ``tables.md`` and ``losses.png`` into ``folder``."""
    (folder / "tables.md").write_text("\n".join(lines(results)) + "\n", encoding="utf-8")
    try:
        from benchmarks.quality.plot import draw
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    draw(results, folder / "losses.png")


def lines(results: Results) -> Iterator[str]:
    """The whole document."""
    yield "# Tables of the quality experiment"
    yield ""
    yield f"Made by `python -m benchmarks.quality report` from {len(results)} runs."
    for setting, cases in grouped(results).items():
        yield from _section(results, setting, cases)


def grouped(results: Results) -> dict[Case, list[Case]]:
    """The cases that differ in plan and seed only, by what they share."""
    groups: dict[Case, list[Case]] = {}
    for case in results:
        shared = dataclasses.replace(case, forward="raw", backward="raw", ulp=False, seed=0)
        groups.setdefault(shared, []).append(case)
    order = {setting: place for place, setting in enumerate(groups)}
    return dict(sorted(groups.items(), key=lambda item: _rank(item[0], order[item[0]])))


def _rank(setting: Case, place: int) -> tuple[Any, ...]:
    altered = setting.lr != LR, setting.embedding_std != 0.02
    return setting.layers, altered, setting.text != "reference", setting.lr, place


def title(setting: Case) -> str:
    """What the cases of a group share, in words."""
    text = {"reference": "language reference", "persuasion": "Persuasion"}[setting.text]
    layers = "" if setting.layers == 4 else f", {setting.layers} blocks"
    loud = f", embeddings of deviation {setting.embedding_std:g}"
    return (
        f"{text}, {setting.stages} stages, {setting.epochs} epochs, "
        f"learning rate {setting.lr:g}{layers}{loud * (setting.embedding_std != 0.02)}"
    )


def by_plan(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """The cases of a group by plan, by ascending seed."""
    plans: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda c: c.seed):
        plans.setdefault(case.plan, []).append(case)
    return plans


def _section(results: Results, setting: Case, cases: list[Case]) -> Iterator[str]:
    yield from ("", f"## {title(setting)}", "")
    losses = [
        results[base]["val_loss"]
        for base in dict.fromkeys(map(baseline, cases))
        if "val_loss" in results.get(base, {})
    ]
    if losses:
        seeds = "1 seed" if len(losses) == 1 else f"mean of {len(losses)} seeds"
        yield f"fp32: validation loss {statistics.fmean(losses):.4f} ({seeds})."
        yield ""
    yield (
        "| plan | loss less that of fp32 | beyond 2 SE | codec on | seeds | MB a run | "
        "less than fp32 | bits forward | backward |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    plans = by_plan(cases)
    for plan in sorted(plans, key=lambda name: -_sent(results, plans[name])):
        if plans[plan][0] != baseline(plans[plan][0]):
            yield _row(results, plan, plans[plan])
    yield from _comparison(results, setting, plans)


def _sent(results: Results, cases: Sequence[Case]) -> int:
    """Bytes of a run over all links."""
    links: Sequence[Mapping[str, Any]] = next(
        (results[case]["links"] for case in cases if "links" in results[case]), []
    )
    return sum(link["payload_bytes"] + link["header_bytes"] for link in links)


def _row(results: Results, plan: str, cases: list[Case]) -> str:
    failed = [results[case]["failed"] for case in cases if "failed" in results[case]]
    sent = next((results[case]["links"] for case in cases if "links" in results[case]), None)
    cells = [f"`{plan}`" if "fp32," not in plan else plan]
    found = against_fp32(results, cases, "val_loss")
    coded = against_fp32(results, cases, "val_loss_codec")
    cells += [_or_dash(found), said(found), _or_dash(coded), str(len(found.values) if found else 0)]
    if sent is not None:
        coded_bytes = _sent(results, cases)
        ratio = sum(link["raw_bytes"] for link in sent) / coded_bytes
        cells += [f"{coded_bytes / 1e6:.1f}", f"{ratio:.2f}×"]
        cells += [bits(sent, direction) for direction in ("forward", "backward")]
    row = "| " + " | ".join(cells) + " |"
    return row if not failed else f"{row} {len(failed)} failed: {failed[0]} |"


def _comparison(results: Results, setting: Case, plans: Plans) -> Iterator[str]:
    """Pairs of plans: direct and delta at equal widths, gradients in 4 and 8 bits."""
    pairs = []
    for widths in DIRECT.values():
        pairs += [(widths, delta(widths, options)) for options in ("", ",ref=fp32")]
    pairs += [((activations, "int4"), (activations, "int8")) for activations in _WIDE]
    rows = []
    for one, other in pairs:
        names = [planned(setting, plan) for plan in (one, other)]
        found = between(results, *(plans.get(name, []) for name in names))
        if found is not None:
            rows.append(f"| `{names[0]}` | `{names[1]}` | {found} | {said(found)} |")
    if rows:
        yield from ("", "| plan | other | plan less other | beyond 2 SE |", "|---|---|---|---|")
        yield from rows
    expected = list(expectations.rows(results, setting, plans))
    if expected:
        yield from ("", "| expected | found | |", "|---|---|---|", *expected)


def noise(results: Results) -> dict[Case, float]:
    """By setting: the root mean square of what one ulp in the initial weights changes."""
    found = {}
    for setting, cases in grouped(results).items():
        difference = against_fp32(results, [case for case in cases if case.ulp], "val_loss")
        if difference is not None:
            found[setting] = math.sqrt(statistics.fmean(v * v for v in difference.values))
    return found


def bits(links: Sequence[Mapping[str, Any]], direction: str) -> str:
    """Bits a value over all links of a direction: steady, and the whole run where it differs."""
    chosen = [link for link in links if link["direction"] == direction]
    coded = sum(link["payload_bytes"] + link["header_bytes"] for link in chosen)
    whole = 8 * coded / sum(link["values"] for link in chosen)
    steady = [link["steady_bits_per_value"] for link in chosen]
    if None in steady:
        return f"({whole:.2f})"
    mean = statistics.fmean(steady)
    return f"{mean:.2f}" if abs(mean - whole) < 0.005 else f"{mean:.2f} ({whole:.2f})"


def said(difference: Difference | None) -> str:
    """Whether a difference is beyond two standard errors, for a table."""
    if difference is None or difference.beyond is None:
        return "–"
    return "yes" if difference.beyond else "no"


def _or_dash(difference: Difference | None) -> str:
    return "–" if difference is None else str(difference)
