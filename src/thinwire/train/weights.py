"""Weights and optimizer state by global name: to and from files, and from rank to rank.

A name, as ``blocks.3.qkv.weight``, is the same for every number of stages, and so a run can go on
with another one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
_NUMBERS = "numbers"  # in the metadata of an entry's bytes


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter or buffer, and what the optimizer keeps of it: tensors and numbers by key."""

    value: Tensor
    kept: dict[str, Any]


def collect(tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Entry]:
    """The entries of named parameters and buffers; they share the tensors' memory."""
    return {
        name: Entry(tensor.detach(), dict(optimizer.state.get(tensor, {})))
        for name, tensor in tensors.items()
    }


def apply(
    entries: Mapping[str, Entry],
    tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Copy ``entries`` into the parameters and buffers of the same names, and the optimizer.

    Raises ValueError, with nothing copied, where one does not fit.
    """
    for name, tensor in tensors.items():
        _check(name, entries[name], tensor)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(entries[name].value)
    name_of = {id(tensor): name for name, tensor in tensors.items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = {index: entries[name_of[id(p)]].kept for index, p in enumerate(parameters)}
    state = optimizer.state_dict() | {"state": {i: k for i, k in kept.items() if k}}
    optimizer.load_state_dict(state)  # it puts each tensor where the optimizer wants it


def _check(name: str, entry: Entry, tensor: Tensor) -> None:
    found = {"": entry.value} | {f"/{k}": v for k, v in entry.kept.items() if isinstance(v, Tensor)}
    for key, value in found.items():
        fits = value.shape == tensor.shape or (key and value.dim() == 0)
        if not fits or value.is_floating_point() != tensor.is_floating_point():
            raise ValueError(
                f"{name}{key} is {value.dtype} of shape {tuple(value.shape)}, not {tensor.dtype} "
                f"of {tuple(tensor.shape)}"
            )


def write(entries: Mapping[str, Entry], folder: Path) -> dict[str, Any]:
    """Write two files into ``folder``; returns what the manifest keeps beside them."""
    kept, numbers = {}, {}
    for name, entry in entries.items():
        for key, value in entry.kept.items():
            if isinstance(value, Tensor):
                kept[f"{name}/{key}"] = _on_cpu(value)
            else:
                numbers[f"{name}/{key}"] = value
    save_file({name: _on_cpu(e.value) for name, e in entries.items()}, folder / MODEL_FILE)
    save_file(kept, folder / OPTIMIZER_FILE)
    return {"names": sorted(entries), "numbers": numbers}


def read(folder: Path, written: Mapping[str, Any], names: Iterable[str]) -> dict[str, Entry]:
    """The entries of ``names`` from the files in ``folder``; ``written`` is what ``write`` gave."""
    entries = {}
    with (
        safe_open(folder / MODEL_FILE, framework="pt") as values,
        safe_open(folder / OPTIMIZER_FILE, framework="pt") as states,
    ):
        keys_of: dict[str, list[str]] = {}
        for key in states.keys():  # noqa: SIM118  no mapping: it can't be iterated over
            keys_of.setdefault(key.rpartition("/")[0], []).append(key)
        for name in names:
            kept = {k.rpartition("/")[2]: states.get_tensor(k) for k in keys_of.get(name, [])}
            entries[name] = Entry(values.get_tensor(name), kept)
    for key, number in written["numbers"].items():
        name, _, kind = key.rpartition("/")
        if name in entries:
            entries[name].kept[kind] = number
    return entries


def to_bytes(entry: Entry) -> bytes:
    """An entry as one safetensors document."""
    tensors = {f"kept/{k}": _on_cpu(v) for k, v in entry.kept.items() if isinstance(v, Tensor)}
    numbers = {k: v for k, v in entry.kept.items() if not isinstance(v, Tensor)}
    tensors["value"] = _on_cpu(entry.value)
    return save(tensors, metadata={_NUMBERS: json.dumps(numbers)})


def from_bytes(data: bytes) -> Entry:
    """The entry that ``to_bytes`` wrote."""
    tensors = load(data)
    size = int.from_bytes(data[:8], "little")  # of the header, as safetensors writes it
    numbers = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_NUMBERS])
    kept = {k.removeprefix("kept/"): t for k, t in tensors.items() if k != "value"}
    return Entry(tensors["value"], kept | numbers)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
