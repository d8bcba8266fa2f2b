"""What a checkpoint holds of a pipeline's links: the references of each end, in files by end.

Everything about how references are stored is behind ``save_references`` and ``load_references``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from thinwire.counters import LinkCounters, link_name
from thinwire.edge import EdgeEnd, LinkReceiver, LinkSender

Link = LinkSender | LinkReceiver


def keyed_ends(ends: Sequence[EdgeEnd]) -> Iterator[tuple[dict[str, Any], Link]]:
    """Each state of ``ends`` that remembers samples: where it stands, as JSON values, its link."""
    for end in ends:
        for link in (end.outgoing, end.incoming):
            if not link.scheme.needs_keys:
                continue
            for index in link.states:
                yield (
                    {
                        "edge": link.place.edge,
                        "direction": link.place.direction.name.lower(),
                        "tensor": index,
                        "role": "sender" if link is end.outgoing else "receiver",
                    },
                    link,
                )


def save_references(ends: Sequence[EdgeEnd], folder: Path) -> list[dict[str, Any]]:
    """Write the references of every end into ``folder``; returns what was written, as JSON.

    ``keys`` counts samples, ``bytes`` those of their references, ``precision`` is their dtype.
    """
    saved = []
    for where, link in keyed_ends(ends):
        tensors = _on_cpu(link.states[where["tensor"]].state_dict())
        name = "link-{edge}-{direction}-{tensor}-{role}.safetensors".format(**where)
        save_file(tensors, folder / name)
        values = [t for t in tensors.values() if t.is_floating_point()]
        saved.append(
            {
                **where,
                "scheme": str(link.scheme),
                "file": name,
                "keys": tensors["keys"].numel() if "keys" in tensors else 0,
                "bytes": sum(t.nbytes for t in values),
                "precision": " ".join(
                    sorted({str(t.dtype).removeprefix("torch.") for t in values})
                ),
            }
        )
    return saved


def load_references(
    ends: Sequence[EdgeEnd], folder: Path, saved: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Give every end the references that ``save_references`` wrote of it.

    Returns why some begin without: the reason by link.
    """
    by_place = {_place_of(one): one for one in saved}
    without = {}
    for where, link in keyed_ends(ends):
        one = by_place.get(_place_of(where))
        if one is None:
            without[_name(where)] = "the checkpoint holds none"
        elif one["scheme"] != str(link.scheme):
            without[_name(where)] = f"they were of {one['scheme']}, not of {link.scheme}"
        else:
            found = load_file(folder / one["file"])
            values = {
                k: t.to(link.device) if t.is_floating_point() else t for k, t in found.items()
            }
            link.states[where["tensor"]].load_state_dict(values)
    return without


def digests(ends: Sequence[EdgeEnd]) -> dict[str, dict[str, int]]:
    """A hash of the references of each end, by link and tensor, then by role."""
    found: dict[str, dict[str, int]] = {}
    for where, link in keyed_ends(ends):
        state = link.states[where["tensor"]]
        found.setdefault(_key(where), {})[where["role"]] = state.digest()
    return found


def unlike(found: Sequence[Mapping[str, Mapping[str, int]]]) -> set[str]:
    """The keys of all ranks' ``digests`` under which the two ends differ."""
    by_key: dict[str, set[int]] = {}
    for rank in found:
        for key, roles in rank.items():
            by_key.setdefault(key, set()).update(roles.values())
    return {key for key, values in by_key.items() if len(values) > 1}


def drop_references(ends: Sequence[EdgeEnd], keys: set[str]) -> None:
    """Let the ends with these keys start anew, without references."""
    for where, link in keyed_ends(ends):
        if _key(where) in keys:
            fresh = link.scheme.sender() if where["role"] == "sender" else link.scheme.receiver()
            link.states[where["tensor"]] = fresh  # type: ignore[assignment]


def without_references(reasons: Mapping[str, str], differing: set[str]) -> list[str]:
    """A line for each reason why links begin without references: ``reasons`` by link, and the keys
    under which the two ends differ.
    """
    links_of: dict[str, list[str]] = {}
    for link, why in sorted(reasons.items()):
        links_of.setdefault(why, []).append(link)
    if differing:
        links_of["those of its two ends differ"] = sorted(differing)
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


def _name(where: Mapping[str, Any]) -> str:
    return link_name(where["edge"], where["direction"])


def _key(where: Mapping[str, Any]) -> str:
    return f"{_name(where)} {where['tensor']}"


def _place_of(where: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(where[name] for name in ("edge", "direction", "tensor", "role"))


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) == len(state), "a scheme's state holds plain tensors"
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
