"""The short way of delta-coded micro-batches: all rows whole, of one kind, on the CPU.

What a message needs is made ready when its step begins; the message itself is a call of a kernel.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs.keeping import Keeping
from thinwire.errors import NonFiniteError
from thinwire.frame import Kind, Section, entry, state
from thinwire.native import Bound, addresses
from thinwire.schemes.base import Foreseen, Form, keys_digest
from thinwire.store import Held, ReferenceStore


class Rows:
    """A message's references, and where they lie."""

    __slots__ = ("addresses", "form", "rows")

    def __init__(self, form: Form, rows: list[Tensor]) -> None:
        self.form, self.rows, self.addresses = form, rows, addresses(rows)


class Moving(Protocol):
    """The end of a link whose references a message moves."""

    @property
    def references(self) -> ReferenceStore:
        """What is remembered of rows."""

    def rows_like(self, form: Form) -> Rows:
        """Room for the references of a message of this form, which are to move."""

    def move(self, held: Sequence[Held], before: Rows, after: Rows) -> None:
        """The references ``held`` are ``after`` from now on, and ``before`` is room."""

    def put(self, keys: Sequence[int], rows: Sequence[Tensor], values: Sequence[int]) -> None:
        """The references of ``keys`` are ``rows`` from now on."""


@dataclasses.dataclass(slots=True)
class Way:
    """How micro-batches of one form travel; ``entry`` lacks the state.

    ``least``: by how much of a value's energy a change must differ from it to be sent.
    """

    form: Form
    entry: bytes
    keeping: Keeping
    kernels: Bound
    wide: Bound  # the same for float32
    is_kept: bool  # a payload is its rows' references
    least: float

    @classmethod
    def of(
        cls,
        kind: Kind,
        coder: Codec,
        keeping: Keeping,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        least: float,
    ) -> Way | None:
        """None where ``coder`` has no kernels for tensors of this form."""
        form = Form(kind, shape, dtype, coder.max_nbytes(shape, dtype, shape[0]))
        size = shape[0], form.width
        kernels = coder.bound(dtype, *size, keeping.how)
        wide = coder.bound(torch.float32, *size, keeping.how)
        if kernels is None or wide is None:
            return None
        section = Section(kind, str(coder), dtype, shape, versions=[])
        known = entry(section, form.nbytes)
        return cls(form, known, keeping, kernels, wide, keeping.holds(coder), least)


class _ForeseenVisit(Foreseen):
    def __init__(self, way: Way, end: Moving, keys: tuple[int, ...]) -> None:
        known = state(keys_digest(keys), end.references.versions(keys))
        super().__init__(way.form, way.entry + known)
        self._way, self._end, self._keys = way, end, keys


class ForeseenChange(_ForeseenVisit):
    """Changes of all rows, none of them too large or nothing at all."""

    def __init__(self, way: Way, end: Moving, keys: tuple[int, ...]) -> None:
        super().__init__(way, end, keys)
        self._held = end.references.held(keys)
        self._before = Rows(way.form, end.references.rows(keys))

    def encode(self, x: int, payload: Any) -> bool:
        before, after = self._before, self._end.rows_like(self.form)
        energies = self._way.kernels.delta_encode(x, before.addresses, after.addresses, payload)
        if energies is None:
            return False
        least = self._way.least
        for change, value in energies:
            if not least * value < change <= value:
                return False
        self._end.move(self._held, before, after)
        return True

    def decode(self, payload: Any, y: int) -> bool:
        before, after = self._before, self._end.rows_like(self.form)
        kernels = self._way.kernels
        if not kernels.delta_decode(payload, before.addresses, after.addresses, y):
            return False
        self._end.move(self._held, before, after)
        return True


class ForeseenFirst(_ForeseenVisit):
    """First visits of all rows."""

    def encode(self, x: int, payload: Any) -> bool:
        return self._way.kernels.encode(x, payload) and self._keep(payload)

    def decode(self, payload: Any, y: int) -> bool:
        return self._way.kernels.decode(payload, y) and self._keep(payload)

    def _keep(self, payload: Any) -> bool:
        """Make what ``payload`` holds the references; False if it is invalid."""
        way, sizes = self._way, [self.form.width] * len(self._keys)
        if way.is_kept:
            copy = torch.empty(self.form.nbytes, dtype=torch.uint8)
            ctypes.memmove(copy.data_ptr(), payload, self.form.nbytes)
            self._end.put(self._keys, way.keeping.split(copy, sizes), sizes)
            return True
        value = torch.empty((len(self._keys), self.form.width), dtype=torch.float32)
        if not way.wide.decode(payload, value.data_ptr()):
            return False
        try:
            kept = way.keeping.keep(value, None)
        except NonFiniteError:
            return False
        self._end.put(self._keys, kept, sizes)
        return True
