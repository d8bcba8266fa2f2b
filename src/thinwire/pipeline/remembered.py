"""That both ends of each link remember the same of each sample, and how much they may.

Every frame names the versions that it is coded against, so a difference never goes unnoticed; but
a receiver that notices it in the middle of a step cannot go on. So the ends compare one step ahead:
what they hold of the next step's samples is in the message with which each rank ends a step, as a
hash. Where two ends differ they tell each other the versions, and forget the samples that differ,
whose next visit is a first one. From time to time whole digests are compared in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.boundary import StepPlan
from thinwire.counters import Timers
from thinwire.edge import EdgeEnd, LinkReceiver, LinkSender
from thinwire.store import (
    Background,
    FolderInUseError,
    FolderLock,
    ReferenceStore,
    SlotFiles,
    Tier,
)
from thinwire.store.tier import STEPS_IN_RAM, Traffic

_LOG = logging.getLogger(__name__)
#: Training steps between two comparisons of all that both ends hold.
COMPARE_EVERY = 100

Gather = Callable[[Any], list[Any]]
End = LinkSender | LinkReceiver


@dataclasses.dataclass(frozen=True)
class Storage:
    """Where a rank keeps the references of its links, and how many bytes of them.

    ``ram``: bytes in RAM, None without bound. ``folder``: a folder of this pipeline and rank alone
    for those that do not fit, and for checkpoints; None: RAM alone, and ``ram`` then bounds how
    many samples are remembered: the others are sent as values. ``disk``: bytes there, None without
    bound; it bounds what is remembered wherever it lies. ``copies``: slots that a reference may
    take on disk, as checkpoints keep old ones. Bounds count slots, up to an eighth larger.

    A link holds as much as the end that has less room can.
    """

    ram: int | None = None
    folder: Path | None = None
    disk: int | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        for name, least in (("ram", 0), ("disk", 0), ("copies", 1)):
            value = getattr(self, name)
            if (value is None and name != "copies") or (type(value) is int and value >= least):
                continue
            raise ValueError(f"{name}={value!r}: a whole number from {least}")
        folder: Any = self.folder
        if not isinstance(folder, str | Path | None):
            raise ValueError(f"folder={folder!r} is no path")
        object.__setattr__(self, "folder", None if folder is None else Path(folder))

    @property
    def capacity(self) -> int | None:
        """Bytes of references that it can hold, None without bound."""
        if self.folder is None:
            return self.ram
        if self.disk is None:
            return None
        return self.disk // self.copies


class Remembered:
    """The references of a rank's links."""

    def __init__(
        self,
        ends: Sequence[EdgeEnd],
        storage: Storage,
        rows: int,
        timers: Timers,
        agrees: bool = True,
    ) -> None:
        """``agrees``: whether any link of the pipeline remembers samples at both of its ends."""
        links = [link for end in ends for link in (end.outgoing, end.incoming)]
        #: (name, end) of each end of a link that remembers samples; both, where both are here.
        self.ends: list[tuple[str, End]] = [
            (f"{link.place.edge} {link.place.direction.name.lower()}", link)
            for link in links
            if link.stores
        ]
        self.storage = storage
        self.background = Background()
        self._lock: FolderLock | None = None
        self._rows, self._timers, self._agrees = rows, timers, agrees
        self._agreed: tuple[int, ...] | None = None
        self._steps = 0
        #: What each checkpoint names of the stores, by its folder.
        self.pinned: dict[str, list[tuple[ReferenceStore, Mapping[str, Tensor]]]] = {}
        #: References that were dropped since the two ends differed, at this rank's ends.
        self.repairs = 0

    @property
    def _bounded(self) -> list[tuple[str, End]]:
        """The ends whose stores may grow: those by places in the batch stay small, and in RAM."""
        return [(name, link) for name, link in self.ends if not link.by_slot]

    @property
    def placed(self) -> Iterator[tuple[dict[str, Any], End, ReferenceStore]]:
        """Every store: where it stands, as JSON values, its link, and it."""
        for _, link in self.ends:
            for index, store in link.stores.items():
                yield place_of(link, index), link, store

    @functools.cached_property
    def stores(self) -> list[tuple[str, ReferenceStore]]:
        """(name, store) of each tensor of each end."""
        return [
            (f"edge {name} {index} {link.role}", store)
            for name, link in self.ends
            for index, store in link.stores.items()
        ]

    @property
    def _each(self) -> Iterator[tuple[End, ReferenceStore]]:
        for _, link in self.ends:
            for store in link.stores.values():
                yield link, store

    # Where and how much.

    def shares(self) -> dict[str, int | None] | str:
        """How many bytes each end of a link may hold, by its name, or what is wrong with that."""
        total = sum(link.reference_bytes for _, link in self.ends)
        found: dict[str, int | None] = {}
        for name, link in self._bounded:
            row = link.reference_bytes
            share = _part(self.storage.capacity, row, total)
            ram = _part(self.storage.ram, row, total)
            least = STEPS_IN_RAM * self._rows * row
            if self.storage.folder is not None and ram is not None and ram < least:
                needed = STEPS_IN_RAM * self._rows * total
                return (
                    f"{self.storage.ram:,} bytes of RAM for references are too few: those of "
                    f"{STEPS_IN_RAM} steps take {needed:,} at this rank"
                )
            found[name] = share  # the same for both ends, where both are here
        return self._take_folder() or found

    def _take_folder(self) -> str | None:
        """Have the folder for this rank alone; what is wrong, if that cannot be."""
        folder = self.storage.folder
        if folder is None:
            return None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(folder)
        except FolderInUseError as error:
            return f"{error}: each rank of each pipeline needs a folder of its own, until close()"
        except OSError as error:
            return f"can't keep references in {folder}: {error.strerror}"
        return None

    def settle_capacity(self, shares: Iterable[dict[str, int | None]]) -> None:
        """Each link holds what the end with less room can; all ranks' shares are given."""
        least: dict[str, int] = {}
        for share in shares:
            for name, capacity in share.items():
                if capacity is not None:
                    least[name] = min(capacity, least.get(name, capacity))
        for name, link in self._bounded:
            if name in least:
                for store in link.stores.values():
                    store.bound(least[name] // len(link.stores))
        self._open()

    def _open(self) -> None:
        """Give the stores their place on disk."""
        folder = self.storage.folder
        if folder is None:
            return
        total = sum(link.reference_bytes for _, link in self.ends)
        for _, link in self._bounded:
            ram = _part(self.storage.ram, link.reference_bytes, total)
            disk = _part(self.storage.disk, link.reference_bytes, total)
            for index, store in link.stores.items():
                file = rows_of(place_of(link, index))
                share = None if ram is None else ram // len(link.stores)
                limit = None if disk is None else disk // len(link.stores)
                files = SlotFiles(folder, file, limit)
                store.tier = Tier(files, self.background, store.keeping, share, link.device)

    # A step.

    def acquire(self, plan: StepPlan, gather: Gather) -> None:
        """Have what the step needs in RAM, and agree on it unless the last step did."""
        keys = plan.keys
        with self._timed():
            for link, store in self._each:
                store.acquire(link.own_keys(keys), link.own_keys(plan.next_keys or ()))
        if self._agrees and self._agreed != keys:
            self._agree(keys, gather([self.standing(keys), None]), gather)
        self._agreed = None

    def fetch(self, plan: StepPlan) -> None:
        """Begin to read what the next step will need."""
        if plan.next_keys:
            with self._timed():
                for link, store in self._each:
                    store.fetch(link.own_keys(plan.next_keys))

    def standing(self, keys: tuple[int, ...] | None) -> dict[str, list[str]]:
        """What the ends hold of ``keys``, by link: a hash for each of them that is here."""
        if keys is None:
            return {}
        for _, store in self.stores:
            store.settle()
        return self._said(lambda link, store: f"{store.standing(link.own_keys(keys)):x}")

    def report(self, plan: StepPlan) -> list[Any]:
        """What this rank says at the end of a step: of the next one's samples, and now and then of
        everything."""
        self._steps += 1
        with self._timed():
            whole = self._digests() if self._steps % COMPARE_EVERY == 0 else None
            return [self.standing(plan.next_keys), whole]

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the CPU time inside as a part of compression."""
        start = time.thread_time()
        yield
        self._timers.encode_s += time.thread_time() - start

    def _digests(self) -> dict[str, list[str]]:
        """Digests of everything, by link, for each end that is here."""
        return self._said(lambda link, store: f"{store.digest():x}")

    def _said(self, what: Callable[[End, ReferenceStore], str]) -> dict[str, list[str]]:
        """What the stores of each end say, by link, an entry for each end that is here; where both
        ends hold the same."""
        said: dict[str, list[str]] = {}
        for name, link in self.ends:
            if link.shares:
                said.setdefault(name, []).append(
                    ".".join(what(link, s) for s in link.stores.values())
                )
        return said

    def conclude(self, plan: StepPlan, reports: list[list[Any]], gather: Gather) -> None:
        """All ranks' reports are there: repair what differs."""
        unlike = unequal([whole for _, whole in reports if whole])
        if unlike:
            self._repair_parts(unlike, gather)
            reports = gather([self.standing(plan.next_keys), None])
        self._agree(plan.next_keys, reports, gather)

    def compare(self, gather: Gather) -> bool:
        """Compare everything that all ends hold, and drop what differs; whether all was equal."""
        # the clocks beside the references decide who leaves next
        found = gather([self._digests(), self._said(lambda link, store: f"{store.clock}")])
        apart = unequal(clocks for _, clocks in found)
        for name, link in self.ends:
            if name in apart:
                for store in link.stores.values():
                    store.clear()
        unlike = unequal(digests for digests, _ in found)
        if unlike - apart:
            self._repair_parts(unlike - apart, gather)
        self._agreed = None
        return not unlike | apart

    def _agree(
        self, keys: tuple[int, ...] | None, reports: list[list[Any]], gather: Gather
    ) -> None:
        unlike = unequal([standing for standing, _ in reports])
        if unlike and keys is not None:
            self._repair_keys(keys, unlike, gather)
        self._agreed = keys

    def _repair_keys(self, keys: tuple[int, ...], unlike: set[str], gather: Gather) -> None:
        """Forget those of ``keys`` that the two ends of a link hold otherwise."""

        def held(link: End, store: ReferenceStore) -> list[Any]:
            own = link.own_keys(keys)
            return [[store.versions([key])[0], store.lengths.get(key, -1)] for key in own]

        for name, link, wrong in self._differing(unlike, held, gather):
            own = link.own_keys(keys)
            self._repair(name, link, [own[k] for k in wrong])

    def _repair_parts(self, unlike: set[str], gather: Gather) -> None:
        """Forget the keys of those parts of a link's digests that differ."""

        def digests(link: End, store: ReferenceStore) -> list[Any]:
            return [f"{part:x}" for part in store.digests()]

        for name, link, wrong in self._differing(unlike, digests, gather):
            self._repair(name, link, link.keys_of_parts(wrong))

    def _differing(
        self, unlike: set[str], what: Callable[[End, ReferenceStore], list[Any]], gather: Gather
    ) -> Iterator[tuple[str, End, list[int]]]:
        """Where in the lists that ``what`` gives the two ends of the links ``unlike`` differ: each
        end that is here, with its link's name and the places, in any of its stores."""
        mine: dict[str, list[Any]] = {}
        here = [(name, link) for name, link in self.ends if name in unlike]
        for name, link in here:
            mine.setdefault(name, []).append([what(link, s) for s in link.stores.values()])
        told = _by_name(gather(mine))
        for name, link in here:
            one, other = told[name]
            places = {
                place
                for first, second in zip(one, other, strict=True)
                for place, (a, b) in enumerate(zip(first, second, strict=True))
                if a != b
            }
            yield name, link, sorted(places)

    def _repair(self, name: str, link: End, keys: Sequence[int]) -> None:
        link.repair(keys)
        self.repairs += len(keys)
        if isinstance(link, LinkSender):
            _LOG.warning(
                "link %s: the two ends did not hold the same of %d samples; they are sent anew",
                name,
                len(keys),
            )

    def pin(self, folder: str, store: ReferenceStore, saved: Mapping[str, Tensor]) -> None:
        """The checkpoint in ``folder`` names ``saved`` of a store."""
        self.pinned.setdefault(folder, []).append((store, saved))

    def facts(self) -> list[dict[str, Any]]:
        """What each end remembers, as plain numbers; bytes on disk are of the files there."""
        found = []
        for where, _, store in self.placed:
            tier = store.tier
            traffic = Traffic() if tier is None else tier.traffic
            in_ram = [held.row.nbytes for held in store.everyone if held.row is not None]
            found.append(
                {
                    **where,
                    "precision": store.keeping.name,
                    "samples": len(store),
                    "bytes": store.nbytes,
                    "ram_bytes": sum(in_ram),
                    "disk_bytes": 0 if tier is None else tier.files.nbytes,
                    "capacity": None if store.members is None else store.members.capacity,
                    **dataclasses.asdict(traffic),
                }
            )
        return found

    def close(self) -> None:
        self.background.close()
        for _, store in self.stores:
            if store.tier is not None:
                store.tier.files.close()
        if self._lock is not None:
            self._lock.release()


def rows_of(where: Mapping[str, Any]) -> str:
    """How the names of files begin that have the rows of a store, by where it stands."""
    return "{edge}-{direction}-{tensor}-{role}".format(**where)


def place_of(link: End, index: int) -> dict[str, Any]:
    """Where a store of a link's end stands, as JSON values."""
    return {
        "edge": link.place.edge,
        "direction": link.place.direction.name.lower(),
        "tensor": index,
        "role": link.role,
    }


def _part(total: int | None, weight: int, of: int) -> int | None:
    return None if total is None else total * weight // max(of, 1)


def _by_name(found: Iterable[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """What both ends of each link said."""
    together: dict[str, list[Any]] = {}
    for said in found:
        for name, values in said.items():
            together.setdefault(name, []).extend(values)
    return together


def unequal(found: Iterable[dict[str, list[str]]]) -> set[str]:
    """The links whose two ends said different things."""
    return {name for name, values in _by_name(found).items() if len(set(values)) > 1}
