"""Whether a manifest is one that this program writes: its digest tells damage, not who wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from thinwire.counters import LinkCounters

Check = Callable[[Any], bool]
_LARGEST = 1 << 53


def fault(manifest: Mapping[str, Any]) -> str | None:
    """What is wrong with ``manifest``, whose format is ours; None if nothing is."""
    found = _fault_of(manifest, _MANIFEST)
    if found is None and manifest["rank"] >= manifest["world_size"]:
        return "its rank is not one of its world_size"
    return None if found is None else f"its {found} is not what thinwire writes"


def _fault_of(
    values: Mapping[str, Any], checks: Mapping[str, Check | dict[str, Any]]
) -> str | None:
    """The first of ``checks`` that does not hold, by name."""
    for name, check in checks.items():
        if name not in values:
            return name
        value = values[name]
        if not callable(check):
            if not isinstance(value, dict):
                return name
            inner = _fault_of(value, check)
            if inner is not None:
                return f"{name}.{inner}"
        elif not check(value):
            return name
    return None


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _processes(value: Any) -> bool:
    return type(value) is int and 0 < value <= 1 << 16


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _values(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _record(checks: Mapping[str, Any]) -> Check:
    return lambda value: isinstance(value, dict) and _fault_of(value, checks) is None


def _files(value: Any) -> bool:
    """Names of files in the folder itself, with the size and the digest of each."""
    described = _values(_record({"bytes": _whole, "xxh3": _text}))
    return described(value) and all(_is_inside(name) for name in value)


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _counters(value: Any) -> bool:
    """What ``LinkCounters.state`` gives."""
    known = LinkCounters(0, "", "").state()
    if not isinstance(value, dict) or not {"edge", "direction", "codec"} <= value.keys():
        return False
    sums = [value.get(name) for name in known if isinstance(known[name], dict) and name != "kinds"]
    kinds = value.get("kinds")
    if not isinstance(kinds, dict):
        return False
    fields = known["training"].keys()
    tallies = [*sums, *kinds.values()]
    return (
        type(value["edge"]) is int
        and _text(value["direction"])
        and _text(value["codec"])
        and _whole(value.get("rested", 0))
        and all(_values(_whole)(tally) and tally.keys() <= fields for tally in tallies)
        and all(fields <= tally.keys() for tally in sums if tally is not None)
    )


_REFERENCES = {
    "edge": _whole,
    "direction": _text,
    "tensor": _whole,
    "role": _text,
    "scheme": _text,
    "keys": _whole,
    "bytes": _whole,
    "precision": _text,
}
_CLOCK = ("step_s", "cpu_s", "compute_s", "codec_s", "wait_s", "link_s")
_MANIFEST: dict[str, Any] = {
    "step": _whole,
    "run": _text,
    "attempt": _text,
    "rank": _whole,
    "world_size": _processes,
    "num_stages": _processes,
    "stages": _list_of(_whole),
    "steps": _whole,
    "steps_per_epoch": _whole,
    "text": _text,
    "threads": _whole,
    "versions": {"torch": _text, "python": _text, "thinwire": _text},
    "config": _text,
    "weights": {"names": _list_of(_text), "numbers": _values(_number)},
    "pipeline": {
        "step": _whole,
        "counters": _list_of(_counters),
        "references": _list_of(_record(_REFERENCES)),
    },
    "journal": {
        "tokens": _whole,
        "loss": _number,
        "clock": dict.fromkeys(_CLOCK, _number) | {"steps": _whole, "tokens": _whole},
    },
    "files": _files,
}
