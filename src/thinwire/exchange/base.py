"""The exchange contract: how a bucket of tensors is averaged over the ranks of a group.

An exchange is a frozen configuration; ``averaging`` makes one rank's state for a bucket of tensors
that stay the same. A step's ``average`` is a generator: it yields where it has sent and has not yet
waited, so that a caller runs several buckets side by side, each a round behind the next. The state
moves when ``commit`` is called, and stays what it was after ``discard``.

What comes out is the mean, the same on all ranks to the bit: whatever all ranks need, one rank
decodes like all others from the bytes that it has sent.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.errors import NonFiniteError, SpecError
from thinwire.exchange.peers import Peers, Round
from thinwire.frame import Kind, Section
from thinwire.spec import Named

Steps = Generator[None, None, "Outcome"]


class Member(NamedTuple):
    """A tensor of a bucket: its name, its place among all tensors that are averaged, its shape."""

    name: str
    number: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class Call(NamedTuple):
    """One step of a bucket: the bucket's number, the seed of what is drawn at this rank, and which
    step it is, from 1."""

    bucket: int
    seed: int
    step: int


class Outcome(NamedTuple):
    """What a step gave: the means, or None where a rank's values were not finite; and which tensors
    were there on any rank."""

    means: list[Tensor] | None
    present: list[bool]


@dataclasses.dataclass(frozen=True)
class Exchange(Named):
    """A frozen configuration that makes the state of a bucket."""

    @abstractmethod
    def averaging(
        self, members: Sequence[Member], dtype: torch.dtype, device: torch.device, peers: Peers
    ) -> Averaging:
        """One rank's state for a bucket of ``members``, which are averaged in ``dtype``."""


#: In which dtype residuals are kept, by what an ``ef(…)`` calls it; None: that of the mean.
RESIDUALS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Coded(Exchange):
    """``codec`` for all that travels; ``residual``: how what it loses is kept ("": not at all)."""

    codec: Codec
    residual: str = ""

    def __post_init__(self) -> None:
        if not self.codec.alone:
            raise SpecError(f"{self.codec} is decoded by another link's frames: not for gradients")

    def __str__(self) -> str:
        kept = {"": str(self.codec), "fp32": f"ef({self.codec})"}
        return kept.get(self.residual, f"ef({self.codec},residual={self.residual})")


class Averaging(ABC):
    """One rank's state for a bucket of tensors."""

    def __init__(
        self, members: Sequence[Member], dtype: torch.dtype, device: torch.device, peers: Peers
    ) -> None:
        self.members, self.dtype, self.device = list(members), dtype, device
        self.peers = peers

    @abstractmethod
    def average(self, tensors: Sequence[Tensor | None], call: Call) -> Steps:
        """Average 1-D ``tensors``, one a member, of any float dtype (None: absent here, hence
        zero). They are not changed; the outcome's means are 1-D and of ``dtype``."""

    def commit(self) -> None:  # noqa: B027  some have no state
        """The step counts."""

    def discard(self) -> None:  # noqa: B027  as above
        """It does not: all state is what it was before."""

    def state(self) -> dict[str, Tensor]:
        """The state by what it is and of which member, as ``worker.layer.weight``: to be copied, if
        it is to stay."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` has of these members. Raises ValueError, before anything is
        changed, where it is of another shape, or lacks one."""
        for name, mine in self.state().items():
            if name not in state:
                raise ValueError(f"the state has no {name!r}")
            if state[name].shape != mine.shape:
                raise ValueError(
                    f"{name!r} is of shape {tuple(state[name].shape)}, not {tuple(mine.shape)}"
                )
            kept = state[name].to(mine.dtype) if state[name].is_floating_point() else None
            if kept is None or not bool(torch.isfinite(kept).all()):
                raise ValueError(f"{name!r} holds values that are not finite numbers")
        self._take({name: state[name] for name in self.state()})

    def _take(self, state: Mapping[str, Tensor]) -> None:
        """``state`` has the names and shapes of this one's, which are what it holds itself."""
        for name, mine in self.state().items():
            mine.copy_(state[name])


class Told(NamedTuple):
    """What a first round tells beside values: whether they are finite, and which tensors a rank
    has."""

    finite: bool
    present: list[bool]


def coded(codec: Codec, x: Tensor, seed: int) -> Section | None:
    """A section of 1-D ``x``; None where a value cannot be coded."""
    if codec.name == "raw" and not bool(torch.isfinite(x).all()):
        return None
    try:
        payload = codec.encode(x, seed=seed)
    except NonFiniteError:
        return None
    if not payload.is_cpu:
        payload = payload.cpu()
    return Section(Kind.VALUE, str(codec), x.dtype, tuple(x.shape), payload)


def decoded(codec: Codec, section: Section, like: Tensor, rounds: Round, source: int) -> Tensor:
    """The values of a section that rank ``source`` sent, which has the shape of ``like``."""
    fits = section.kind == Kind.VALUE and section.codec == str(codec)
    if not fits or section.shape != tuple(like.shape) or section.dtype != like.dtype:
        raise rounds.refuse(
            source,
            f"{section.kind.name.lower()} {section.codec!r} of {section.dtype} "
            f"{list(section.shape)}, expected {str(codec)!r} of {like.dtype} {list(like.shape)}",
        )
    payload = section.payload.to(like.device) if not like.is_cpu else section.payload
    try:
        return codec.decode(payload, like.shape, like.dtype)
    except ValueError as error:
        raise rounds.refuse(source, str(error)) from error


def with_presence(section: Section | None, present: Sequence[bool]) -> list[Section]:
    """What is sent in a first round; ``section`` None: values that are not finite."""
    section = section or Section(Kind.NONFINITE)
    if all(present):
        return [section]
    bits = np.packbits(np.array(present, dtype=np.uint8), bitorder="little")
    return [section, Section(Kind.CONTROL, payload=torch.from_numpy(bits))]


def told_by(sections: Sequence[Section], count: int, rounds: Round, source: int) -> Told:
    """The reverse, at the receiver; the values are in ``sections[0]``."""
    finite = sections[0].kind != Kind.NONFINITE if sections else True
    if len(sections) == 1:
        return Told(finite, [True] * count)
    bits = sections[1].payload if len(sections) == 2 else torch.empty(0, dtype=torch.uint8)
    if len(sections) != 2 or sections[1].kind != Kind.CONTROL or bits.numel() != -(-count // 8):
        raise rounds.refuse(source, f"{len(sections)} sections that do not fit a first round")
    found = np.unpackbits(bits.numpy(), bitorder="little", count=count)
    return Told(finite, [bool(one) for one in found])


def summed(
    codec: Codec, own: Section | None, present: Sequence[bool], like: Tensor, rounds: Round
) -> tuple[Tensor | None, list[bool]]:
    """The sum of what all ranks have sent this one, in their order, its ``own`` as decoded as the
    others'; None where a rank's values are not finite. And which tensors any rank has."""
    peers = rounds.peers
    finite, anywhere = own is not None, list(present)
    total = torch.zeros_like(like)
    for source in range(peers.size):
        section = own
        if source != peers.rank:
            received = rounds.receive(source)
            told = told_by(received, len(present), rounds, source)
            anywhere = [a or b for a, b in zip(anywhere, told.present, strict=True)]
            finite, section = finite and told.finite, received[0]
        if finite and section is not None:
            total.add_(decoded(codec, section, total, rounds, source))
    rounds.close()
    return total if finite else None, anywhere


def take_out(codec: Codec, x: Tensor, section: Section) -> Tensor:
    """Subtract from ``x`` what others will decode of its section: what is left was lost."""
    return x.sub_(codec.decode(section.payload.to(x.device), x.shape, x.dtype))


class Residual:
    """What coding has lost, one buffer for each of ``lengths``; ``kept``: in this dtype."""

    def __init__(self, lengths: Sequence[int], kept: torch.dtype, device: torch.device) -> None:
        self.buffers = [torch.zeros(n, dtype=kept, device=device) for n in lengths]
        self._next: list[Tensor] | None = None

    def add_to(self, buffers: Sequence[Tensor]) -> None:
        """Add it to what is about to be coded."""
        for buffer, kept in zip(buffers, self.buffers, strict=True):
            buffer.add_(kept)

    def propose(self, buffers: Sequence[Tensor]) -> None:
        """What it will be if the step counts; ``buffers`` are taken over."""
        dtype = self.buffers[0].dtype if self.buffers else torch.float32
        self._next = [buffer.to(dtype) for buffer in buffers]

    def stay(self, index: int, where: slice) -> None:
        """After ``propose``: these values are not of the step."""
        assert self._next is not None
        self._next[index][where] = self.buffers[index][where]

    def commit(self) -> None:
        if self._next is not None:
            self.buffers, self._next = self._next, None

    def discard(self) -> None:
        self._next = None
