"""Whether a manifest is one that this program writes: its digest tells damage, not who wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from thinwire import form
from thinwire.form import list_of, number, record, text, values_of, whole
from thinwire.pipeline.state import STATE_FORM


def fault(manifest: Mapping[str, Any]) -> str | None:
    """What is wrong with ``manifest``, whose format is ours; None if nothing is."""
    found = form.fault(manifest, _MANIFEST)
    if found is None and manifest["rank"] >= manifest["world_size"]:
        return "its rank is not one of its world_size"
    return None if found is None else f"its {found} is not what thinwire writes"


def _processes(value: Any) -> bool:
    return type(value) is int and 0 < value <= 1 << 16


def _files(value: Any) -> bool:
    """Names of files in the folder itself, with the size and the digest of each."""
    described = values_of(record({"bytes": whole, "xxh3": text}))
    return described(value) and all(_is_inside(name) for name in value)


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


_CLOCK = ("step_s", "cpu_s", "compute_s", "codec_s", "wait_s", "link_s")
_MANIFEST: dict[str, Any] = {
    "step": whole,
    "run": text,
    "attempt": text,
    "rank": whole,
    "world_size": _processes,
    "num_stages": _processes,
    "stages": list_of(whole),
    "steps": whole,
    "steps_per_epoch": whole,
    "text": text,
    "threads": whole,
    "versions": {"torch": text, "python": text, "thinwire": text},
    "config": text,
    "weights": {"names": list_of(text), "numbers": values_of(number)},
    "pipeline": STATE_FORM,
    "journal": {
        "tokens": whole,
        "loss": number,
        "clock": dict.fromkeys(_CLOCK, number) | {"steps": whole, "tokens": whole},
    },
    "files": _files,
}
