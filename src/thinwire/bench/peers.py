"""What others do for the same purpose, each from its published description, as fast as it goes.

A peer is run where it can do what a case asks for; where it can do only something near to it, its
remark says so. Peers that allocate do so from a heap that keeps its pages (``timing.keep_heap``).
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.bench import ROW
from thinwire.bench.codecs import Case, Data, Reference, group_of
from thinwire.codecs import Codec
from thinwire.codecs.cast import Cast
from thinwire.codecs.integer import Integer
from thinwire.codecs.topk import TopK


class Peer:
    """A peer beside one codec, on the tensors of one size.

    Defines the methods among ``bench.OPS`` that it has, each of which is timed as it stands;
    ``delta_decode_apart`` also leaves the new values in a tensor other than the reference. ``most``
    is the number of values of a tensor above which it is left out, for its time or memory.
    """

    name: ClassVar[str]
    remark: ClassVar[str]
    most: ClassVar[int] = 1 << 62

    def __init__(self, coder: Codec, data: Data) -> None:
        self.codec, self.data = coder, data
        self.x, self.y = data.inputs["fp32"][0], data.outputs["fp32"]

    @classmethod
    def fits(cls, coder: Codec) -> bool:
        """Whether it does something comparable to ``coder`` on fp32 tensors."""
        raise NotImplementedError

    @property
    def reference(self) -> Reference:
        return self.data.reference("fp32")


class Peers:
    """All peers on the tensors of one size."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._made: dict[tuple[type[Peer], Codec], Peer] = {}

    def tasks(self, case: Case) -> Iterator[tuple[type[Peer], Callable[[], object]]]:
        """Those that have something to set against ``case``, each with its operation."""
        if case.dtype != "fp32" or case.reference not in (None, "fp32"):
            return
        op = f"{case.op}_apart" if case.in_place is False else case.op
        for cls in PEERS:
            if self._data.numel <= cls.most and hasattr(cls, op) and cls.fits(case.codec):
                key = cls, case.codec
                if key not in self._made:
                    self._made[key] = cls(case.codec, self._data)
                yield cls, getattr(self._made[key], op)


def _integer(coder: Codec, bits: Iterable[int]) -> bool:
    """Whether the codec is a plain affine one of so many bits, rounding to the nearest level."""
    return (
        isinstance(coder, Integer)
        and coder.bits in bits
        and not (coder.symmetric or coder.stochastic or coder.hadamard)
        and coder.fixed_size
    )


class Fbgemm(Peer):
    name = "fbgemm"
    remark = (
        "FBGEMM's row-wise 2, 4 and 8 bit kernels, inside torch as torch.ops.quantized."
        "embedding_bag_*; rows are our groups. Min-max at every width, where our int2 has a "
        "standard deviation; an fp16 scale and offset at 2 and 4 bits. It allocates its outputs. "
        "The delta operations are composed: x - m (into a given buffer), prepack, unpack, add_"
    )

    def __init__(self, coder: Codec, data: Data) -> None:
        super().__init__(coder, data)
        assert isinstance(coder, Integer)
        width = {2: "2bit", 4: "4bit", 8: "byte"}[coder.bits]
        self.pack: Any = getattr(torch.ops.quantized, f"embedding_bag_{width}_prepack")
        self.unpack: Any = getattr(torch.ops.quantized, f"embedding_bag_{width}_unpack")

    @classmethod
    def fits(cls, coder: Codec) -> bool:
        return _integer(coder, (2, 4, 8)) and ROW % (group_of(coder) or ROW) == 0

    def grouped(self, x: Tensor) -> Tensor:
        return x.view(-1, group_of(self.codec) or -1)

    @functools.cached_property
    def packed(self) -> Tensor:
        return self.pack(self.grouped(self.x))  # type: ignore[no-any-return]

    @functools.cached_property
    def packed_changes(self) -> Iterator[Tensor]:
        there = self.grouped(self.data.change())
        return itertools.cycle((self.pack(there), self.pack(there.neg_())))

    def encode(self) -> object:
        return self.pack(self.grouped(self.x))

    def decode(self) -> object:
        return self.unpack(self.packed)

    def delta_encode(self) -> object:
        m = self.grouped(self.reference.kept)
        change = torch.sub(self.reference.next_input(), self.reference.kept, out=self.y)
        packed = self.pack(self.grouped(change))
        m.add_(self.unpack(packed))
        return packed

    def delta_decode(self) -> object:
        m = self.grouped(self.reference.kept)
        return m.add_(self.unpack(next(self.packed_changes)))

    def delta_decode_apart(self) -> object:
        self.delta_decode()
        return self.y.copy_(self.reference.kept)


class TorchCast(Peer):
    name = "torch cast"
    remark = (
        "torch's copy_ to and from the shorter dtype, into ready tensors; without the check for "
        "values that became infinite"
    )

    def __init__(self, coder: Codec, data: Data) -> None:
        super().__init__(coder, data)
        assert isinstance(coder, Cast)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[coder.to]
        self.short = self.x.to(dtype)

    @classmethod
    def fits(cls, coder: Codec) -> bool:
        return isinstance(coder, Cast) and coder.to in ("bf16", "fp16")

    def encode(self) -> object:
        return self.short.copy_(self.x)

    def decode(self) -> object:
        return self.y.copy_(self.short)


class TorchTopK(Peer):
    name = "torch.topk"
    remark = (
        "torch.topk(x.abs(), k, sorted=False) into ready tensors. Favoured: it leaves magnitudes "
        "and int64 positions, where ours has coded positions and signed values. Decode is zero_ "
        "and scatter_"
    )
    most = 1 << 24

    def __init__(self, coder: Codec, data: Data) -> None:
        super().__init__(coder, data)
        assert isinstance(coder, TopK)
        self.k = coder.kept(data.numel)
        self.values = torch.zeros(self.k)
        self.positions = torch.zeros(self.k, dtype=torch.int64)

    @classmethod
    def fits(cls, coder: Codec) -> bool:
        return isinstance(coder, TopK)

    def encode(self) -> object:
        magnitudes = torch.abs(self.x, out=self.y).view(-1)
        return torch.topk(magnitudes, self.k, sorted=False, out=(self.values, self.positions))

    @functools.cached_property
    def kept(self) -> tuple[Tensor, Tensor]:
        self.encode()
        positions = self.positions.sort().values
        return positions, self.x.view(-1)[positions]

    def decode(self) -> object:
        positions, values = self.kept
        return self.y.zero_().view(-1).scatter_(0, positions, values)


class Dgc(Peer):
    name = "dgc"
    remark = (
        "Deep Gradient Compression (Lin et al. 2018): a threshold from a sample of 1 %, then what "
        "is above it; top-k among that where it is more than k. Approximate where it is less; "
        "int64 positions, not coded"
    )
    most = 1 << 24
    fits = TorchTopK.fits

    @functools.cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def encode(self) -> object:
        assert isinstance(self.codec, TopK)
        n, k = self.data.numel, self.codec.kept(self.data.numel)
        x = self.x.view(-1)
        magnitudes = torch.abs(self.x, out=self.y).view(-1)
        places = torch.randint(n, (max(1, n // 100),), generator=self.generator)
        sample = magnitudes[places]
        threshold = torch.topk(sample, max(1, k * sample.numel() // n), sorted=False).values.min()
        positions = torch.nonzero(magnitudes >= threshold).view(-1)
        if positions.numel() > k:
            among = torch.topk(magnitudes[positions], k, sorted=False).indices
            positions = positions[among]
        return positions, x[positions]


class Bitsandbytes(Peer):
    name = "bitsandbytes"
    remark = (
        "its block-wise kernels for CPUs, nf4 and dynamic 8 bit, fp32 scales without offset, "
        "blocks of our groups. It allocates its outputs"
    )
    most = 1 << 24

    @classmethod
    def fits(cls, coder: Codec) -> bool:
        known = _integer(coder, (4, 8)) and group_of(coder) in (64, 128, 256, 512, 1024)
        return known and importlib.util.find_spec("bitsandbytes") is not None

    @functools.cached_property
    def packed(self) -> Any:
        return self.encode()

    def encode(self) -> Any:
        from bitsandbytes import functional  # type: ignore[import-not-found, unused-ignore]

        assert isinstance(self.codec, Integer)
        group = group_of(self.codec)
        if self.codec.bits == 4:
            return functional.quantize_4bit(self.x, blocksize=group, quant_type="nf4")
        return functional.quantize_blockwise(self.x, blocksize=group)

    def decode(self) -> object:
        from bitsandbytes import functional

        assert isinstance(self.codec, Integer)
        if self.codec.bits == 4:
            return functional.dequantize_4bit(*self.packed)
        return functional.dequantize_blockwise(*self.packed)


class HivemindUniform8(Peer):
    name = "hivemind uniform8"
    remark = (
        "our version of hivemind's 8 bit code, in plain torch: 256 equal ranges over six standard "
        "deviations, each decoded as the mean of what fell into it. Without its message format, "
        "and one table for the whole tensor, which costs less than groups"
    )
    most = 1 << 24
    sigmas = 6

    @classmethod
    def fits(cls, coder: Codec) -> bool:
        return _integer(coder, (8,)) and group_of(coder) == 128

    def encode(self) -> tuple[Tensor, Tensor]:
        deviation, mean = torch.std_mean(self.x)
        levels = torch.sub(self.x, mean, out=self.y).mul_(256 / (deviation * self.sigmas))
        codes = levels.round_().add_(128).clamp_(0, 255).to(torch.uint8)
        return codes, self.table(codes)

    def table(self, codes: Tensor) -> Tensor:
        """The mean of the values of each code."""
        index = codes.view(-1).to(torch.int64)
        sums = torch.zeros(256).index_add_(0, index, self.x.view(-1))
        return sums / torch.bincount(index, minlength=256).clamp_(min=1)

    @functools.cached_property
    def coded(self) -> tuple[Tensor, Tensor]:
        return self.encode()

    def decode(self) -> object:
        codes, table = self.coded
        return torch.index_select(table, 0, codes.view(-1).to(torch.int32), out=self.y.view(-1))


class HivemindQuantile8(HivemindUniform8):
    name = "hivemind quantile8"
    remark = (
        "the same with ranges that hold equally many values: quantiles of chunks of 100 000 "
        "values, then the quantiles of those"
    )
    most = 1 << 22
    chunk = 100_000

    def encode(self) -> tuple[Tensor, Tensor]:
        parts = self.x.view(-1).split(self.chunk)
        points = torch.linspace(0, 1, 257)
        borders = torch.cat([torch.quantile(part, points) for part in parts])
        borders = torch.quantile(borders, points)[1:-1].contiguous()
        codes = torch.bucketize(self.x, borders, out_int32=True).to(torch.uint8)
        return codes, self.table(codes)


class AcSgd(Peer):
    name = "ac-sgd"
    remark = (
        "our version of the AQ-SGD authors' 4 bit quantiser, in plain torch: levels k/8 of each "
        "channel's largest magnitude over all rows, fp16 scales, m in fp16. Favoured: a plain "
        "shift packs its nibbles, and nothing is copied to a host"
    )
    most = 1 << 24

    @classmethod
    def fits(cls, coder: Codec) -> bool:
        return _integer(coder, (4,)) and group_of(coder) == 128

    @functools.cached_property
    def m(self) -> Tensor:
        return self.x.to(torch.float16)

    @staticmethod
    def pack(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(0, keepdim=True).to(torch.float16)
        levels = (x / (scale.to(torch.float32) + 1e-6)).mul_(8).round_().clamp_(-8, 7).add_(8)
        codes = levels.to(torch.uint8)
        half = codes.shape[1] // 2
        return codes[:, :half] | (codes[:, half:] << 4), scale

    @staticmethod
    def unpack(packed: Tensor, scale: Tensor) -> Tensor:
        codes = torch.cat((packed & 15, packed >> 4), 1)
        return codes.to(torch.float32).sub_(8).mul_(scale.to(torch.float32) / 8)

    @functools.cached_property
    def packed(self) -> tuple[Tensor, Tensor]:
        return self.pack(self.x)

    @functools.cached_property
    def packed_changes(self) -> Iterator[tuple[Tensor, Tensor]]:
        there = self.data.change()
        return itertools.cycle((self.pack(there), self.pack(there.neg_())))

    def encode(self) -> object:
        return self.pack(self.x)

    def decode(self) -> object:
        return self.unpack(*self.packed)

    def moved(self, packed: tuple[Tensor, Tensor]) -> Tensor:
        y = self.unpack(*packed).add_(self.m)
        self.m.copy_(y)
        return y

    def delta_encode(self) -> object:
        packed = self.pack(self.reference.next_input() - self.m.to(torch.float32))
        return packed, self.moved(packed)

    def delta_decode(self) -> object:
        return self.moved(next(self.packed_changes))

    delta_decode_apart = delta_decode


PEERS: tuple[type[Peer], ...] = (
    Fbgemm,
    TorchCast,
    TorchTopK,
    Dgc,
    Bitsandbytes,
    HivemindUniform8,
    HivemindQuantile8,
    AcSgd,
)
