"""The references of one end of a link: by key, with the number of visits that made each."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from thinwire.codecs.keeping import KEEPINGS, Keeping
from thinwire.store.held import Held
from thinwire.store.plan import Members, Microbatches, StepVisits, plan_step
from thinwire.store.slots import slot_size
from thinwire.store.tier import Tier

#: Digests are compared in so many parts: where one differs, only its keys are sent anew.
PARTS = 64
_MASK = (1 << 64) - 1


class ReferenceStore:
    """Key (int64) to reference and version.

    ``keeping``: how references are kept. Both ends of a link have the same capacity, hence hold
    the same keys; where the rows lie is each end's own affair.
    """

    def __init__(self, keeping: Keeping = KEEPINGS["fp32"]) -> None:
        self.keeping = keeping
        self.members: Members | None = None
        self.tier: Tier | None = None
        self._held: dict[int, Held] = {}
        self._lengths: dict[int, int] = {}
        self._bytes = 0
        self._used: list[Held] = []  # by the step before

    def bound(self, capacity: int) -> None:
        """Hold at most ``capacity`` bytes of references, each as large as its slot on disk would
        be, wherever it lies: both ends must count alike. Before the first step."""
        self.members = Members(capacity, self._room_of)

    def _room_of(self, values: int) -> int:
        return slot_size(self.keeping.nbytes(values))

    # What is held.

    def __len__(self) -> int:
        return len(self._held)

    @property
    def lengths(self) -> Mapping[int, int]:
        """Values in each key's reference."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all references, wherever they lie."""
        return self._bytes

    def versions(self, keys: Sequence[int]) -> list[int]:
        """Visits of each key so far; 0 for one never seen."""
        return [held.version if (held := self._held.get(key)) else 0 for key in keys]

    def held(self, keys: Sequence[int]) -> list[Held]:
        """What is held of each key: the store's own, good until the key is dropped."""
        return [self._held[key] for key in keys]

    def rows(self, keys: Sequence[int]) -> list[Tensor]:
        """The references of ``keys`` themselves, as they are kept: not to be changed."""
        rows = []
        for key in keys:
            row = self._held[key].row
            assert row is not None, "the step did not announce this key"
            rows.append(row)
        return rows

    def read(self, keys: Sequence[int]) -> Tensor:
        """The references of ``keys``, of one length, as [keys, n] float32."""
        return self.keeping.read(self.rows(keys), None, self._lengths[keys[0]])

    # A step, at both ends alike.

    def acquire(self, keys: Iterable[int], following: Iterable[int] = ()) -> None:
        """Have the references of ``keys``, which the step will need, in RAM, and write back those
        of the step before; ``following`` are those of the next step. Drops what is lost."""
        if self.tier is None:
            return
        wanted = self._known(keys)
        needed = {held.key for held in wanted}.union(following)
        self.tier.rest(self._used, needed)
        self.drop([held.key for held in self.tier.load(wanted)])

    def fetch(self, keys: Iterable[int]) -> None:
        """Begin to read the references of ``keys``, which the next step will need."""
        if self.tier is not None:
            self.tier.fetch(self._known(keys))

    def _known(self, keys: Iterable[int]) -> list[Held]:
        """What is held of those of ``keys`` of which anything is."""
        return [self._held[key] for key in keys if key in self._held]

    def settle(self) -> None:
        """Wait for what is being read, and drop what is lost."""
        if self.tier is not None:
            self.drop([held.key for held in self.tier.arrive(wait=True)])

    def standing(self, keys: Sequence[int]) -> int:
        """A hash of what is held of ``keys``: versions and numbers of values, in order."""
        found = [held if (held := self._held.get(key)) else _NOTHING for key in keys]
        numbers = [n for held in found for n in (held.version, held.values)]
        return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}q", *numbers))

    def plan(self, microbatches: Microbatches) -> StepVisits:
        """The step's visits; a pure function of what both ends hold."""
        return plan_step(self._lengths, microbatches, self.members)

    def begin(self, microbatches: Microbatches, plan: StepVisits) -> None:
        """The planned step begins: those that must go for others go now."""
        self.drop(plan.evicted)
        if self.members is not None:
            self.members.advance(microbatches, plan)
        if self.tier is not None:
            self._used = self._known({key for keys, _ in microbatches for key in keys})

    def put(
        self, keys: Sequence[int], rows: Sequence[Tensor], values: Sequence[int]
    ) -> list[Tensor]:
        """Make ``rows``, which the store takes over, the references of ``keys``; versions advance.

        ``values``: how many each stands for. Returns tensors that they replace, now the caller's.
        """
        displaced = []
        for key, row, n in zip(keys, rows, values, strict=True):
            held = self._held.get(key)
            if held is not None and held.values == n:
                old = held.row
                if held.renew(row) and old is not None:
                    displaced.append(old)
            else:
                self._replace(held, Held(key, row, n, 1 if held is None else held.version + 1))
        return displaced

    def touch(self, keys: Sequence[int]) -> None:
        """The references of ``keys`` were confirmed: versions advance."""
        for key in keys:
            self._held[key].version += 1

    def drop(self, keys: Iterable[int]) -> None:
        """Forget ``keys``: their next visit is a first one."""
        for key in keys:
            held = self._held.pop(key, None)
            if held is None:
                continue
            self._lengths.pop(key)
            self._bytes -= self.keeping.nbytes(held.values)
            if self.members is not None:
                self.members.forget(key)
                self.members.used -= self._room_of(held.values)
            if self.tier is not None:
                self.tier.forget(held)

    def _replace(self, old: Held | None, new: Held) -> None:
        """Hold ``new``, instead of ``old`` of another length."""
        if old is not None:
            self._bytes -= self.keeping.nbytes(old.values)
            if self.members is not None:
                self.members.used -= self._room_of(old.values)
            if self.tier is not None:
                self.tier.forget(old)
        self._held[new.key] = new
        self._lengths[new.key] = new.values
        self._bytes += self.keeping.nbytes(new.values)
        if self.members is not None:
            self.members.used += self._room_of(new.values)
        if self.tier is not None:
            self._used.append(new)

    # What two ends compare, and what is saved.

    def digest(self) -> int:
        """A 64-bit hash of all keys, versions and references: equal at both ends of a link."""
        return sum(self.digests()) & _MASK

    def digests(self) -> list[int]:
        """``digest`` in ``PARTS`` parts, of which it is the sum; key k belongs to k % PARTS."""
        parts = [0] * PARTS
        for key, held in self._held.items():
            parts[key % PARTS] += _entry(key, held.version, held.values, held.content_hash)
        return [part & _MASK for part in parts]

    @property
    def everyone(self) -> list[Held]:
        """All that is held."""
        return list(self._held.values())

    @property
    def clock(self) -> list[int]:
        """The members' time, and the longest between two visits."""
        return [0, 0] if self.members is None else [self.members.now, self.members.longest]

    def clear(self) -> None:
        """Hold nothing, as a fresh store."""
        self.drop(list(self._held))
        if self.members is not None:
            self.bound(self.members.capacity)

    def table(self, everyone: Sequence[Held]) -> dict[str, Tensor]:
        """``everyone`` but the rows, int64: a value a key in all but ``clock``, the members'."""
        last = {} if self.members is None else self.members.last
        columns = {
            "keys": [h.key for h in everyone],
            "versions": [h.version for h in everyone],
            "values": [h.values for h in everyone],
            "last": [last.get(h.key, 0) for h in everyone],
        }
        columns["clock"] = self.clock
        return {name: torch.tensor(column, dtype=torch.int64) for name, column in columns.items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors: ``table`` of all, and their references end to end (uint8)."""
        everyone = self.everyone
        if self.tier is not None:
            self.tier.load(everyone)
        rows = [held.row.view(torch.uint8) for held in everyone if held.row is not None]
        if len(rows) < len(everyone):
            raise ValueError(f"{len(everyone) - len(rows)} references cannot be read from the disk")
        together = torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)
        return {**self.table(everyone), "rows": together}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the contents by those of ``state_dict``."""
        sizes = [self.keeping.nbytes(n) for n in state["values"].tolist()]
        if sum(sizes) != state["rows"].numel():
            raise ValueError(f"{state['rows'].numel()} bytes of references, not {sum(sizes)}")
        rows = state["rows"].split(sizes) if sizes else ()
        self.fill(state, [row.clone().view(self.keeping.dtype) for row in rows])

    def fill(self, state: Mapping[str, Any], rows: Sequence[Tensor | None]) -> list[Held]:
        """Replace the contents by what ``table`` says, with these rows; returns what is held."""
        self.clear()
        names = ("keys", "versions", "values", "last")
        columns = [state[name].tolist() for name in names]
        everyone = []
        for key, version, values, _, row in zip(*columns, rows, strict=True):
            everyone.append(Held(key, row, values, version))
            self._replace(None, everyone[-1])
        self._used = []
        if self.tier is not None:
            self.tier.take(everyone)
        if self.members is not None:
            self.members.now, self.members.longest = state["clock"].tolist()
            order = sorted(zip(columns[3], columns[0], strict=True))
            self.members.last = {key: seen for seen, key in order}
        return everyone


_NOTHING = Held(0, None, 0, 0)
_PACK = struct.Struct("<qQQQ").pack


def _entry(key: int, version: int, values: int, content: int) -> int:
    return xxhash.xxh3_64_intdigest(_PACK(key, version, values, content))
