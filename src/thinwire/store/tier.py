"""A store's rows on disk: read before they are needed, written back while the model computes.

What stays in RAM is fixed by who came first, as in ``plan``: in an epoch each row is used once, so
any choice serves as many. All decisions are taken in the thread that trains; the background thread
only moves bytes, of rows that nobody changes, so no lock is needed.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Sequence

import torch
import xxhash
from torch import Tensor

from thinwire.codecs.keeping import Keeping
from thinwire.store.background import Background, Job
from thinwire.store.held import Held, bytes_of
from thinwire.store.slots import Slot, SlotFiles

#: Steps whose rows may be in RAM beside those that stay there: the one before, which is being
#: written, this one, and the next, which is being read.
STEPS_IN_RAM = 3
#: Write-backs that may be under way before a step waits for the disk.
_WRITES_AHEAD = 2
_BATCH = 256  # rows of a checkpoint written by one job


@dataclasses.dataclass
class Traffic:
    """What went to the disk and came from it, and what the training thread waited for it."""

    read_bytes: int = 0
    written_bytes: int = 0
    #: Rows that were needed before anybody had announced them, or before they were there.
    late: int = 0
    #: Rows that could not be read, or were not what had been written.
    lost: int = 0
    stalled_s: float = 0.0


class Tier:
    """The rows of one store on disk, and which of them are in RAM.

    ``ram``: bytes in RAM, None without bound. ``device``: where rows are wanted.
    """

    def __init__(
        self,
        files: SlotFiles,
        background: Background,
        keeping: Keeping,
        ram: int | None,
        device: torch.device,
    ) -> None:
        self.files, self.keeping, self.ram, self.device = files, keeping, ram, device
        self.traffic = Traffic()
        self._background = background
        self._reads: deque[tuple[Job, list[Held]]] = deque()
        self._writes: deque[tuple[Job, list[tuple[Held, Tensor]]]] = deque()
        self._reading: set[int] = set()
        self._passing: dict[int, Held] = {}  # in RAM, to be written back and dropped
        self._resident_bytes = 0
        self._step_bytes = 0

    # Reading.

    def fetch(self, wanted: Iterable[Held]) -> None:
        """Begin to read those that are on disk alone."""
        absent = [h for h in wanted if h.row is None and h.key not in self._reading]
        if absent:
            sources = [(h.slot, h.values, h.hash) for h in absent]
            self._reads.append((self._background.submit(lambda: self._read(sources)), absent))
            self._reading.update(h.key for h in absent)

    def load(self, wanted: Sequence[Held]) -> list[Held]:
        """Have ``wanted`` in RAM; returns those that are lost."""
        lost = self.arrive(wait=False)
        absent = [h for h in wanted if h.row is None and h not in lost]
        if absent:
            start = time.perf_counter()
            self.traffic.late += len(absent)
            self.fetch(absent)
            lost += self.arrive(wait=True)
            self.traffic.stalled_s += time.perf_counter() - start
        return lost

    def arrive(self, wait: bool) -> list[Held]:
        """Take what was read (``wait``: all that is under way); returns those that are lost."""
        lost = []
        while self._reads and (wait or self._reads[0][0].done):
            job, wanted = self._reads.popleft()
            for held, row in zip(wanted, job.result(), strict=True):
                self._reading.discard(held.key)
                if row is None:
                    lost.append(held)
                elif held.row is None:
                    held.row = row.to(self.device)
                    self._passing[held.key] = held
        self.traffic.lost += len(lost)
        return lost

    def _read(self, sources: Sequence[tuple[Slot | None, int, int | None]]) -> list[Tensor | None]:
        """In the background: the rows, None for one that is not as it was written."""
        rows: list[Tensor | None] = []
        for slot, values, hash_ in sources:
            row = self.keeping.empty(values)
            view = bytes_of(row)
            try:
                whole = slot is not None and self.files.read(slot, view)
            except OSError:
                whole = False
            self.traffic.read_bytes += len(view)
            rows.append(row if whole and xxhash.xxh3_64_intdigest(view) == hash_ else None)
        return rows

    # Writing.

    def rest(self, used: Iterable[Held], needed: set[int]) -> None:
        """A step is over: keep what it ``used`` in RAM, or write it back, unless it is ``needed``
        again."""
        step_bytes = 0
        for held in used:
            if held.row is None:
                continue
            nbytes = held.row.nbytes
            step_bytes += nbytes
            if not held.resident:
                self._passing[held.key] = held
        self._step_bytes = max(self._step_bytes, step_bytes)
        dirty = []
        for key, held in list(self._passing.items()):
            if held.row is None:
                del self._passing[key]
            elif self._has_room(held.row.nbytes):
                held.resident = True
                self._resident_bytes += held.row.nbytes
                del self._passing[key]
            elif key not in needed:
                if held.clean:
                    held.row = None
                    del self._passing[key]
                elif not held.writing:
                    dirty.append(held)
        self.written()
        if dirty:
            self._write(dirty)
            self._give_up([held for held in dirty if held.slot is None])
            self._keep_up()

    def _give_up(self, homeless: Iterable[Held]) -> None:
        """Neither RAM nor disk has room for these: their next visit will find them lost."""
        for held in homeless:
            held.hash, held.row = held.content_hash, None
            del self._passing[held.key]

    def _has_room(self, nbytes: int) -> bool:
        if self.ram is None:
            return True
        return self._resident_bytes + nbytes + STEPS_IN_RAM * self._step_bytes <= self.ram

    def _write(self, dirty: Sequence[Held]) -> None:
        """Begin to write ``dirty`` rows to slots of their own, where there is room for them."""
        batch = []
        for held in dirty:
            assert held.row is not None
            held.slot = self.files.place(held.row.nbytes, held.slot)
            if held.slot is not None:
                held.writing = True
                batch.append((held, held.row))
        work = [(held.slot, row) for held, row in batch]
        self._writes.append((self._background.submit(lambda: self._put(work)), batch))

    def _put(self, work: Sequence[tuple[Slot | None, Tensor]]) -> list[int]:
        """In the background: write rows; their hashes."""
        hashes = []
        for slot, row in work:
            assert slot is not None
            view = bytes_of(row)
            self.files.write(slot, view)
            self.traffic.written_bytes += len(view)
            hashes.append(xxhash.xxh3_64_intdigest(view))
        return hashes

    def written(self, wait: bool = False) -> None:
        """Take note of what was written (``wait``: of all that is under way)."""
        while self._writes and (wait or self._writes[0][0].done):
            job, batch = self._writes.popleft()
            for (held, row), hash_ in zip(batch, job.result(), strict=True):
                if held.row is row:
                    held.clean, held.writing, held.hash = True, False, hash_

    def _keep_up(self) -> None:
        """Wait where the disk falls behind: RAM would fill with rows to be written."""
        if len(self._writes) > _WRITES_AHEAD:
            start = time.perf_counter()
            while len(self._writes) > _WRITES_AHEAD:
                self._writes[0][0].result()
                self.written()
            self.traffic.stalled_s += time.perf_counter() - start

    def write_all(self, everyone: Iterable[Held]) -> None:
        """Have all rows on disk, and the disk hold them; but for those without a slot, for which it
        has no room."""
        self.arrive(wait=True)
        self.written(wait=True)
        dirty = [held for held in everyone if not held.clean and held.row is not None]
        for start in range(0, len(dirty), _BATCH):
            self._write(dirty[start : start + _BATCH])
        self.written(wait=True)
        self.files.sync()

    def take(self, everyone: Iterable[Held]) -> None:
        """Those that have come with their rows."""
        self._passing.update({held.key: held for held in everyone if held.row is not None})

    def forget(self, held: Held) -> None:
        """``held`` is no longer in the store."""
        if held.resident and held.row is not None:
            self._resident_bytes -= held.row.nbytes
        self._passing.pop(held.key, None)
        if held.slot is not None:
            self.files.free(held.slot)
