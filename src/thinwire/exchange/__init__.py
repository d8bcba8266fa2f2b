"""Exchanges: compressed collectives, and the state that they need. One file an exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from thinwire.codecs import Codec
from thinwire.errors import SpecError
from thinwire.exchange.base import RESIDUALS, Averaging, Call, Exchange, Member, Outcome
from thinwire.exchange.dgc import DGC
from thinwire.exchange.lowrank import PowerSGD
from thinwire.exchange.peers import Peers
from thinwire.exchange.requantized import Requantized
from thinwire.exchange.sparse import Sparse
from thinwire.schemes import ErrorFeedback
from thinwire.spec import parse, register

__all__ = [
    "DGC",
    "Averaging",
    "Call",
    "Exchange",
    "Member",
    "Outcome",
    "Peers",
    "PowerSGD",
    "Requantized",
    "Sparse",
    "exchange",
    "register_exchange",
]

T = TypeVar("T", bound=Exchange)


def exchange(spec: str | Exchange) -> Exchange:
    """The exchange that a string names, as ``exchange("ef(int4:symmetric)")``.

    A codec's name: both halves of a requantized all-reduce in it, or a sparse all-gather where it
    keeps some of the values only. ``ef(codec)``: the same, with what it loses added to the next
    step's values. Other names: ``powersgd:4``, and what ``register_exchange`` was given. Raises
    SpecError with the nearest match on an unknown one.
    """
    value = spec if isinstance(spec, Exchange) else parse(spec)
    if isinstance(value, Exchange):
        return value
    coder, kept = value, ""
    if isinstance(value, ErrorFeedback):
        if value.key != "sample":
            raise SpecError(f"{spec}: gradients have no samples and no slots; leave key out")
        if value.residual not in RESIDUALS:
            raise SpecError(f"{spec}: residuals of gradients are kept in fp32 or bf16")
        coder, kept = value.codec, value.residual
    if not isinstance(coder, Codec):
        raise SpecError(
            f"{spec!r} is of a pipeline's links; gradients take a codec, as int4:symmetric, "
            "ef(codec), or an exchange, as powersgd:4"
        )
    return Sparse(coder, kept) if coder.sparse else Requantized(coder, kept)


def register_exchange(name: str, **preset: Any) -> Callable[[type[T]], type[T]]:
    """Class decorator that makes a user's exchange reachable by name.

    The class is a frozen dataclass derived from ``thinwire.exchange.Exchange``, with
    ``averaging``; its fields become the options of the spec string. ``preset`` fixes some of them.
    """
    add = register("exchange", name, **preset)

    def add_exchange(cls: type[T]) -> type[T]:
        if not issubclass(cls, Exchange):
            raise ValueError(f"{cls.__name__} is not derived from thinwire.exchange.Exchange")
        return add(cls)

    return add_exchange
