"""What has crossed a link: messages, bytes and values, by kind, and the time spent on them."""

from __future__ import annotations

import dataclasses
from typing import Any

from thinwire.frame import Kind, Section


@dataclasses.dataclass
class Tally:
    """A sum over messages. Bytes are those handed to the transport; ``raw_bytes`` would be fp32."""

    messages: int = 0
    payload_bytes: int = 0
    header_bytes: int = 0
    values: int = 0

    @property
    def bytes(self) -> int:
        """Payloads, headers and checksums."""
        return self.payload_bytes + self.header_bytes

    @property
    def raw_bytes(self) -> int:
        """Bytes of the same values in float32."""
        return 4 * self.values

    @property
    def bits_per_value(self) -> float | None:
        """Bits for each value, headers included; None before the first value."""
        return 8 * self.bytes / self.values if self.values else None

    def add(self, payload: int, total: int, values: int, messages: int = 1) -> None:
        """Count one message of ``total`` bytes, or one section's share of it."""
        self.messages += messages
        self.payload_bytes += payload
        self.header_bytes += total - payload
        self.values += values


@dataclasses.dataclass
class LinkCounters:
    """One directed link's sums: training, evaluation, and training without first visits."""

    edge: int
    direction: str
    codec: str
    training: Tally = dataclasses.field(default_factory=Tally)
    steady: Tally = dataclasses.field(default_factory=Tally)
    evaluation: Tally = dataclasses.field(default_factory=Tally)
    kinds: dict[str, Tally] = dataclasses.field(default_factory=dict)

    def count(self, sections: list[Section], total: int, values: list[int], train: bool) -> None:
        """Count one message: its sections, all its bytes, and the values in each section."""
        payload = sum(s.payload.numel() for s in sections)
        (self.training if train else self.evaluation).add(payload, total, sum(values))
        if not train:
            return
        if all(s.kind != Kind.FIRST for s in sections):
            self.steady.add(payload, total, sum(values))
        for section, n in zip(sections, values, strict=True):
            size = section.payload.numel()
            tally = self.kinds.setdefault(section.kind.name.lower(), Tally())
            # each section bears the message's headers in equal parts
            tally.add(size, size + (total - payload) // len(sections), n)

    def report(self) -> dict[str, Any]:
        """Plain numbers for a summary; see docs/train.md."""
        t = self.training
        return {
            "edge": self.edge,
            "direction": self.direction,
            "codec": self.codec,
            "messages": t.messages,
            "payload_bytes": t.payload_bytes,
            "header_bytes": t.header_bytes,
            "raw_bytes": t.raw_bytes,
            "values": t.values,
            "bits_per_value": t.bits_per_value,
            "steady_bits_per_value": self.steady.bits_per_value,
            "evaluation_messages": self.evaluation.messages,
            "evaluation_bytes": self.evaluation.bytes,
            "kinds": {k: dataclasses.asdict(v) for k, v in sorted(self.kinds.items())},
        }


@dataclasses.dataclass
class Timers:
    """Seconds of one rank since the last ``take``."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def take(self) -> dict[str, float]:
        """The sums so far, which start again at 0."""
        values = dataclasses.asdict(self)
        for name in values:
            setattr(self, name, 0.0)
        return values


def sum_reports(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report for several counters of the same kind of traffic."""
    total = dict(reports[0])
    for other in reports[1:]:
        for name in ("messages", "payload_bytes", "header_bytes", "raw_bytes", "values"):
            total[name] += other[name]
    total["bits_per_value"] = total["steady_bits_per_value"] = None
    total["kinds"] = {}
    return total
