"""The short way to a codec: tensors to named tensors and back; all else is done here.

``TensorCodec`` is what an author writes, ``OfTensors`` the codec that the library makes of it.
Bytes lie as ``thinwire.codecs.parts`` says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.codecs import parts
from thinwire.codecs.base import Codec, saturated
from thinwire.codecs.parts import Bits, Form, Part, Ragged
from thinwire.native import noise
from thinwire.spec import Named

__all__ = ["Bits", "OfTensors", "Ragged", "TensorCodec"]

#: Values of a row up to which sizes are found with zeros; beyond, on the meta device, since the
#: length of a row may come from a frame that was received.
_MOST_ZEROS = 1 << 24
#: What a decode runs into with parts that no encode has made.
_BAD_PARTS = (ValueError, ArithmeticError, LookupError, RuntimeError)


class TensorCodec(Named, ABC):
    """A codec written with torch operations on rows of one length; register it to use it.

    A subclass is a frozen dataclass, whose fields are the options of its spec string, with
    ``encode`` and ``decode``. The library does rows, lengths, dtypes, padding, buffers and sizes,
    refuses values that are not finite and payloads that do not fit, and packs ``Bits``.
    """

    @abstractmethod
    def encode(self, x: Tensor, *args: Any, **kwargs: Any) -> Mapping[str, Part]:
        """Named parts of ``x``, float32 [rows, n], finite, n >= 1; it is not to be changed.

        A method ``encode(self, x, seeds)`` also gets int64 [rows], for ``noise``. Each part is a
        tensor of any dtype, ``Bits`` or ``Ragged``, and has [rows, …]; what a row has in it follows
        from that row alone. Names, dtypes and shapes depend on n alone: the library finds them by
        an encode of one row of zeros.
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, Any], n: int) -> Tensor:
        """Floats [rows, n] from the parts as tensors, or ``Ragged`` of tensors; ``Bits`` of width 1
        have become bool, others int64.

        What was received is not trusted: a ValueError, or an IndexError, RuntimeError or the like
        of torch's, says that the payload is bad, and so does a value that is not finite.
        """

    @property
    def stochastic(self) -> bool:
        """Whether encoding draws on the seeds: where ``encode`` takes them."""
        return _takes_seeds(type(self))

    def max_counts(self, n: int) -> Mapping[str, int]:
        """Of each ``Ragged`` part the most entries of a row of ``n`` values.

        Never less than for a shorter row. Without it no part is ragged.
        """
        return {}

    @staticmethod
    def noise(seeds: Tensor, n: int) -> Tensor:
        """Uniform float32 in [0, 1), [rows, n], multiples of 2**-24: a hash of a row's seed and the
        position, the same on every machine. Another constant added to ``seeds`` draws anew."""
        return noise.uniform(seeds, n)

    def of_spec(self) -> OfTensors:
        is_ragged = type(self).max_counts is not TensorCodec.max_counts
        return OfRagged(self) if is_ragged else OfTensors(self)


@functools.cache
def _takes_seeds(cls: type[TensorCodec]) -> bool:
    return len(inspect.signature(cls.encode).parameters) > 2


@functools.lru_cache(maxsize=4096)
def _forms(coder: TensorCodec, n: int) -> tuple[Form, ...]:
    """The forms of the parts of rows of ``n`` values."""
    device = "cpu" if n <= _MOST_ZEROS else "meta"
    x = torch.zeros((1, n), dtype=torch.float32, device=device)
    try:
        found = _encoded(coder, x, torch.zeros(1, dtype=torch.int64, device=device))
    except Exception as error:
        if device == "cpu":
            raise
        raise ValueError(
            f"codec {coder}: a row of {n} values; beyond {_MOST_ZEROS} its encode must run on "
            f"torch's meta device, but {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    return _forms_of(coder, found, 1, n)


def _encoded(coder: TensorCodec, x: Tensor, seeds: Tensor) -> Mapping[str, Part]:
    found = coder.encode(x, seeds) if _takes_seeds(type(coder)) else coder.encode(x)
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"codec {coder}: encode returned {type(found).__name__}, not named parts")
    return found


def _forms_of(coder: TensorCodec, found: Mapping[str, Part], rows: int, n: int) -> tuple[Form, ...]:
    most = coder.max_counts(n)
    with _naming(coder):
        return tuple(Form.of(name, part, rows, most.get(name)) for name, part in found.items())


@contextlib.contextmanager
def _naming(coder: object) -> Iterator[None]:
    """Have a ValueError name the codec."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"codec {coder}: {error}") from None


@dataclasses.dataclass(frozen=True)
class OfTensors(Codec):
    """The codec that ``coder`` describes; prints as it."""

    coder: TensorCodec

    _invalid: ClassVar[str] = "values that are not finite"

    @property
    def name(self) -> str:
        return self.coder.name

    def __str__(self) -> str:
        return str(self.coder)

    @property
    def stochastic(self) -> bool:
        return self.coder.stochastic

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return sum(form.largest for form in self._forms(n))

    def _forms(self, n: int) -> tuple[Form, ...]:
        return _forms(self.coder, n) if n else ()

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        found = self._parts(x, seeds)
        if found is None:
            return False
        with _naming(self):
            parts.put(found, self._forms(x.shape[1]), out)
        return True

    def _parts(self, x: Tensor, seeds: Tensor) -> Mapping[str, Part] | None:
        """The parts of ``x`` [rows, n], of the forms that are expected; None: not codable."""
        rows, n = x.shape
        values = x.to(torch.float32)
        if n == 0 or rows == 0:
            return {}
        if not bool(torch.isfinite(values).all()):
            return None
        found = _encoded(self.coder, values, seeds)
        forms = _forms_of(self.coder, found, rows, n)
        for form, expected in zip(forms, self._forms(n), strict=False):
            if form != expected:
                raise ValueError(
                    f"codec {self}: part {form.name!r} is {form}; of zeros it was {expected.name!r}"
                    f", {expected}. Forms may depend on n = {n} alone; see tw.Ragged"
                )
        if len(forms) != len(self._forms(n)):
            raise ValueError(f"codec {self}: {len(forms)} parts, of zeros {len(self._forms(n))}")
        return found

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        return self._decoded(parts.take(payload, self._forms(n)), payload.shape[0], n)

    def _decoded(self, found: Mapping[str, Any], rows: int, n: int) -> Tensor | None:
        """What ``coder`` makes of parts, checked; None where it is not finite."""
        try:
            y = self.coder.decode(found, n)
        except _BAD_PARTS as error:
            why = str(error).partition("\n")[0]
            raise ValueError(f"codec {self}: decode: {type(error).__name__}: {why}") from error
        if not isinstance(y, Tensor) or not y.dtype.is_floating_point or y.shape != (rows, n):
            what = f"{y.dtype} of {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"codec {self}: decode returned {what}, not floats of {(rows, n)}")
        values = y.detach().to(torch.float32)
        return values if bool(torch.isfinite(values).all()) else None


@dataclasses.dataclass(frozen=True)
class OfRagged(OfTensors):
    """The same where the sizes of rows depend on the data."""

    @property
    def fixed_size(self) -> bool:
        return False

    def _least_row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return sum(form.least for form in self._forms(n))

    def _encode_all(
        self, x2: Tensor, sizes: list[int] | None, seeds: Tensor, out: Tensor
    ) -> int | None:
        count, n = x2.shape
        rows: list[Tensor] = [out[:0]] * count
        for size, index in _by_size(sizes, count, n).items():
            found = self._parts(x2[index, :size], seeds[index])
            if found is None:
                return None
            if not found:
                continue
            with _naming(self):
                data = parts.put_ragged(found, self._forms(size))
            for row, part in zip(index, data, strict=True):
                rows[row] = part
        written = torch.cat(rows)
        out[: written.numel()] = written
        return written.numel()

    def _decode_all(self, payload: Tensor, y2: Tensor, sizes: list[int] | None) -> bool:
        count, n = y2.shape
        host, at = payload.contiguous().cpu().numpy().data, 0
        rows, counts = [], []
        for size in sizes or [n] * count:
            start = at
            with _naming(self):
                at, found = parts.skip_ragged(host, at, self._forms(size))
            rows.append(payload[start:at])
            counts.append(found)
        if at != payload.numel():
            raise ValueError(f"codec {self}: {payload.numel() - at} bytes follow the last row")
        y2.zero_()
        for size, index in _by_size(sizes, count, n).items():
            if size == 0:
                continue
            together = parts.take_ragged(
                [rows[i] for i in index], [counts[i] for i in index], self._forms(size)
            )
            values = self._decoded(together, len(index), size)
            if values is None:
                return False
            y2[index, :size] = saturated(values, y2.dtype).to(y2.dtype)
        return True


def _by_size(sizes: Sequence[int] | None, count: int, n: int) -> dict[int, list[int]]:
    """The rows of each length."""
    found: dict[int, list[int]] = {}
    for row, size in enumerate([n] * count if sizes is None else sizes):
        found.setdefault(size, []).append(row)
    return found
