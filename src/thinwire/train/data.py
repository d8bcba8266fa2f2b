"""Text as training samples: bytes are tokens, samples are chunks that never overlap.

A sample's number is its place in the text, the same in every epoch: that is the key under which
delta schemes remember it. Everything here is a function of the text and of seeds, so all ranks
arrive at the same batches without talking.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from thinwire.train.config import ConfigError, DataConfig

VOCABULARY = 256
IGNORED = -100  # the target of a position that doesn't count
_MANY = 10  # so many documents are split whole; fewer are joined and the end is cut off
_PARAGRAPH = 80  # bytes; shorter ones ("Note:", "and") are shared without being the same text
_JOINT = b"\n\n"


@dataclass(frozen=True)
class Batch:
    """Some samples: ``inputs`` and ``target`` int64 ``[batch, context]``, ids and lengths 1-D."""

    inputs: Tensor
    target: Tensor
    sample_ids: Tensor
    lengths: Tensor | None  # None: all positions of all rows


class Samples:
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

    def batch(self, sample_ids: Tensor) -> Batch:
        """The samples of the given numbers (1-D int64); padding has target ``IGNORED``."""
        positions = sample_ids[:, None] * self.context + torch.arange(self.context)
        last = len(self.text) - 1
        inputs = self.text[positions.clamp(max=last)].long()
        target = self.text[(positions + 1).clamp(max=last)].long()
        target[positions >= last] = IGNORED
        lengths = (last - sample_ids * self.context).clamp(max=self.context)
        return Batch(inputs, target, sample_ids, lengths)

    def filled(self, batch: Batch, rows: int) -> Batch:
        """``batch`` in the one shape ``[rows, context]``; the rows added have no valid target."""
        added = rows - len(batch.inputs)
        unused_ids = torch.arange(self.count, self.count + added)
        return Batch(
            torch.cat([batch.inputs, batch.inputs.new_zeros(added, self.context)]),
            torch.cat([batch.target, batch.target.new_full((added, self.context), IGNORED)]),
            torch.cat([batch.sample_ids, unused_ids]),
            lengths=None,
        )


@dataclass(frozen=True)
class Text:
    """The two parts of a text, with the SHA-256 over both and where they come from."""

    train: bytes
    validation: bytes
    sha256: str
    source: str
    skipped: Mapping[str, int] = field(default_factory=dict)  # why files were left out: how many


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


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The sample numbers of one epoch in a shuffled order, 1-D int64; the same on every rank."""
    digest = _digest(f"order:{seed}:{epoch}")
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randperm(count, generator=generator)


def training_ids(
    count: int, batch: int, microbatches: int, seed: int, done: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """``(epoch, sample ids)`` of one batch after the other, for ever; the first ``done`` left out.

    A short last batch is kept; only one smaller than the number of micro-batches is left out of
    its epoch.
    """
    epoch, skipped = divmod(done, steps_per_epoch(count, batch, microbatches))
    while True:
        batches = epoch_order(count, seed, epoch).split(batch)
        for ids in batches[skipped:]:
            if len(ids) >= microbatches:
                yield epoch, ids
        epoch, skipped = epoch + 1, 0


def steps_per_epoch(count: int, batch: int, microbatches: int) -> int:
    """How many batches ``training_ids`` yields in an epoch."""
    return count // batch + (count % batch >= microbatches)


def evaluation_batches(samples: Samples, batch: int, microbatches: int) -> Iterator[Batch]:
    """All samples in order, each once.

    A last batch too small for the micro-batches is filled with copies that have no valid target.
    """
    for ids in torch.arange(len(samples)).split(batch):
        filled = torch.cat([ids, ids[-1:].expand(max(0, microbatches - len(ids)))])
        part = samples.batch(filled)
        part.target[len(ids) :] = IGNORED
        yield part
