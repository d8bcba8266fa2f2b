"""Named tensors, averaged over the ranks of a group in buckets, each a round behind the next.

What is averaged stays in place until all is known: then the means are written, or, where a rank's
values were not finite, NaN, and every bucket's state is what it was.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from thinwire.exchange import Averaging, Call, Exchange, Member, Peers
from thinwire.exchange.base import Outcome, Steps

#: The steps begun, and buckets.
Prepared = tuple[int, dict[int, Averaging]]
#: Values of a bucket, unless a single tensor has more.
BUCKET = 1 << 20


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what tensors of ``dtype`` are averaged."""
    if not dtype.is_floating_point:
        raise ValueError(f"{dtype} cannot be averaged: gradients are floating-point numbers")
    return torch.float64 if dtype == torch.float64 else torch.float32


def seed_of(*numbers: int) -> int:
    """Of one message's rounding, from numbers of 0 on."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}Q", *numbers)) >> 1


class Averaged(NamedTuple):
    """A step of all tensors: whether all counts; by number the means, None where a bucket's values
    were not finite on some rank; and which tensors any rank had."""

    finite: bool
    means: list[Tensor | None]
    present: list[bool]


class Flow:
    """Buckets under way: when one begins, those before it go a round on."""

    def __init__(self) -> None:
        self._running: list[tuple[int, Steps]] = []
        self.outcomes: dict[int, Outcome] = {}

    def begin(self, bucket: int, steps: Steps) -> None:
        self._running.append((bucket, steps))
        self._advance(list(reversed(self._running)))

    def finish(self) -> None:
        while self._running:
            self._advance(list(self._running))

    def _advance(self, these: Iterable[tuple[int, Steps]]) -> None:
        for one in these:
            try:
                next(one[1])
            except StopIteration as end:
                self.outcomes[one[0]] = end.value
                self._running.remove(one)


class Averager:
    """``tensors`` (name and an example of shape, dtype and device), averaged over ``peers``.

    ``settings``: what else all ranks must have alike, as JSON values by name.

    Creating one is collective: all ranks compare what they were given. Raises ValueError on all
    alike where it differs.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, Tensor]],
        peers: Peers,
        exchange: Exchange,
        seed: int = 0,
        bucket: int = BUCKET,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.peers, self.exchange, self._seed = peers, exchange, seed
        self._members = [
            Member(name, number, tuple(x.shape)) for number, (name, x) in enumerate(tensors)
        ]
        self._like = [(work_dtype(x.dtype), x.device) for _, x in tensors]
        if not isinstance(bucket, int) or bucket < 1:
            raise ValueError(f"bucket={bucket!r} is no number of values")
        self._compare(tensors, {"bucket": bucket, **(settings or {})})
        self._buckets: dict[int, Averaging] = {}
        self._bucket_of: dict[int, tuple[int, ...]] = {}
        self._left: dict[str, Tensor] = {}  # state of tensors that are in no bucket now
        self._flow = Flow()
        self._steps = 0  # begun, also those that did not count
        self._size = bucket

    def _compare(self, tensors: Sequence[tuple[str, Tensor]], settings: Mapping[str, Any]) -> None:
        names = [name for name, _ in tensors]
        if len(set(names)) != len(names):
            raise ValueError("two tensors have the same name")
        described = [[name, str(x.dtype), list(x.shape)] for name, x in tensors]
        digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        mine = {
            "exchange": str(self.exchange),
            "seed": self._seed,
            "number of tensors": len(tensors),
            "names, shapes or dtypes": digest,
            **settings,
        }
        found = self.peers.gather(mine)
        for rank, other in enumerate(found):
            for what, theirs in other.items():
                if (ours := found[0].get(what)) != theirs:
                    shown = f": {ours} and {theirs}" if len(str(theirs)) < 60 else ""
                    raise ValueError(
                        f"rank 0 and rank {rank} of the group differ in their {what}{shown}"
                    )

    def split(self, of: Iterable[int] | None = None) -> list[list[int]]:
        """The tensors' numbers (None: all) in buckets of one dtype and device, in their order."""
        buckets: list[list[int]] = []
        last: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
        for number in range(len(self._members)) if of is None else of:
            like, numel = self._like[number], self._members[number].numel
            if like not in last or last[like][1] + numel > self._size:
                last[like] = [], 0
                buckets.append(last[like][0])
            numbers, size = last[like]
            numbers.append(number)
            last[like] = numbers, size + numel
        return buckets

    def begin(self) -> None:
        """All ranks begin a step."""
        self._flow = Flow()
        self._steps += 1
        self.peers.begin_step()

    def add(self, bucket: int, numbers: Sequence[int], tensors: Sequence[Tensor | None]) -> None:
        """Begin to average these tensors, those of ``numbers``, 1-D and contiguous (None: absent
        here); the same numbers on all ranks. Another order of buckets than before is welcome."""
        seed = seed_of(self._seed, self._steps, self.peers.rank, bucket)
        call = Call(bucket, seed, self._steps)
        self._flow.begin(bucket, self._bucket(bucket, tuple(numbers)).average(tensors, call))

    def finish(self) -> Averaged:
        """Wait for all buckets of the step. The state waits for ``settle``."""
        self._flow.finish()
        means: list[Tensor | None] = [None] * len(self._members)
        present = [False] * len(self._members)
        for bucket, outcome in self._flow.outcomes.items():
            for at, number in enumerate(self._bucket_of[bucket]):
                means[number] = None if outcome.means is None else outcome.means[at]
                present[number] = outcome.present[at]
        finite = all(outcome.means is not None for outcome in self._flow.outcomes.values())
        return Averaged(finite, means, present)

    def average(self, value: Callable[[int], Tensor | None]) -> Averaged:
        """A step of all tensors, in the buckets of ``split``; ``value``: as ``add`` takes them, by
        number."""
        self.begin()
        for bucket, numbers in enumerate(self.split()):
            self.add(bucket, numbers, [value(n) for n in numbers])
        return self.finish()

    def settle(self, counts: bool) -> None:
        """The step counts, or all state is what it was before."""
        for averaging in self._buckets.values():
            if counts:
                averaging.commit()
            else:
                averaging.discard()

    def report(self) -> dict[str, Any]:
        """What this rank has sent, as plain numbers."""
        return self.peers.counters.report() | {"exchange": str(self.exchange)}

    # Buckets and their state.

    def _bucket(self, bucket: int, numbers: tuple[int, ...]) -> Averaging:
        if self._bucket_of.get(bucket) != numbers:
            self._form(bucket, numbers)
        return self._buckets[bucket]

    def _form(self, bucket: int, numbers: tuple[int, ...]) -> None:
        """Make a bucket of these tensors; what others have remembered of them goes along."""
        made, taken = self._made(numbers), set(numbers)
        for other in [b for b, of in self._bucket_of.items() if b == bucket or taken & set(of)]:
            self._left |= _copied(self._buckets.pop(other).state())
            del self._bucket_of[other]
        made.load({name: self._left.pop(name, x) for name, x in _copied(made.state()).items()})
        self._buckets[bucket], self._bucket_of[bucket] = made, numbers

    def _made(self, numbers: Sequence[int]) -> Averaging:
        """A new bucket of these tensors, without any state."""
        dtype, device = self._like[numbers[0]]
        members = [self._members[n] for n in numbers]
        return self.exchange.averaging(members, dtype, device, self.peers)

    def form(self) -> None:
        """Make the buckets of ``split``."""
        for bucket, numbers in enumerate(self.split()):
            self._bucket(bucket, tuple(numbers))

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all that this rank remembers, by plain names."""
        spec = torch.frombuffer(bytearray(str(self.exchange).encode()), dtype=torch.uint8)
        found = {"steps": torch.tensor(self._steps), "spec": spec} | _copied(self._left)
        for averaging in self._buckets.values():
            found |= _copied(averaging.state())
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from ``state_dict``'s result at this rank of as many. Raises ValueError, with
        nothing changed, where it is of other tensors, another exchange or another rank."""
        self.adopt(self.prepared(state))

    def prepared(self, state: Mapping[str, Tensor]) -> Prepared:
        """What ``adopt`` takes; raises the ValueError of ``load_state_dict``."""
        steps = counted(state, "steps")
        spec = state.get("spec")
        known = {"steps", "spec"}
        if spec is None or spec.dtype != torch.uint8:
            raise ValueError("the state has no 'spec': it is of nothing that averages gradients")
        found = bytes(spec.cpu().contiguous().numpy()).decode("utf-8", "replace")
        if found != str(self.exchange):
            raise ValueError(f"the state is of {found!r}, not of {str(self.exchange)!r}")
        made = {}
        for bucket, numbers in enumerate(self.split()):
            made[bucket] = self._made(numbers)
            made[bucket].load(state)
            known |= set(made[bucket].state())
        unknown = sorted(set(state) - known)
        if unknown:
            raise ValueError(
                f"the state has {unknown[0]!r}, of which {self.exchange} knows nothing at rank "
                f"{self.peers.rank} of {self.peers.size}"
            )
        return steps, made

    def adopt(self, prepared: Prepared) -> None:
        """Go on from what was ``prepared``."""
        (self._steps, self._buckets), self._left = prepared, {}
        self._bucket_of = {b: tuple(numbers) for b, numbers in enumerate(self.split())}


class Averages:
    """What averages by an ``Averager`` alone: its state is that one's."""

    def __init__(self, averager: Averager) -> None:
        self._averager = averager
        self.skipped = False

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's residuals, as plain tensors by the name of the parameter."""
        return self._averager.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from this rank's ``state_dict``; raises ValueError, with nothing changed, where it
        does not fit."""
        self._averager.load_state_dict(state)

    def report(self) -> dict[str, Any]:
        """What this rank has sent, as plain numbers; see docs/data-parallel.md."""
        return self._averager.report()

    def close(self) -> None:
        """Release the transport; this one is unusable afterwards."""
        self._averager.peers.close()


def digest_of(tensors: Iterable[Tensor]) -> str:
    """A hash of all values, to be compared."""
    hashed = xxhash.xxh3_128()
    for x in tensors:
        hashed.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def counted(state: Mapping[str, Tensor], name: str) -> int:
    """A number that a state has; raises ValueError where it is no state, or has none."""
    if not isinstance(state, Mapping) or not all(isinstance(x, Tensor) for x in state.values()):
        raise ValueError("a state is a dictionary of tensors")
    found = state.get(name)
    if found is None or found.dtype != torch.int64 or found.dim() or int(found) < 0:
        raise ValueError(f"the state has no {name!r}: it is of something else")
    return int(found)


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in state.items()}
