"""A study's findings as one document of plain numbers, and that as Markdown and LaTeX."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from thinwire.study import predict
from thinwire.study.grid import Grid, Plan
from thinwire.study.paired import Difference, paired
from thinwire.study.results import Result
from thinwire.train.words import printable
from thinwire.units import parse_rate

_WAYS = "forward", "backward"
_MARGIN = 1.01  # of the baseline's loss: the target, where none is given
Best = Mapping[str, float | None]


def document(grid: Grid, results: Mapping[str, Result], best: Best) -> dict[str, Any]:
    """All that a study found, as JSON values; ``best``: the learning rate of each plan."""
    finals = {plan.name: _finals(grid, plan, results, best) for plan in grid.plans}
    base = finals[grid.baseline]
    target = grid.target or _target(base)
    least = min((_bytes(one) for runs in finals.values() for one in runs), default=0)
    return {
        "title": grid.title,
        "baseline": grid.baseline,
        "seeds": grid.seeds,
        "split": next((s["split"] for runs in finals.values() for s in _scores(runs)), None),
        "target": target,
        "equal_bytes": least,
        "rates": list(grid.rates),
        "deviations": list(grid.deviations),
        "not_run": grid.not_run,
        "plans": [
            {
                "name": plan.name,
                "lr": best.get(plan.name),
                **_facts(finals[plan.name], base, least),
                "seconds_to_target": {
                    rate: _mean(
                        predict.seconds_to(r, parse_rate(rate) or 0.0, target or 0.0)
                        for r in finals[plan.name]
                    )
                    for rate in grid.rates
                },
                "failed": [
                    result["failed"]
                    for case in grid.finals(plan, best.get(plan.name))
                    if "failed" in (result := results.get(case.key, {}))
                ],
            }
            for plan in grid.plans
        ],
    }


def _finals(grid: Grid, plan: Plan, results: Mapping[str, Result], best: Best) -> list[Result]:
    """The results of a plan that has not broken off, by seed."""
    found = (results.get(case.key) for case in grid.finals(plan, best.get(plan.name)))
    return [result for result in found if result is not None and "scores" in result]


def _target(base: Sequence[Result]) -> float | None:
    if not base:
        return None
    return _MARGIN * statistics.fmean(one["curve"][-1]["val_loss_codec"] for one in base)


def _facts(runs: Sequence[Result], base: Sequence[Result], least: int) -> dict[str, Any]:
    if not runs:
        return {"runs": 0}
    codecs = list(dict.fromkeys(score["codec"] for score in _scores(runs)))
    return {
        "runs": len(runs),
        "scores": {codec: _score(runs, base, codec) for codec in codecs},
        "mbytes": statistics.fmean(map(_bytes, runs)) / 1e6,
        "bits": {way: _bits(runs, way) for way in _WAYS},
        "gain_db": {way: _gains(runs, way) for way in _WAYS},
        "loss_at_equal_bytes": _mean(predict.loss_after(one, least) for one in runs),
    }


def _score(runs: Sequence[Result], base: Sequence[Result], codec: str) -> dict[str, Any]:
    """Loss and accuracy with one codec at evaluation: means, and what they are above the baseline's
    with the codec off, seed by seed."""
    found: dict[str, Any] = {}
    for metric in ("loss", "accuracy"):
        mine, other = _by_seed(runs, codec, metric), _by_seed(base, "off", metric)
        if not mine:
            continue
        mean, above = Difference(tuple(mine.values())), paired(mine, other)
        found[metric] = {"mean": mean.mean, "error": mean.error}
        if above is not None:
            found[metric] |= {
                "above_baseline": above.mean,
                "above_baseline_error": above.error,
                "beyond_two_errors": above.beyond,
            }
    return found


def _by_seed(runs: Sequence[Result], codec: str, metric: str) -> dict[int, float]:
    return {
        one["seed"]: score[metric]
        for one in runs
        for score in one["scores"]
        if score["codec"] == codec and metric in score
    }


def _scores(runs: Sequence[Result]) -> Iterator[Mapping[str, Any]]:
    return (score for one in runs for score in one["scores"])


def _bytes(result: Result) -> int:
    return sum(link["payload_bytes"] + link["header_bytes"] for link in result["links"])


def _bits(runs: Sequence[Result], direction: str) -> float | None:
    """Bits a value over the whole run, of all links of a direction."""
    links = [link for one in runs for link in one["links"] if link["direction"] == direction]
    values = sum(link["values"] for link in links)
    sent = sum(link["payload_bytes"] + link["header_bytes"] for link in links)
    return 8 * sent / values if values else None


def _gains(runs: Sequence[Result], direction: str) -> dict[str, float]:
    """What both ends expected has gained, in dB by kind: means over the links of a direction."""
    links = [link for one in runs for link in one["links"] if link["direction"] == direction]
    found = [link.get("gain_db", {}) for link in links]
    kinds = dict.fromkeys(kind for gains in found for kind in gains)
    return {
        kind: statistics.fmean(gains[kind] for gains in found if kind in gains) for kind in kinds
    }


def _mean(values: Iterator[float | None]) -> float | None:
    """The mean; None where one of them is None, or there are none."""
    found = list(values)
    if not found or any(value is None for value in found):
        return None
    return statistics.fmean(value for value in found if value is not None)


# As text.

Cells = list[list[str]]


def cells(found: Mapping[str, Any]) -> Cells:
    """The table: a heading, then a row for each plan."""
    codecs = list(dict.fromkeys(c for plan in found["plans"] for c in plan.get("scores", {})))
    has = {m for p in found["plans"] for s in p.get("scores", {}).values() for m in s}
    metric = "accuracy" if "accuracy" in has else "loss"
    percent = 100 if metric == "accuracy" else 1
    unit = "accuracy %" if metric == "accuracy" else "loss"
    heading = ["plan", *(["learning rate"] if any(p["lr"] for p in found["plans"]) else [])]
    heading.append("runs")
    heading += [f"{unit}, codec {codec}" for codec in codecs]
    heading += [f"less baseline, codec {codec}" for codec in codecs]
    heading += [
        "MB a run",
        "bits forward",
        "backward",
        f"loss at {found['equal_bytes'] / 1e6:.1f} MB",
    ]
    heading += [f"s to target at {rate}" for rate in found["rates"]]
    gains = any(any(plan["gain_db"].values()) for plan in found["plans"] if plan["runs"])
    heading += ["dB gained forward", "dB gained backward"] if gains else []
    rows = [heading]
    for plan in found["plans"]:
        row = [plan["name"], *([f"{plan['lr']:g}"] if "learning rate" in heading else [])]
        if not plan["runs"]:
            why = plan["failed"][0] if plan["failed"] else "not run"
            rows.append([*row, "0", why, *[""] * (len(heading) - len(row) - 2)])
            continue
        scores = [plan["scores"].get(codec, {}).get(metric) for codec in codecs]
        row.append(str(plan["runs"]))
        row += [_plus_minus(score, "mean", "error", percent) for score in scores]
        row += [
            _plus_minus(score, "above_baseline", "above_baseline_error", percent, signed=True)
            for score in scores
        ]
        bits = plan["bits"]
        row += [f"{plan['mbytes']:.1f}", _number(bits["forward"]), _number(bits["backward"])]
        row.append(_number(plan["loss_at_equal_bytes"], 4))
        row += [_number(plan["seconds_to_target"][rate], 0) for rate in found["rates"]]
        if gains:
            row += [
                ", ".join(f"{kind} {db:.1f}" for kind, db in plan["gain_db"][way].items()) or "–"
                for way in _WAYS
            ]
        rows.append(row)
    return rows


def _plus_minus(
    score: Mapping[str, Any] | None, value: str, error: str, factor: int, signed: bool = False
) -> str:
    if score is None or value not in score:
        return "–"
    decimals = 2 if factor > 1 else 4
    sign = "+" if signed and score[value] >= 0 else ""
    text = f"{sign}{factor * score[value]:.{decimals}f}"
    return text if score[error] is None else f"{text} ± {factor * score[error]:.{decimals}f}"


def _number(value: float | None, decimals: int = 2) -> str:
    return "–" if value is None else f"{value:.{decimals}f}"


def notes(found: Mapping[str, Any]) -> list[str]:
    """What there is to know beside the table."""
    lines = []
    if found["not_run"]:
        lines.append(f"Not run here: {found['not_run']}.")
    if found["split"]:
        target = "" if found["target"] is None else f"; the target is {found['target']:.4f}"
        lines.append(
            f"Scores on the {found['split']} split: means over the seeds with standard errors; "
            f"'less baseline' is paired by seed with {found['baseline']}, codec off. Times are "
            "predicted: compute of the stages side by side, or the busiest link, whichever takes "
            f"longer{target}."
        )
    lines += [f"Deviation: {text}" for text in found["deviations"]]
    failed = [(p["name"], len(p["failed"]), p["failed"][0]) for p in found["plans"] if p["failed"]]
    lines += [f"{name}: {count} of its runs broke off: {why}" for name, count, why in failed]
    return lines


def markdown(found: Mapping[str, Any]) -> str:
    """The document as Markdown."""
    heading, *rows = cells(found)
    lines = [f"# {found['title']}", "", *[f"* {note}" for note in notes(found)], ""]
    lines += [_row([_escaped(c) for c in heading]), "|" + "---|" * len(heading)]
    lines += [_row([f"`{_escaped(row[0])}`", *map(_escaped, row[1:])]) for row in rows]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("`", "'")


def _row(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


_LATEX = {
    "±": r"$\pm$",
    "–": "--",
    "\\": r"\textbackslash{}",
    **{character: rf"\{character}" for character in "%_&#{}$"},
    "^": r"\^{}",
    "~": r"\~{}",
}


def latex(found: Mapping[str, Any]) -> str:
    """The document's table as LaTeX, for the package booktabs."""
    safe: Callable[[str], str] = lambda text: "".join(_LATEX.get(c, c) for c in text)  # noqa: E731
    heading, *rows = cells(found)
    lines = [f"% {found['title']}", *[f"% {note}" for note in notes(found)]]
    lines += [r"\begin{tabular}{l" + "r" * (len(heading) - 1) + "}", r"\toprule"]
    lines += [" & ".join(map(safe, heading)) + r" \\", r"\midrule"]
    lines += [" & ".join([rf"\texttt{{{safe(r[0])}}}", *map(safe, r[1:])]) + r" \\" for r in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"
