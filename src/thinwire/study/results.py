"""What each finished run of a study reached and sent: a line of JSON in ``results.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.form import Check, fault, list_of, number, record, text, values_of, whole
from thinwire.study.grid import Case
from thinwire.train.metrics import read_metrics

RESULTS = "results.jsonl"
Result = Mapping[str, Any]

_LINK = (
    *("edge", "direction", "codec", "payload_bytes", "header_bytes", "values", "bits_per_value"),
    *("steady_bits_per_value", "gain_db"),
)


def load(folder: Path) -> dict[str, Result]:
    """The results in a study's folder by their case's key; a line that is cut short, or no result,
    is left out: its run is done once more."""
    file = folder / RESULTS
    found: dict[str, Result] = {}
    for line in file.read_bytes().splitlines() if file.exists() else []:
        try:
            result = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(result, dict) and _is_result(result):
            found[result["key"]] = result
    return found


def _finite(value: Any) -> bool:
    return number(value) and abs(value) < _LARGEST


def _some(check: Check) -> Check:
    return lambda value: list_of(check)(value) and bool(value)


_LARGEST = 1e100  # sums of squares stay finite
_NAMED = {"key": text, "seed": whole}
_BROKEN = {**_NAMED, "failed": text}
_COMPLETE = {
    **_NAMED,
    "scores": _some(record({"split": text, "codec": text, "loss": _finite})),
    "links": list_of(
        record({"direction": text, "payload_bytes": whole, "header_bytes": whole, "values": whole})
    ),
    "curve": _some(
        record({"step": whole, "val_loss_codec": _finite, "bytes": values_of(whole)}),
    ),
    "compute_ms": _finite,
    "stages": whole,
    "microbatches": whole,
}


def _is_result(value: Mapping[str, Any]) -> bool:
    """Whether all is there that tables are made of."""
    if "failed" in value:
        return fault(value, _BROKEN) is None
    return (
        fault(value, _COMPLETE) is None
        and all(_finite(score.get("accuracy", 0)) for score in value["scores"])
        and value["stages"] > 0
        and value["microbatches"] > 0
    )


def append(folder: Path, result: Result) -> None:
    """Add one result, on a line of its own whatever was cut short before it."""
    file = folder / RESULTS
    begun = file.exists() and not file.read_bytes().endswith(b"\n") and file.stat().st_size > 0
    with file.open("a", encoding="utf-8") as out:
        out.write("\n" * begun + json.dumps(result) + "\n")


def of_run(
    case: Case, run: Path, summary: Mapping[str, Any], more: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """The result of a run that is complete; ``more`` scores than its summary has."""
    config = summary["config"]
    return {
        **_named(case),
        "scores": [*scores(summary), *map(dict, more)],
        "train_loss": summary["train_loss"],
        "links": [{name: link[name] for name in _LINK} for link in summary["links"]],
        "curve": curve(read_metrics(run), summary),
        "compute_ms": summary["bound"]["compute_ms"],
        "stages": config["pipeline"]["stages"],
        "microbatches": config["pipeline"]["microbatches"],
        "steps": summary["steps"],
        "epochs": summary["epochs"],
        "parameters": summary["parameters"],
        "data": summary["data"],
        "versions": summary["versions"],
    }


def scores(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a run reached, with the codec off and on; on the test split where there is one."""
    split = split_of(summary)
    found = []
    for codec, ending in (("off", ""), ("as-trained", "_codec")):
        score = {"split": split, "codec": codec, "loss": summary[f"{split}_loss{ending}"]}
        if f"{split}_accuracy{ending}" in summary:
            score["accuracy"] = summary[f"{split}_accuracy{ending}"]
        found.append(score)
    return found


def split_of(summary: Mapping[str, Any]) -> str:
    """The split that final numbers are of."""
    return "test" if "test_loss" in summary else "val"


def of_failure(case: Case, why: str) -> dict[str, Any]:
    """The result of a run that broke off, as with a loss that is not finite."""
    return {**_named(case), "failed": why}


def _named(case: Case) -> dict[str, Any]:
    return {
        "key": case.key,
        "plan": case.plan.name,
        "seed": case.seed,
        "lr": case.lr,
        "settings": dict(case.settings),
    }


def curve(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where a run stood at the end of each epoch: its step, the validation loss with the codec on,
    and the bytes that each link had carried, by ``edge direction``."""
    sent: dict[int, dict[str, int]] = {}
    points = []
    for one in records:
        if "links" in one:
            sent[one["step"]] = _bytes(one["links"])
        if "val_loss_codec" in one and one["step"] in sent:
            points.append(_point(one["step"], one["val_loss_codec"], sent[one["step"]]))
    last = _point(summary["steps"], summary["val_loss_codec"], _bytes(summary["links"]))
    return [*points, last]


def _point(step: int, loss: float, sent: Mapping[str, int]) -> dict[str, Any]:
    return {"step": step, "val_loss_codec": loss, "bytes": dict(sent)}


def _bytes(links: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    return {
        f"{link['edge']} {link['direction']}": link["payload_bytes"] + link["header_bytes"]
        for link in links
    }
