"""``int1`` … ``int8``: groups of values on a grid of 2**b levels, really packed.

Error of the range scale (the default from 3 bits): no value is off by more than half a step of its
group's range, plus 0.8 % for the bfloat16 scale (rounded up, so that the extremes stay on the grid)
and half a unit in the last place of the value itself in float32. At 1 and 2 bits the default is the
mean and the standard deviation with the Lloyd-Max levels, 3 to 5 dB better there unless values are
one-sided. Stochastic rounding is unbiased; on Gaussian values its relative error stays below the
0.707 of the AQ-SGD theorem (Wang et al. 2022) from 3 bits on and, at 2 bits, in the affine format
with groups of at most 64 (0.64), not in the symmetric one (1.04) nor at 1 bit (2.1).

With ``hadamard`` these bounds are those of the rotated values. With ``zstd`` the codes of all rows
share a frame: the one case in which a row's bytes depend on its neighbours and on a library's
version. What is decoded depends on neither.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from thinwire import native
from thinwire.codecs import zstd
from thinwire.codecs.base import Codec, Lengths, row_seeds, row_sizes, unfit_value
from thinwire.errors import SpecError
from thinwire.native import planes
from thinwire.native.delta_reference import Kept
from thinwire.spec import register

if TYPE_CHECKING:
    from thinwire.codecs.keeping import Keeping

_SMALLEST_GROUP = 8
_LARGEST_GROUP = 1 << 20


def _default_group(codec: Integer) -> int:
    return 64 if codec.round == "stochastic" and codec.bits <= 2 else 128


def _default_scale(codec: Integer) -> str:
    return "range" if codec.bits > 2 or codec.round == "stochastic" else "std"


@dataclasses.dataclass(frozen=True)
class Integer(Codec):
    """Integers of ``bits`` bits; ``group`` values share a scale (``row``: the whole row).

    ``hadamard`` rotates each group first, so that an outlier is shared out among its neighbours.
    ``zstd`` compresses the codes.
    """

    bits: int
    group: int | Literal["row", ""] = dataclasses.field(
        default="", metadata={"derive": _default_group}
    )
    symmetric: bool = False
    round: Literal["nearest", "stochastic"] = "nearest"
    scale: Literal["range", "std", ""] = dataclasses.field(
        default="", metadata={"derive": _default_scale}
    )
    hadamard: bool = False
    zstd: bool = False

    def __post_init__(self) -> None:
        if self.group == "":
            object.__setattr__(self, "group", _default_group(self))
        if self.scale == "":
            object.__setattr__(self, "scale", _default_scale(self))
        self._check()

    def _check(self) -> None:
        if not 1 <= self.bits <= 8:
            raise SpecError(f"an integer codec has 1 to 8 bits, not {self.bits}")
        if self.round not in ("nearest", "stochastic"):
            raise SpecError(f"int{self.bits}: round={self.round} is not nearest or stochastic")
        if self.scale not in ("range", "std"):
            raise SpecError(f"int{self.bits}: scale={self.scale} is not range or std")
        if self.group != "row" and not _SMALLEST_GROUP <= self._group_size <= _LARGEST_GROUP:
            raise SpecError(
                f"int{self.bits}: group={self.group} is not 'row' or within "
                f"{_SMALLEST_GROUP} … {_LARGEST_GROUP}"
            )
        if self.round == "stochastic" and self.scale == "std":
            raise SpecError(
                f"int{self.bits}: stochastic rounding needs scale=range (a std scale clips, "
                "which no rounding makes unbiased)"
            )
        if self.round == "stochastic" and self.bits <= 2 and not 0 < self._group_size <= 64:
            raise SpecError(
                f"int{self.bits}: stochastic rounding at {self.bits} bits needs group=64 or less, "
                f"not {self.group} (its error grows with the group's range)"
            )
        if self.bits == 1 and self.symmetric and self.scale == "range":
            raise SpecError("int1: a symmetric range scale has a single level; use scale=std")

    @property
    def _group_size(self) -> int:
        """Values that share a scale; 0 stands for the whole row."""
        return self.group if isinstance(self.group, int) else 0

    @property
    def stochastic(self) -> bool:
        return self.round == "stochastic"

    @property
    def fixed_size(self) -> bool:
        return not self.zstd

    @property
    def together(self) -> bool:
        return self.zstd

    @functools.cached_property
    def format(self) -> native.IntegerFormat:
        """What the kernels need to know."""
        return native.IntegerFormat(
            bits=self.bits,
            group=self._group_size,
            symmetric=self.symmetric,
            stochastic=self.round == "stochastic",
            std=self.scale == "std",
            hadamard=self.hadamard,
        )

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return native.row_nbytes(n, self.format) + (self.zstd and n > 0)

    def _least_row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        # codes may shrink to next to nothing, parameters do not
        return native.row_nbytes(n, self.format) - planes.packed_nbytes(n, self.bits)

    def _encode_all(
        self, x2: Tensor, sizes: list[int] | None, seeds: Tensor, out: Tensor
    ) -> int | None:
        if self.zstd:
            return self._encode_compressed(x2, sizes, seeds, out)
        x = x2.to(torch.float32) if x2.dtype == torch.float64 else x2
        kernels = native.kernels_for(x, self.format)
        if kernels is None:
            return super()._encode_all(x2, sizes, seeds, out)
        place = kernels.encode(x, sizes, self.format, seeds, out)
        return out.numel() if place < 0 else -1 - place

    def _decode_all(self, payload: Tensor, y2: Tensor, sizes: list[int] | None) -> bool:
        if self.zstd:
            return self._decode_compressed(payload, y2, sizes)
        kernels = native.kernels_for(y2, self.format)
        if kernels is None:
            return super()._decode_all(payload, y2, sizes)
        return kernels.decode(payload.contiguous(), sizes, self.format, y2)

    @functools.cached_property
    def _plain(self) -> Integer:
        return dataclasses.replace(self, zstd=False)

    def _encode_compressed(
        self, x2: Tensor, sizes: list[int] | None, seeds: Tensor, out: Tensor
    ) -> int | None:
        """A byte 0 and the plain payload, or, where that is less, a byte 1, the parameters of all
        rows as they are, and one zstd frame with all rows' codes.
        """
        count, n = x2.shape
        total = self._plain._payload_nbytes(count, n, sizes, x2.dtype)
        plain = out.new_empty(total)
        written = self._plain._encode_all(x2, sizes, seeds, plain)
        if written is None or written < 0:
            return written
        rows = self._rows_of(plain, count, n, sizes)
        parameters = torch.cat([part.flatten() for part, _ in rows])
        frame = zstd.compress(torch.cat([codes.flatten() for _, codes in rows]))
        smaller = parameters.numel() + frame.numel() < total
        parts = [parameters, frame] if smaller else [plain]
        out[0] = int(smaller)
        at = 1
        for part in parts:
            out[at : at + part.numel()] = part
            at += part.numel()
        return at

    def _decode_compressed(self, payload: Tensor, y2: Tensor, sizes: list[int] | None) -> bool:
        count, n = y2.shape
        total = self._plain._payload_nbytes(count, n, sizes, y2.dtype)
        flag, body = int(payload[0]), payload[1:]
        if flag == 1:
            plain = body.new_empty(total)
            self._decompress(body, total, self._rows_of(plain, count, n, sizes))
            body = plain
        if flag not in (0, 1) or body.numel() != total:
            raise ValueError(
                f"codec {self}: a payload of {payload.numel()} bytes that starts with {flag}; "
                f"expected 0 and {total} bytes, or 1 and compressed ones"
            )
        return self._plain._decode_all(body, y2, sizes)

    def _decompress(self, body: Tensor, total: int, rows: list[tuple[Tensor, Tensor]]) -> None:
        """Fill the ``rows`` of a plain payload of ``total`` bytes from a compressed one."""
        at, code = 0, 0
        first = sum(parameters.numel() for parameters, _ in rows)
        try:
            unpacked = zstd.decompress(body[first:], total - first).to(body.device)
        except ValueError as error:
            raise ValueError(f"codec {self}: {error}") from None
        for parameters, codes in rows:
            parameters.copy_(body[at : at + parameters.numel()].view(parameters.shape))
            codes.copy_(unpacked[code : code + codes.numel()].view(codes.shape))
            at, code = at + parameters.numel(), code + codes.numel()

    def _rows_of(
        self, plain: Tensor, count: int, n: int, sizes: list[int] | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Views of a plain payload: (parameters, codes) of each run of rows of one length."""
        runs = [(n, count)]
        if sizes is not None:
            runs = [(size, len(list(run))) for size, run in itertools.groupby(sizes)]
        views, at = [], 0
        for size, rows in runs:
            width = native.row_nbytes(size, self.format)
            codes = planes.packed_nbytes(size, self.bits)
            part = plain[at : at + rows * width].view(rows, width)
            views.append((part[:, : width - codes], part[:, width - codes :]))
            at += rows * width
        return views

    def encode_change(
        self,
        x: Tensor,
        lengths: Lengths | None,
        seed: int | Tensor,
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        keeping: Keeping,
        out: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[float, float]]]:
        in_line = out is None or out.is_contiguous()
        kernels = native.kernels_for(x, self.format) if self.fixed_size and in_line else None
        if kernels is None:
            return super().encode_change(x, lengths, seed, before, after, keeping, out)
        rows, n = x.shape
        sizes = row_sizes(lengths, rows, n)
        payload = self._room(x, sizes, out)
        energies = torch.empty((rows, 2), dtype=torch.float32)
        place = kernels.delta_encode(
            x.detach(),
            sizes,
            self.format,
            row_seeds(seed, rows, x.device),
            payload,
            before,
            after,
            keeping.how,
            energies,
        )
        if place >= 0:
            raise unfit_value(x, self, lengths, rows, -1 - place)
        return payload, [(change, value) for change, value in energies.tolist()]

    def decode_change(
        self,
        payload: Tensor,
        lengths: Lengths | None,
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        keeping: Keeping,
        y: Tensor,
    ) -> None:
        kernels = native.kernels_for(y, self.format) if self.fixed_size else None
        if kernels is None:
            super().decode_change(payload, lengths, before, after, keeping, y)
            return
        rows, n = y.shape
        sizes = row_sizes(lengths, rows, n)
        total = self._payload_nbytes(rows, n, sizes, y.dtype)
        self._check_payload(payload, y.shape, total, total)
        if not kernels.delta_decode(
            payload.contiguous(), (rows, n), sizes, self.format, before, after, keeping.how, y
        ):
            raise ValueError(f"codec {self}: the payload holds {self._invalid}")

    def bound(
        self, dtype: torch.dtype, rows: int, n: int, how: Kept = torch.float32
    ) -> native.Bound | None:
        return None if self.zstd else native.bound(self.format, dtype, rows, n, how)

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        return native.encode_rows(x.to(torch.float32), self.format, seeds, out)

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        return native.decode_rows(payload, n, self.format)


for _bits in range(1, 9):
    register("codec", f"int{_bits}", bits=_bits)(Integer)

# the sign of each value, and of the root mean square of its group what is nearest: of 1-bit SGD
register("codec", "sign", yields=True, bits=1, symmetric=True, scale="std")(Integer)
