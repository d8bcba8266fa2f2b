"""Whether what a scheme returned can travel: a message that is larger than its receiver announced
would end both processes.

Schemes may be anybody's, and what they declare is all that the other end knows of a message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.frame import MAX_SECTIONS, Kind, Section

_KINDS = frozenset(Kind) - {Kind.ABSENT, Kind.NONFINITE, Kind.CONTROL, Kind.ABORT}


def fault_of_sections(sections: object, shape: Sequence[int], most: int) -> str | None:
    """What is wrong with the sections of a tensor of ``shape``; None if nothing is.

    ``most``: payload bytes that the scheme has declared.
    """
    if not isinstance(sections, list) or not all(isinstance(s, Section) for s in sections):
        return f"its sender returned {type(sections).__name__}, not a list of sections"
    if not 1 <= len(sections) <= MAX_SECTIONS:
        return f"its sender returned {len(sections)} sections, not 1 to {MAX_SECTIONS}"
    versions = 0
    for section in sections:
        payload = section.payload
        if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
            return f"its sender returned a payload that is no contiguous 1-D uint8: {payload.dtype}"
        if section.kind not in _KINDS or section.shape != tuple(shape):
            name = getattr(section.kind, "name", section.kind)
            return f"its sender returned a section of kind {name} and shape {section.shape}"
        rows = range(shape[0]) if section.rows is None else section.rows
        within = all(0 <= row < shape[0] for row in rows)
        if not within or list(rows) != sorted(set(rows)):
            return f"its sender returned a section of the rows {list(rows)} of {shape[0]}"
        if section.versions is not None and len(section.versions) != len(rows):
            return f"its sender returned {len(section.versions)} versions of {len(rows)} rows"
        versions += len(section.versions or ())
    if versions > shape[0]:
        return f"its sender returned {versions} versions of {shape[0]} rows"
    total = sum(section.payload.numel() for section in sections)
    if total > most:
        return f"its sender returned {total} payload bytes; by its row_nbytes at most {most}"
    return None


def fault_of_tensor(y: object, shape: Sequence[int]) -> str | None:
    """What is wrong with what was decoded of a tensor of ``shape``; None if nothing is."""
    if isinstance(y, Tensor) and y.shape == tuple(shape):
        return None
    what = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
    return f"its receiver returned {what}, not a tensor of {tuple(shape)}"
