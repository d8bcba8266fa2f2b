"""Text as training samples: bytes are tokens, samples are chunks that never overlap.

A sample's number is its place in the text, the same in every epoch: that is the key under which
delta schemes remember it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.train import batches
from thinwire.train.batches import IGNORED, Batch
from thinwire.train.config import ConfigError, DataConfig
from thinwire.train.task import Data

VOCABULARY = 256
_MANY = 10  # so many documents are split whole; fewer are joined and the end is cut off
_PARAGRAPH = 80  # bytes; shorter ones ("Note:", "and") are shared without being the same text
_JOINT = b"\n\n"


class Samples(batches.Samples):
    """A text cut into chunks of ``context`` tokens; a last short one is padded.

    With ``limit`` only so many samples from the start are used.
    """

    def __init__(self, text: bytes, context: int, limit: int | None = None) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context
        count = -(-(len(text) - 1) // context)  # the last byte is only a target
        self.count = count if limit is None else min(limit, count)

    def __len__(self) -> int:
        return self.count

    def batch(self, numbers: Tensor, epoch: int = 0) -> Batch:
        """The samples of the given numbers: ``inputs`` and ``target`` int64 ``[batch, context]``.

        Padding has target ``IGNORED``.
        """
        positions = numbers[:, None] * self.context + torch.arange(self.context)
        last = len(self.text) - 1
        inputs = self.text[positions.clamp(max=last)].long()
        target = self.text[(positions + 1).clamp(max=last)].long()
        target[positions >= last] = IGNORED
        lengths = (last - numbers * self.context).clamp(max=self.context)
        return Batch(inputs, target, numbers, lengths)

    def filled(self, batch: Batch, rows: int) -> Batch:
        added = rows - len(batch.inputs)
        unused_ids = torch.arange(self.count, self.count + added)
        return Batch(
            torch.cat([batch.inputs, batch.inputs.new_zeros(added, self.context)]),
            torch.cat([batch.target, batch.target.new_full((added, self.context), IGNORED)]),
            torch.cat([batch.sample_ids, unused_ids]),
            lengths=None,
        )


@dataclass(frozen=True)
class Text(Data):
    """The two parts of a text, with the SHA-256 over both and where they come from."""

    train: bytes
    validation: bytes
    sha256: str
    source: str
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        return {"train_bytes": len(self.train), "validation_bytes": len(self.validation)}


def load(config: DataConfig, context: int) -> Text:
    """Read and split the text; raises ConfigError where it can't be read or is too short."""
    documents, source, skipped = _documents(config.path)
    train, validation = _split(documents, config.validation, config.seed)
    for part, name in ((train, "training"), (validation, "validation")):
        if len(part) < context + 1:
            raise ConfigError(
                f"{source}: {len(part)} bytes of {name} text, fewer than the {context + 1} of one "
                "sample; give more text, lower --model.context or change --data.validation"
            )
    digest = hashlib.sha256(train + b"\0" + validation).hexdigest()
    return Text(train, validation, digest, source, skipped)


def _documents(path: str | None) -> tuple[dict[str, bytes], str, dict[str, int]]:
    if path is None:
        from pydoc_data.topics import topics  # the language reference, in every Python

        return {name: topics[name].encode() for name in sorted(topics)}, "pydoc_data.topics", {}
    root = Path(path)
    try:
        if not root.is_dir():
            content = root.read_bytes()
            if flaw := _flaw(content):
                raise ConfigError(f"--data.path: {root} is {flaw}")
            return {root.name: content}, path, {}
        files = sorted(file for file in root.rglob("*") if file.is_file())
    except OSError as error:
        raise ConfigError(f"--data.path: can't read {path}: {error.strerror}") from None
    documents: dict[str, bytes] = {}
    skipped: Counter[str] = Counter()
    for file in files:
        name = file.relative_to(root)
        if any(part.startswith(".") for part in name.parts):
            skipped["hidden"] += 1
            continue
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"--data.path: can't read {file}: {error.strerror}") from None
        if flaw := _flaw(content):
            skipped[flaw] += 1
        else:
            documents[name.as_posix()] = content
    if not documents:
        found = ", ".join(f"{number} {why}" for why, number in skipped.items())
        raise ConfigError(
            f"--data.path: no UTF-8 text among the {len(files)} files in {path}"
            + (f" ({found})" if found else "")
        )
    return documents, path, dict(skipped)


def _flaw(content: bytes) -> str | None:
    """What a file is that can't be trained on; None if it can."""
    if not content:
        return "empty"
    if b"\0" in content:
        return "binary, not text"
    try:
        content.decode()
    except UnicodeDecodeError:
        return "not UTF-8 text"
    return None


def _split(documents: dict[str, bytes], fraction: float, seed: int) -> tuple[bytes, bytes]:
    """Training and validation text; whole documents where they are many and differ."""
    wanted = fraction * sum(map(len, documents.values()))
    if len(documents) >= _MANY:
        chosen: set[str] = set()
        size = 0
        families = _families(documents)
        for family in sorted(families, key=lambda f: _digest(f"{seed}:{f[0]}")):
            family_size = sum(len(documents[name]) for name in family)
            if size + family_size <= wanted:
                chosen.update(family)
                size += family_size
        if size >= wanted / 2:
            parts = [
                _JOINT.join(text for name, text in documents.items() if (name in chosen) == held)
                for held in (False, True)
            ]
            return parts[0], parts[1]
    joined = _JOINT.join(documents.values())
    cut = len(joined) - round(wanted)
    return joined[:cut], joined[cut:]


def _families(documents: dict[str, bytes]) -> list[list[str]]:
    """The documents, those that share a paragraph together.

    The language reference repeats whole sections under several topics; a model that had trained
    on one of them would be validated on what it has seen.
    """
    family_of = {name: [name] for name in documents}
    seen: dict[bytes, str] = {}
    for name, text in documents.items():
        for paragraph in map(bytes.strip, text.split(_JOINT)):
            if len(paragraph) < _PARAGRAPH:
                continue
            one, other = family_of[name], family_of[seen.setdefault(paragraph, name)]
            if one is not other:
                other.extend(one)
                family_of.update(dict.fromkeys(one, other))
    return list({id(family): family for family in family_of.values()}.values())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
