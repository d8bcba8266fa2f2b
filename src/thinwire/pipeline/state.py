"""What a checkpoint holds of a pipeline: the references of each end of a link, in files by end, and
what rests."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from thinwire.counters import SUMS, LinkCounters, Tally, link_name
from thinwire.form import fault, list_of, number, optional, record, text, values_of, whole
from thinwire.pipeline.frozen import Frozen
from thinwire.pipeline.remembered import Remembered
from thinwire.store import saved

_FROZEN_FILE = "frozen.safetensors"


def _pair(value: Any) -> bool:
    """Two sums of squares."""
    return list_of(number)(value) and len(value) == 2


def _counters(value: Any) -> bool:
    """What ``LinkCounters.state`` gives."""
    if not isinstance(value, dict) or not {"edge", "direction", "codec"} <= value.keys():
        return False
    sums = [value.get(name) for name in SUMS]
    kinds = value.get("kinds")
    if not isinstance(kinds, dict):
        return False
    fields = {field.name for field in dataclasses.fields(Tally)}
    tallies = [*sums, *kinds.values()]
    return (
        type(value["edge"]) is int
        and text(value["direction"])
        and text(value["codec"])
        and whole(value.get("rested"))
        and whole(value.get("rested_values"))
        and values_of(_pair)(value.get("gained"))
        and all(values_of(whole)(tally) and tally.keys() <= fields for tally in tallies)
        and all(fields <= tally.keys() for tally in sums if tally is not None)
    )


_REFERENCES = {
    "edge": whole,
    "direction": text,
    "tensor": whole,
    "role": text,
    "scheme": text,
    "keys": whole,
    "bytes": whole,
    "precision": text,
}
_LEARNED = {"edge": whole, "direction": text, "tensor": whole, "role": text, "scheme": text}
#: Of what ``Pipeline.checkpoint`` returns.
STATE_FORM: dict[str, Any] = {
    "step": whole,
    "counters": list_of(_counters),
    "references": list_of(record(_REFERENCES)),
    "learned": list_of(record(_LEARNED)),
    "frozen": {"broken": optional(whole), "weights": values_of(text), "inputs": whole},
}


def fresh(step: int) -> dict[str, Any]:
    """The state of a pipeline that has done ``step`` steps and remembers nothing."""
    frozen: dict[str, Any] = {"broken": None, "weights": {}, "inputs": 0}
    return {"step": step, "counters": [], "references": [], "learned": [], "frozen": frozen}


def check(saved: Any) -> None:
    """Raise ValueError where ``saved`` is not what ``Pipeline.checkpoint`` returns."""
    found = fault(saved, STATE_FORM) if isinstance(saved, Mapping) else "all of it"
    if found is not None:
        raise ValueError(f"this is no state of a pipeline: {found} is not what checkpoint returns")


def save_references(remembered: Remembered, folder: Path) -> list[dict[str, Any]]:
    """Write what every end remembers into ``folder``; returns what was written, as JSON.

    Rows that lie on disk stay where they are, untouched until ``release`` of ``folder``. ``keys``
    counts samples, ``bytes`` those of their references, ``precision`` says how they are kept.
    """
    written = []
    for where, link, store in remembered.placed:
        tensors = saved.save(store)
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, folder / _file_of(where))
        remembered.pin(_token(folder), store, tensors)
        written.append(
            {
                **where,
                "scheme": str(link.scheme),
                "keys": len(store),
                "bytes": store.nbytes,
                "precision": store.keeping.name,
            }
        )
    return written


def load_references(
    remembered: Remembered, folder: Path, written: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Give every end what ``save_references`` wrote of it.

    Returns why some begin without: the reason by link.
    """
    by_place = {_place_of(one): one for one in written}
    without = {}
    for where, link, store in remembered.placed:
        one = by_place.get(_place_of(where))
        store.clear()
        if one is None:
            without[_name(where)] = "the checkpoint holds none"
        elif one["scheme"] != str(link.scheme):
            without[_name(where)] = f"they were of {one['scheme']}, not of {link.scheme}"
        else:
            try:
                tensors = saved.restore(store, load_file(folder / _file_of(where)))
            except (ValueError, OSError, SafetensorError) as error:
                without[_name(where)] = str(error)
            else:
                remembered.pin(_token(folder), store, tensors)
                if len(store) < one["keys"]:
                    lost = one["keys"] - len(store)
                    without[_name(where)] = f"{lost:,} of {one['keys']:,} are not on the disk"
    return without


def hold_references(
    remembered: Remembered, folder: Path, written: Sequence[Mapping[str, Any]]
) -> None:
    """Leave rows untouched that another checkpoint, in ``folder``, names."""
    by_place = {_place_of(one): one for one in written}
    for where, _, store in remembered.placed:
        one = by_place.get(_place_of(where))
        if one is not None:
            with contextlib.suppress(ValueError, OSError, SafetensorError):  # nothing can be read
                tensors = saved.hold(store, load_file(folder / _file_of(where)))
                remembered.pin(_token(folder), store, tensors)


def release_references(remembered: Remembered, folder: Path) -> None:
    """The checkpoint in ``folder`` is gone: rows that only it names may be written over."""
    for store, tensors in remembered.pinned.pop(_token(folder), []):
        saved.release(store, tensors)


def save_frozen(frozen: Frozen, folder: Path) -> dict[str, Any]:
    """Write which inputs have been seen into ``folder``; returns the rest, as JSON."""
    inputs = frozen.inputs
    if inputs is not None:
        save_file(inputs, folder / _FROZEN_FILE)
    return {**frozen.state(), "inputs": 0 if inputs is None else len(inputs["keys"])}


def load_frozen(frozen: Frozen, folder: Path, written: Mapping[str, Any]) -> str | None:
    """Let ``frozen`` go on from what ``save_frozen`` wrote.

    Returns why samples that were seen run once more, if they do.
    """
    frozen.expect(written["weights"])
    if not written["inputs"]:
        return None
    try:
        frozen.load_inputs(load_file(folder / _FROZEN_FILE))
    except (ValueError, OSError, SafetensorError) as error:
        return f"{folder / _FROZEN_FILE}: {error}"
    return None


def without_references(reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason why links begin without references; ``reasons`` by link."""
    links_of: dict[str, list[str]] = {}
    for link, why in sorted(reasons.items()):
        links_of.setdefault(why, []).append(link)
    return [
        f"references of {', '.join(links)} are dropped ({why}): samples are sent as first visits"
        for why, links in links_of.items()
    ]


def restore_counters(counters: Sequence[LinkCounters], saved: Sequence[Mapping[str, Any]]) -> None:
    """Go on counting from ``saved``; a link whose codec has changed is counted anew."""
    by_link = {(one["edge"], one["direction"], one["codec"]): one for one in saved}
    for one in counters:
        before = by_link.get((one.edge, one.direction, one.codec))
        if before is not None:
            one.add(before)


def _file_of(where: Mapping[str, Any]) -> str:
    return "link-{edge}-{direction}-{tensor}-{role}.safetensors".format(**where)


def _name(where: Mapping[str, Any]) -> str:
    return link_name(where["edge"], where["direction"])


def _place_of(where: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(where[name] for name in ("edge", "direction", "tensor", "role"))


def _token(folder: Path) -> str:
    """A checkpoint's folder, as it is called once it is complete; until then a dot precedes it."""
    return str(folder.resolve().with_name(folder.name.removeprefix(".")))
