"""What is measured of thinwire: which operations, on which tensors, with which buffers.

A tensor of a benchmark has rows of 1024 Gaussian values, but for ``topk``, which takes it as one
row. All buffers are made beforehand and touched in the warm-up; nothing of ours allocates but the
codecs that are plain torch operations.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from thinwire.bench import ROW
from thinwire.codecs import Codec, codec
from thinwire.codecs.integer import Integer
from thinwire.codecs.tensors import OfTensors
from thinwire.codecs.topk import TopK
from thinwire.native import IntegerFormat, delta_reference, kernels, library, row_nbytes
from thinwire.native.delta_reference import Kept

CODECS = (
    *(f"int{bits}" for bits in (1, 2, 3, 4, 6, 8)),
    "int4:group=1024",
    "int4:round=stochastic",
    "int4:symmetric",
    "tile",
    "topk:0.01",
    "topk:0.1",
    "topk:0.3",
    "bf16",
)
#: Of these the change is measured too, unless codecs are named: then of every integer codec.
CHANGES = ("int4", "int4:group=1024")
_ALSO_IN_BF16 = ("int4",)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: How references are kept, and the dtype of the values whose change is coded.
REFERENCES: dict[str, tuple[Kept, str]] = {
    "fp32": (torch.float32, "fp32"),
    "bf16": (torch.bfloat16, "bf16"),
    "int8": (IntegerFormat(8, 128, False, False, False), "fp32"),
}
_ROWS_AT_ONCE = 1024  # the twin needs much memory
#: Bytes that all buffers take together, ours and the peers', for each value of a tensor.
BYTES_A_VALUE = 100


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation of one codec on tensors of one dtype.

    Of the delta operations also how the ``reference`` is kept, and of ``delta_decode`` whether it
    is moved ``in_place`` only, or the new values are written to a separate output as well.
    """

    op: str
    codec: Codec
    dtype: str
    reference: str | None = None
    in_place: bool | None = None

    @property
    def level(self) -> str:
        """The instruction set of the kernel that runs; "eager" for plain torch operations."""
        by_rows = type(self.codec)._encode_all is Codec._encode_all
        plain = by_rows or isinstance(self.codec, OfTensors)
        return library.EAGER if plain else library.level()


def group_of(coder: Codec) -> int | None:
    """Values that share a scale, where the codec is one of groups."""
    return coder.format.group or ROW if isinstance(coder, Integer) else None


def cases(codecs: Sequence[Codec] | None, ops: Sequence[str]) -> Iterator[Case]:
    """What to measure; ``codecs`` None: the usual ones."""
    usual = [codec(spec) for spec in CODECS] if codecs is None else codecs
    changes = [codec(spec) for spec in CHANGES] if codecs is None else codecs
    for coder, op in itertools.product(usual, ("encode", "decode")):
        if op in ops:
            yield Case(op, coder, "fp32")
            if str(coder) in _ALSO_IN_BF16:
                yield Case(op, coder, "bf16")
    for coder, (kept, (_, dtype)) in itertools.product(changes, REFERENCES.items()):
        if not (isinstance(coder, Integer) and coder.fixed_size):
            continue
        if "delta_encode" in ops:
            yield Case("delta_encode", coder, dtype, kept)
        if "delta_decode" in ops:
            yield Case("delta_decode", coder, dtype, kept, in_place=True)
            yield Case("delta_decode", coder, dtype, kept, in_place=False)


class Reference:
    """References of all rows as they are kept, [rows, …], and two inputs to move them between.

    The inputs take turns, so that a change never vanishes.
    """

    def __init__(self, how: Kept, inputs: tuple[Tensor, Tensor]) -> None:
        parts = [
            delta_reference.keep_rows(part.to(torch.float32), how)
            for part in inputs[0].split(_ROWS_AT_ONCE)
        ]
        self.how, self.kept = how, torch.cat([part for part in parts if part is not None])
        self._inputs = itertools.cycle((inputs[1], inputs[0]))

    def next_input(self) -> Tensor:
        return next(self._inputs)


class Data:
    """The tensors of one size, which all operations share."""

    def __init__(self, numel: int) -> None:
        assert numel % ROW == 0, "sizes are whole rows"
        self.rows, self.numel = numel // ROW, numel
        generator = torch.Generator().manual_seed(0)
        one = torch.randn((self.rows, ROW), generator=generator)
        change = torch.randn((self.rows, ROW), generator=generator)
        other = change.mul_(0.1).add_(one)
        self.inputs = {name: (one.to(d), other.to(d)) for name, d in DTYPES.items()}
        self.outputs = {name: torch.zeros_like(one, dtype=d) for name, d in DTYPES.items()}
        self._payloads: dict[tuple[Codec, str], tuple[Tensor, Tensor]] = {}
        self._changes: dict[Codec, tuple[Tensor, Tensor]] = {}
        self._references: dict[str, Reference] = {}
        self._rooms: dict[Codec, Tensor] = {}

    def copy(self, dtype: str) -> None:
        """What times are compared to: a copy into a tensor that is there."""
        self.outputs[dtype].copy_(self.inputs[dtype][0])

    def reference(self, name: str) -> Reference:
        if name not in self._references:
            how, dtype = REFERENCES[name]
            self._references[name] = Reference(how, self.inputs[dtype])
        return self._references[name]

    def payload(self, case: Case) -> tuple[Tensor, Tensor]:
        """Room for a payload, and the first input's payload, which lies in it."""
        key = (case.codec, case.dtype)
        if key not in self._payloads:
            x = self._shaped(self.inputs[case.dtype][0], case.codec)
            room = torch.zeros(case.codec.max_nbytes(x.shape, x.dtype), dtype=torch.uint8)
            self._payloads[key] = room, case.codec.encode(x, out=room)
        return self._payloads[key]

    def change(self) -> Tensor:
        """What the second input has more than the first."""
        one, other = self.inputs["fp32"]
        return other - one

    def payload_of_change(self, coder: Codec) -> tuple[Tensor, Tensor]:
        """The payloads of a change and of its opposite: references that they move stay bounded."""
        if coder not in self._changes:
            there = self.change()
            self._changes[coder] = coder.encode(there), coder.encode(there.neg_())
        return self._changes[coder]

    def _shaped(self, x: Tensor, coder: Codec) -> Tensor:
        return x.view(1, -1) if isinstance(coder, TopK) else x

    def task(self, case: Case) -> Callable[[], object]:
        """The operation of ``case``, ready to be run again and again."""
        made: Callable[[Case], Callable[[], object]] = getattr(self, f"_{case.op}")
        return made(case)

    def payload_nbytes(self, case: Case) -> int:
        if case.reference is None:
            return self.payload(case)[1].numel()
        return self.rows * case.codec.row_nbytes(ROW, torch.float32)

    def _encode(self, case: Case) -> Callable[[], object]:
        x = self._shaped(self.inputs[case.dtype][0], case.codec)
        return functools.partial(case.codec.encode, x, out=self.payload(case)[0])

    def _decode(self, case: Case) -> Callable[[], object]:
        y = self._shaped(self.outputs[case.dtype], case.codec)
        _, payload = self.payload(case)
        return functools.partial(case.codec.decode, payload, tuple(y.shape), y.dtype, out=y)

    def _delta_encode(self, case: Case) -> Callable[[], object]:
        fmt, reference = _format_and_reference(case, self)
        if case.codec not in self._rooms:
            shape = self.rows, row_nbytes(ROW, fmt)
            self._rooms[case.codec] = torch.zeros(shape, dtype=torch.uint8)
        out = self._rooms[case.codec]
        seeds = torch.zeros(self.rows, dtype=torch.int64)
        kept, how = reference.kept, reference.how

        def by_kernel() -> None:
            x = reference.next_input()
            place = kernels.delta_encode(x, None, fmt, seeds, out, kept, kept, how)
            assert place < 0, "Gaussian changes can be coded"

        def by_twin() -> None:
            x = reference.next_input().to(torch.float32)
            before = delta_reference.read_rows(list(kept), ROW, how)
            _keep(delta_reference.delta_encode_rows(x, before, fmt, seeds, out), reference)

        return by_twin if library.library() is None else by_kernel

    def _delta_decode(self, case: Case) -> Callable[[], object]:
        fmt, reference = _format_and_reference(case, self)
        payloads = itertools.cycle(self.payload_of_change(case.codec))
        kept, how = reference.kept, reference.how
        y = None if case.in_place else self.outputs[case.dtype]
        shape = (self.rows, ROW)

        def by_kernel() -> None:
            good = kernels.delta_decode(next(payloads), shape, None, fmt, kept, kept, how, y)
            assert good, "payloads of our own can be decoded"

        def by_twin() -> None:
            before = delta_reference.read_rows(list(kept), ROW, how)
            payload = next(payloads).view(self.rows, -1)
            moved = _keep(delta_reference.delta_decode_rows(payload, before, fmt), reference)
            if y is not None:
                y.copy_(moved)

        return by_twin if library.library() is None else by_kernel


def _format_and_reference(case: Case, data: Data) -> tuple[IntegerFormat, Reference]:
    assert isinstance(case.codec, Integer), "changes are of integer codecs"
    assert case.reference is not None
    return case.codec.format, data.reference(case.reference)


def _keep(moved: Tensor | None, reference: Reference) -> Tensor:
    """Store the new values as the reference is kept; returns them."""
    assert moved is not None, "Gaussian changes can be coded"
    kept = delta_reference.keep_rows(moved, reference.how)
    assert kept is not None
    reference.kept.copy_(kept)
    return moved
