"""What has crossed a link: messages, bytes and values, by kind, and the time spent on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from thinwire.frame import Kind, Section


@dataclasses.dataclass(slots=True)
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

    def add_all(self, other: Mapping[str, int]) -> None:
        """Count what another tally, as a dictionary of its fields, has counted."""
        for name, value in other.items():
            setattr(self, name, getattr(self, name) + value)


#: By the name of a kind: the energy to be coded without what both ends expect, and with it.
Gained = dict[str, list[float]]


def add_gains(gained: Gained, found: Iterable[tuple[Kind, float, float]]) -> None:
    """Count what was ``found`` to be gained by what both ends expect."""
    for kind, plain, left in found:
        sums = gained.setdefault(kind.name.lower(), [0.0, 0.0])
        sums[0] += plain
        sums[1] += left


def gain_db(gained: Gained) -> dict[str, float]:
    """By kind, how much less there was to be coded in dB, of which 6 are a bit a value."""
    sums = {kind: (plain, left) for kind, (plain, left) in gained.items() if plain and left}
    return {kind: 10 * math.log10(plain / left) for kind, (plain, left) in sums.items()}


_EARLY = (
    Kind.FIRST,
    Kind.SECOND,
    Kind.DENSE,
)  # of a sample's visits: not what a long run is made of
_LATER = (Kind.CHANGE, Kind.SECOND, Kind.RESEED, Kind.SAME)
SUMS = ("training", "steady", "evaluation")  # fields of LinkCounters


@dataclasses.dataclass
class LinkCounters:
    """One directed link's sums: training, evaluation, and training without first and second visits
    that are coded in their own way.

    ``kinds`` has those of training by number of the kind. ``rested``: micro-batches of training for
    which nothing was sent, since the receiver remembers them, and ``rested_values`` what they hold.
    ``gained``: of the steps that were measured.
    """

    edge: int
    direction: str
    codec: str
    training: Tally = dataclasses.field(default_factory=Tally)
    steady: Tally = dataclasses.field(default_factory=Tally)
    evaluation: Tally = dataclasses.field(default_factory=Tally)
    kinds: list[Tally] = dataclasses.field(default_factory=lambda: [Tally() for _ in Kind])
    rested: int = 0
    rested_values: int = 0
    gained: Gained = dataclasses.field(default_factory=dict)

    def count(self, sections: list[Section], total: int, values: list[int], train: bool) -> None:
        """Count one message: its sections, all its bytes, and the values in each section."""
        sizes = [s.payload.numel() for s in sections]
        payload = sum(sizes)
        if not train:
            self.evaluation.add(payload, total, sum(values))
            return
        for tally in self._whole(any(s.kind in _EARLY for s in sections)):
            tally.add(payload, total, sum(values))
        # each section bears the message's headers in equal parts
        share = (total - payload) // max(len(sections), 1)
        for section, size, n in zip(sections, sizes, values, strict=True):
            self.kinds[section.kind].add(size, size + share, n)

    def tallies(self, kind: Kind) -> tuple[Tally, ...]:
        """What to add a message of training to that has one section."""
        return (*self._whole(kind in _EARLY), self.kinds[kind])

    def _whole(self, early: bool) -> tuple[Tally, ...]:
        """The sums over messages of training to which one belongs."""
        return (self.training,) if early else (self.training, self.steady)

    def state(self) -> dict[str, Any]:
        """Everything counted, as JSON values that ``add`` takes."""
        return {
            "edge": self.edge,
            "direction": self.direction,
            "codec": self.codec,
            "rested": self.rested,
            "rested_values": self.rested_values,
            "gained": self.gained,
            **{name: dataclasses.asdict(getattr(self, name)) for name in SUMS},
            "kinds": {kind.name.lower(): dataclasses.asdict(self.kinds[kind]) for kind in Kind},
        }

    def add(self, state: Mapping[str, Any]) -> None:
        """Count what ``state`` says that was counted before."""
        self.rested += state["rested"]
        self.rested_values += state["rested_values"]
        for name, sums in state["gained"].items():
            mine = self.gained.setdefault(name, [0.0, 0.0])
            self.gained[name] = [a + b for a, b in zip(mine, sums, strict=True)]
        for name in SUMS:
            getattr(self, name).add_all(state[name])
        for kind in Kind:
            self.kinds[kind].add_all(state["kinds"].get(kind.name.lower(), {}))

    @property
    def hit_rate(self) -> float | None:
        """The share of values whose sample was remembered, those of micro-batches at rest among
        them; None before the first value."""
        known = sum(self.kinds[kind].values for kind in _LATER) + self.rested_values
        visited = self.training.values + self.rested_values
        return known / visited if visited else None

    def report(self) -> dict[str, Any]:
        """Plain numbers for a summary; see docs/train.md."""
        t = self.training
        return {
            "edge": self.edge,
            "direction": self.direction,
            "codec": self.codec,
            "messages": t.messages,
            "rested": self.rested,
            "payload_bytes": t.payload_bytes,
            "header_bytes": t.header_bytes,
            "raw_bytes": t.raw_bytes,
            "values": t.values,
            "bits_per_value": t.bits_per_value,
            "steady_bits_per_value": self.steady.bits_per_value,
            "hit_rate": self.hit_rate,
            "gain_db": gain_db(self.gained),
            "evaluation_messages": self.evaluation.messages,
            "evaluation_bytes": self.evaluation.bytes,
            "kinds": {
                kind.name.lower(): dataclasses.asdict(self.kinds[kind])
                for kind in sorted(Kind, key=lambda kind: kind.name)
                if self.kinds[kind].messages
            },
        }


@dataclasses.dataclass
class Timers:
    """Seconds of one rank since the last ``take``.

    ``encode_s`` and ``decode_s`` are the CPU time of the thread that trains, without the
    transport's; the others are of the clock on the wall.
    """

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


def link_name(edge: int, direction: str) -> str:
    """A directed link as people read it: ``forward 0→1``."""
    first, second = (edge, edge + 1) if direction == "forward" else (edge + 1, edge)
    return f"{direction} {first}→{second}"


def sum_reports(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report for several counters of the same kind of traffic."""
    total = dict(reports[0])
    for other in reports[1:]:
        for name in ("messages", "payload_bytes", "header_bytes", "raw_bytes", "values"):
            total[name] += other[name]
    total["bits_per_value"] = total["steady_bits_per_value"] = total["hit_rate"] = None
    total["kinds"], total["gain_db"] = {}, {}
    return total
