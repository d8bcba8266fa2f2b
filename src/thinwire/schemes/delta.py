"""``delta(change, first=int8)``: the change since the sample's last visit (AQ-SGD).

Wang et al. 2022, "Fine-tuning Language Models over Slow Networks using Activation Compression
with Guarantees", Algorithm 1. Both ends hold, for each sample, the reference m: what the receiver
has computed on at the last visit. On a visit with value x

1. seen for the first time: m <- decode(first.encode(x));
2. later: m <- m + decode(change.encode(x - m)), a closed loop, since m includes old errors;
3. where the change has more energy than the value: m <- decode(change.encode(x));
4. the receiver computes on the new m; the sender back-propagates through its exact x.

"First" is per sample, not per epoch. A sample's second occurrence in a step, and evaluation, send
a value in the ``first`` codec and leave m alone. m is float32; both ends add the same decoded
payload with one addition a value, so their copies are equal to the bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import xxhash
from torch import Tensor

from thinwire.codecs import Codec, codec
from thinwire.codecs.base import unfit_value
from thinwire.errors import FrameError, NonFiniteError, SpecError
from thinwire.frame import Kind, Section
from thinwire.schemes.base import Receiver, Scheme, Sender, Visit, expect_sections
from thinwire.schemes.value import Value
from thinwire.spec import register
from thinwire.store import MemoryStore, plan_step
from thinwire.store import Visit as Mode

#: Not float32: the first epoch would otherwise bound the speed-up of the whole run.
FIRST_VISIT = codec("int8")


@register("scheme", "delta")
@dataclasses.dataclass(frozen=True)
class Delta(Scheme):
    """``change`` codes the later visits, ``first`` each sample's first."""

    needs_keys: ClassVar[bool] = True

    change: Codec
    first: Codec = FIRST_VISIT

    def __post_init__(self) -> None:
        for name, coder in (("change", self.change), ("first", self.first)):
            if not coder.fixed_size:
                raise SpecError(
                    f"delta takes codecs of fixed size, which {name}={coder} is not: use another, "
                    "or send plain values"
                )

    @property
    def stochastic(self) -> bool:
        return self.change.stochastic or self.first.stochastic

    def sender(self) -> Sender:
        return _DeltaSender(self)

    def receiver(self) -> Receiver:
        return _DeltaReceiver(self)

    def stateless(self) -> Scheme:
        return Value(self.first)

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        first = self.first.row_nbytes(n, torch.float32)
        return max(first, self.change.row_nbytes(n, torch.float32))

    def codec_of(self, kind: Kind) -> Codec:
        """The codec in which sections of ``kind`` travel."""
        return self.change if kind in (Kind.CHANGE, Kind.RESEED) else self.first


_KINDS = {Mode.FIRST: Kind.FIRST, Mode.AGAIN: Kind.CHANGE, Mode.REPEAT: Kind.VALUE}


class _DeltaEnd:
    """What both ends share: the references, the step's plan, and how a section moves them."""

    def __init__(self, scheme: Delta) -> None:
        self.scheme = scheme
        self.store = MemoryStore()
        self._plan: list[list[Mode]] = []

    def begin_step(self, visits: Sequence[Visit]) -> None:
        self._plan = plan_step(self.store.lengths, [(_keys(v), v.lengths) for v in visits])

    def kinds(self, microbatch: int, visit: Visit) -> list[Kind]:
        """The kind of each row, as planned unless its length came out otherwise.

        A sender may still turn CHANGE into RESEED.
        """
        kinds = [_KINDS[mode] for mode in self._plan[microbatch]]
        held = self.store.lengths
        for row, (key, n) in enumerate(zip(_keys(visit), visit.lengths, strict=True)):
            if kinds[row] == Kind.CHANGE and held.get(key) != n:
                kinds[row] = Kind.FIRST
        return kinds

    def apply(self, kind: Kind, keys: list[int], decoded: Tensor) -> Tensor:
        """Move the references by ``decoded`` [keys, n]; returns what the receiver computes on."""
        if kind == Kind.CHANGE:
            decoded = self.store.read(keys) + decoded
        if kind != Kind.VALUE:
            self.store.write(keys, decoded)
        return decoded

    def digest(self) -> int:
        return self.store.digest()

    def state_dict(self) -> dict[str, Any]:
        return self.store.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.store.load_state_dict(state)


class _DeltaSender(_DeltaEnd, Sender):
    def encode(self, x: Tensor, microbatch: int, visit: Visit) -> list[Section]:
        keys = _keys(visit)
        values = x.detach().to(torch.float32).reshape(len(keys), -1)
        kinds = self.kinds(microbatch, visit)
        changes: dict[int, Tensor] = {}  # by length; rows in order
        for n, rows in _by_length(kinds, visit.lengths, Kind.CHANGE):
            value = values[rows, :n]
            change = value - self.store.read([keys[r] for r in rows])
            larger = _energy(change) > _energy(value)
            if bool(larger.any()):
                for k in torch.nonzero(larger).flatten().tolist():
                    kinds[rows[k]] = Kind.RESEED
                change = change[~larger]
            changes[n] = change
        # encode everything before moving any reference: a value that is not finite leaves no trace
        prepared = []
        for kind in sorted(set(kinds)):
            coder, parts = self.scheme.codec_of(kind), []
            for n, rows in _by_length(kinds, visit.lengths, kind):
                what = changes[n] if kind == Kind.CHANGE else values[rows, :n]
                try:
                    payload = coder.encode(what, len(rows), seed=visit.seeds[rows])
                except NonFiniteError:
                    raise unfit_value(x, coder, visit.valid, len(keys)) from None
                parts.append((n, rows, payload))
            prepared.append((kind, coder, parts))
        sections = []
        for kind, coder, parts in prepared:
            members = [r for r, k in enumerate(kinds) if k == kind]
            there = [keys[r] for r in members]
            sections.append(
                Section(
                    kind,
                    str(coder),
                    x.dtype,
                    tuple(x.shape),
                    parts[0][2] if len(parts) == 1 else torch.cat([p for *_, p in parts]),
                    rows=None if len(members) == len(keys) else members,
                    versions=None if kind == Kind.VALUE else self.store.versions(there),
                    keys=keys_digest(there),
                )
            )
            for n, rows, payload in parts:
                decoded = coder.decode(payload, (len(rows), n), torch.float32, len(rows))
                self.apply(kind, [keys[r] for r in rows], decoded)
        return sections


class _DeltaReceiver(_DeltaEnd, Receiver):
    def decode(self, sections: list[Section], microbatch: int, visit: Visit) -> Tensor:
        keys = _keys(visit)
        allowed = (Kind.FIRST, Kind.CHANGE, Kind.RESEED, Kind.VALUE)
        shape = expect_sections(sections, allowed, len(keys), "a delta-coded tensor")
        self._check(sections, self.kinds(microbatch, visit), keys)
        decoded = []
        for section in sections:
            coder = self.scheme.codec_of(section.kind)
            for n, rows, payload in _split(section, coder, visit):
                y = coder.decode(payload, (len(rows), n), torch.float32, len(rows))
                decoded.append((section.kind, n, rows, y))
        result = torch.zeros(
            (len(keys), _width(shape)), dtype=torch.float32, device=sections[0].payload.device
        )
        for kind, n, rows, y in decoded:
            result[rows, :n] = self.apply(kind, [keys[r] for r in rows], y)
        return result.view(shape).to(sections[0].dtype)

    def _check(self, sections: list[Section], planned: list[Kind], keys: list[int]) -> None:
        """Refuse sections coded against another state, before anything is touched."""
        for section in sections:
            rows = range(len(keys)) if section.rows is None else section.rows
            kind = Kind.CHANGE if section.kind == Kind.RESEED else section.kind
            there = [keys[r] for r in rows]
            if section.codec != str(self.scheme.codec_of(section.kind)):
                raise FrameError(
                    f"{section.kind.name} coded as {section.codec!r}; this end has {self.scheme}"
                )
            if section.kind == Kind.VALUE:
                continue
            if section.keys != keys_digest(there):
                raise FrameError("the two ends hold different sample ids for this micro-batch")
            held = self.store.versions(there)
            if section.versions != held or any(planned[r] != kind for r in rows):
                sent = section.versions or [-1] * len(there)
                k = next((k for k, v in enumerate(sent) if v != held[k]), 0)
                raise FrameError(
                    f"sample {there[k]}: sent as {section.kind.name} against version {sent[k]} of "
                    f"its reference, this end holds version {held[k]}"
                )


def keys_digest(keys: Sequence[int]) -> int:
    """A 64-bit hash of sample ids in order."""
    return xxhash.xxh3_64_intdigest(b"".join(k.to_bytes(8, "little", signed=True) for k in keys))


def _keys(visit: Visit) -> list[int]:
    if visit.keys is None:
        raise ValueError("delta needs sample_ids: pass them to Pipeline.step, or use a plain codec")
    return list(visit.keys)


def _by_length(
    kinds: Sequence[Kind | None], lengths: Sequence[int], kind: Kind
) -> list[tuple[int, list[int]]]:
    """(values, rows) for the rows of ``kind``, by length."""
    groups: dict[int, list[int]] = {}
    for row, (n, k) in enumerate(zip(lengths, kinds, strict=True)):
        if k == kind:
            groups.setdefault(n, []).append(row)
    return sorted(groups.items())


def _split(section: Section, coder: Codec, visit: Visit) -> list[tuple[int, list[int], Tensor]]:
    """(values, rows, payload) by length, in the order in which the sender wrote them."""
    count = len(visit.lengths)
    chosen = set(range(count) if section.rows is None else section.rows)
    kinds = [section.kind if r in chosen else None for r in range(count)]
    parts, at = [], 0
    for n, rows in _by_length(kinds, visit.lengths, section.kind):
        end = at + len(rows) * coder.row_nbytes(n, torch.float32)
        parts.append((n, rows, section.payload[at:end]))
        at = end
    if at != section.payload.numel():
        raise FrameError(
            f"a {section.kind.name} section of {section.payload.numel()} bytes, {at} expected"
        )
    return parts


def _energy(x: Tensor) -> Tensor:
    return (x * x).sum(1)


def _width(shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:])
