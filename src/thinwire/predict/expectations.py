"""What an end of a link expects of one tensor: of its values, and of their changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from thinwire.codecs.base import within
from thinwire.predict.exact import Map
from thinwire.predict.expectation import Expectation, Guess, part_of
from thinwire.predict.sources import ACTIVATION, DRIFT, By, Context, Source
from thinwire.predict.table import MOST_IDS


@dataclasses.dataclass(frozen=True)
class Part:
    """Some rows of a micro-batch's tensor of ``shape``: all that both ends know of them.

    ``lengths``: values of each that travel, None: all. ``scale``: by what the step multiplies
    values. ``order``: of several parts of a micro-batch.
    """

    microbatch: int
    order: int
    rows: Sequence[int]
    shape: tuple[int, ...]
    context: Context
    scale: float
    lengths: Sequence[int] | None


class Expectations:
    """``changes``: whether there are any. ``fits``: whether maps are found at this end."""

    def __init__(self, by: By, changes: bool, fits: bool) -> None:
        self._by = by
        count, drifts = len(by.ids), changes and DRIFT in by.vectors
        self._all: dict[str, Expectation] = {}
        #: Of the activations that gradients are predicted by.
        self._activations: Expectation | None = None
        if ACTIVATION in by.vectors:
            self._activations = self._all["activations"] = Expectation(count, None, False)
        centre = None if self._activations is None else self._activations.tables
        self.values = self._all["values"] = Expectation(count, centre, fits)
        self.changes: Expectation | None = None
        if changes:
            centre = self.values.tables if drifts else None
            self.changes = self._all["changes"] = Expectation(count, centre, fits)
        #: Whether values are learned at visits that send a change too: a map needs their means.
        self.follows = drifts
        self._ids: dict[tuple[int, int, int], list[Tensor]] = {}
        self._tried: set[object] = set()

    def try_out(self, context: Context, shape: Sequence[int]) -> None:
        """Raise ValueError where ``context`` does not fit a micro-batch's tensor of ``shape``."""
        known = tuple(shape), *((name, tensor.shape) for name, tensor in context.items())
        if known not in self._tried:
            rows, positions, _ = form_of(shape)
            for one in self._by.ids:
                found = [_checked(one, context, rows, positions) for _ in range(2)]
                if not torch.equal(*found):
                    raise ValueError(
                        f"source {type(one).__name__} has other ids each time; both ends of a link "
                        "need the same"
                    )
            self._tried.add(known)

    def begin(self) -> None:
        """A step begins: what the last one has shown is gone, unless it counted."""
        self._ids.clear()
        for one in self._all.values():
            one.begin()

    def guess(self, part: Part, source: Tensor | None, change: bool = False) -> Guess:
        """What to expect of a part's values, or of their changes. ``source``: what a map leads
        from, float32 [rows, n], if there is anything."""
        vectors = None if source is None else as_vectors(source, part.shape)
        ids = self._ids_of(part)
        return self._of(change).guess(ids, vectors)

    def without(self, part: Part) -> Guess:
        """Nothing: for values that are noted, and not predicted."""
        return Guess(self._ids_of(part))

    def rows(self, guess: Guess, part: Part) -> Tensor | None:
        """What ``guess`` says, float32 [rows, n], zero beyond each row's length."""
        if guess.values is None or guess.values.shape[1] != form_of(part.shape)[2]:
            return None
        scaled = guess.values if part.scale == 1.0 else guess.values * part.scale
        found = _as_rows(scaled, len(part.rows), part.shape)
        if part.lengths is not None:
            found = found.masked_fill(~within(part.lengths, found.shape[1], found.device), 0.0)
        return found

    def note(self, part: Part, guess: Guess, y: Tensor, base: Tensor | None = None) -> None:
        """``y`` float32 [rows, n] came of what ``guess`` was made for: of values, or with ``base``
        of their changes from it."""
        vectors = as_vectors(y, part.shape)
        before = None if base is None else as_vectors(base, part.shape)
        target = self._of(base is not None)
        place, kept = (part.microbatch, part.order), _travelling(part)
        target.note(place, guess, vectors, before, 1.0 / part.scale, kept)
        self._note_activation(part, guess, base is not None, kept)

    # The same where what is expected and what is learned stay in kernels.

    def tables_for(self, shape: Sequence[int], change: bool) -> list[Tensor] | None:
        """The tables of values or changes of tensors of ``shape``, float32 [ids, width] each; None
        where there are none yet, or of another width."""
        found = self._of(change).tables
        return found.values if found.width == form_of(shape)[2] else None

    @property
    def offering(self) -> bool:
        """Whether the other end is to be told something in this step."""
        return any(one.found is not None and one.passed is None for one in self._all.values())

    def room(self, part: Part, change: bool) -> Tensor:
        """Where values or changes of all rows of a part are to stand, float32 [positions, width],
        for ``noted``."""
        rows, positions, width = form_of(part.shape)
        return self._of(change).room(rows * positions, width, torch.device("cpu"))

    def noted(self, part: Part, guess: Guess, values: Tensor, change: bool) -> None:
        """As ``note``, of ``values`` that stand in the ``room`` asked for last."""
        self._of(change).noted((part.microbatch, part.order), guess, guess.ids, values)
        self._note_activation(part, guess, change, None)

    def _of(self, change: bool) -> Expectation:
        found = self.changes if change else self.values
        assert found is not None
        return found

    def _note_activation(self, part: Part, guess: Guess, change: bool, kept: Tensor | None) -> None:
        if self._activations is not None and not change and guess.activation is not None:
            place = part.microbatch, part.order
            self._activations.note(place, Guess(guess.ids), guess.activation, kept=kept)

    def settle(self) -> None:
        """The step counts: learn from it."""
        for one in self._all.values():
            one.settle()

    def _ids_of(self, part: Part) -> list[Tensor]:
        """The ids of each source [positions of the rows], from 0 on: 0 stands for none."""
        rows, positions, _ = form_of(part.shape)
        known = part.microbatch, rows, positions
        everyone = self._ids.get(known)
        if everyone is None:
            found = [_checked(one, part.context, rows, positions) for one in self._by.ids]
            everyone = [(ids + 1).clamp_(min=0).bitwise_and_(MOST_IDS - 1) for ids in found]
            self._ids[known] = everyone
        if len(part.rows) == rows:
            return [ids.flatten() for ids in everyone]
        return [ids[list(part.rows)].flatten() for ids in everyone]

    # Maps, which travel.

    def sent(self, nbytes: int, change: bool) -> None:
        """So many bytes were sent of values or changes."""
        target = self.changes if change else self.values
        if target is not None and target.fit is not None:
            target.fit.sent(nbytes)

    def offers(self) -> list[Tensor]:
        """What the other end is to be told in this step: payloads, uint8."""
        found = []
        for number, one in enumerate(self._all.values()):
            if one.found is not None and one.passed is None:
                one.passed = one.found
                number_of = torch.tensor([number], dtype=torch.uint8, device=one.found.codes.device)
                found.append(torch.cat([number_of, one.found.payload]))
        return found

    def take(self, payloads: Sequence[Tensor], shape: Sequence[int]) -> None:
        """What the other end has told. Raises ValueError, with nothing taken, where one does not
        fit."""
        everyone, width = list(self._all.values()), form_of(shape)[2]
        found = {}
        for payload in payloads:
            number = int(payload[0]) if len(payload) else len(everyone)
            if number >= len(everyone) or everyone[number].centre is None or number in found:
                raise ValueError("a map of something that is expected without one")
            found[number] = Map.parsed(payload[1:], width, width)
        for number, one in found.items():
            everyone[number].passed = one

    def most_told(self, shape: Sequence[int]) -> int:
        """The most bytes of ``offers`` for tensors of ``shape``."""
        width = form_of(shape)[2]
        mapped = sum(one.centre is not None for one in self._all.values())
        return mapped * (1 + Map.nbytes(width, width))

    # The same at both ends, and after a break.

    def check_width(self, width: int) -> None:
        """Raise ValueError where what was learned is of vectors of another width."""
        for one in self._all.values():
            if one.tables.width not in (None, width):
                raise ValueError(
                    f"the saved tables are of {one.tables.width} values, not of {width}"
                )

    def digest(self) -> int:
        """A hash of all that both ends hold alike."""
        seen = xxhash.xxh3_64()
        shared = self._named({name: one.shared_state() for name, one in self._all.items()})
        for name, tensor in sorted(shared.items()):
            seen.update(name.encode())
            seen.update(tensor.cpu().contiguous().numpy().tobytes())
        return seen.intdigest()

    def forget(self) -> None:
        """Begin anew."""
        self._ids.clear()
        for one in self._all.values():
            one.forget()

    def state_dict(self) -> dict[str, Tensor]:
        """What ``load_state_dict`` restores, between two steps."""
        return self._named({name: one.state_dict() for name, one in self._all.items()})

    @staticmethod
    def _named(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {f"{name}.{key}": t for name, state in states.items() for key, t in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where it is another's, and begins anew."""
        self.forget()
        if not state:
            return
        try:
            for name, one in self._all.items():
                one.load_state_dict(part_of(state, name))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            self.forget()
            raise ValueError(f"what was saved is not of this link: {error}") from None


class Still(Expectations):
    """What ``of`` expects of values by now, for some that teach it nothing."""

    def __init__(self, of: Expectations) -> None:
        self._by, self._all = of._by, of._all
        self._activations, self.values, self.changes = None, of.values, None
        self.follows, self._ids = False, {}

    def begin(self) -> None:
        self._ids.clear()

    def note(self, part: Part, guess: Guess, y: Tensor, base: Tensor | None = None) -> None:
        pass

    def sent(self, nbytes: int, change: bool) -> None:
        pass

    def settle(self) -> None:
        pass

    def offers(self) -> list[Tensor]:
        return []

    def take(self, payloads: Sequence[Tensor], shape: Sequence[int]) -> None:
        raise ValueError("maps, where nothing is learned")


def _checked(source: Source, context: Context, rows: int, positions: int) -> Tensor:
    """A source's ids, which may be anybody's. Raises ValueError where they are none."""
    before = _versions(context)
    try:
        ids = source.ids(context, rows, positions)
    except (Exception, SystemExit) as error:  # it may be anything
        why = " ".join(str(error).split())
        raise ValueError(
            f"source {type(source).__name__}: {type(error).__name__}: {why}"
        ) from error
    if _versions(context) != before:
        raise ValueError(f"source {type(source).__name__} changes its context: copy what it takes")
    plain = isinstance(ids, Tensor) and ids.layout == torch.strided and not ids.is_meta
    if not plain or ids.dtype != torch.int64 or ids.shape != (rows, positions):
        found = (
            f"{ids.dtype} of {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        )
        raise ValueError(
            f"source {type(source).__name__}: ids must be int64 of {(rows, positions)}, not {found}"
        )
    return ids


def _versions(context: Context) -> list[int]:
    """How often each tensor has been written to, as far as torch counts that."""
    return [0 if tensor.is_inference() else tensor._version for tensor in context.values()]


def _travelling(part: Part) -> Tensor | None:
    """The indices of a part's positions that travel; None: all."""
    if part.lengths is None:
        return None
    _, positions, width = form_of(part.shape)
    ends = [size // width for size in part.lengths]
    return within(ends, positions, torch.device("cpu")).flatten().nonzero()[:, 0]


def form_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """Rows, positions and width of a tensor: [rows, positions, width], [rows, channels, height,
    width], or [rows, width]."""
    if len(shape) == 4:
        return shape[0], shape[2] * shape[3], shape[1]
    if len(shape) <= 2:
        return shape[0], 1, math.prod(shape[1:])
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def as_vectors(y: Tensor, shape: Sequence[int]) -> Tensor:
    """[some rows, values] of a tensor of ``shape`` as [rows * positions, width]."""
    _, positions, width = form_of(shape)
    if len(shape) == 4:
        return y.view(len(y), width, positions).transpose(1, 2).reshape(-1, width)
    return y.reshape(len(y) * positions, width)


def _as_rows(vectors: Tensor, rows: int, shape: Sequence[int]) -> Tensor:
    """The reverse."""
    _, positions, width = form_of(shape)
    if len(shape) == 4:
        return vectors.view(rows, positions, width).transpose(1, 2).reshape(rows, -1)
    return vectors.reshape(rows, -1)
