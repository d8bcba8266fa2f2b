"""Schemes: predict, code the rest, update. One file a scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from thinwire.codecs import Codec
from thinwire.codecs.topk import TopK
from thinwire.schemes.base import Foreseen, Receiver, Scheme, Sender, Visit
from thinwire.schemes.delta import Delta
from thinwire.schemes.ef21 import EF21
from thinwire.schemes.feedback import ErrorFeedback, MixedFeedback
from thinwire.schemes.mask import SharedMask
from thinwire.schemes.predicted import Predicted
from thinwire.schemes.value import Value
from thinwire.spec import parse, register

__all__ = [
    "EF21",
    "Delta",
    "ErrorFeedback",
    "Foreseen",
    "MixedFeedback",
    "Predicted",
    "Receiver",
    "Scheme",
    "Sender",
    "SharedMask",
    "Value",
    "Visit",
    "parse",
    "register_scheme",
    "scheme",
]

T = TypeVar("T", bound=Scheme)


def scheme(spec: str) -> Scheme:
    """The scheme that a string names: ``delta(int4)``, or a codec's name for plain values.

    Raises SpecError with the nearest match on an unknown name or option.
    """
    value = parse(spec)
    if isinstance(value, TopK) and value.mask == "shared":
        return SharedMask(value)
    return Value(value) if isinstance(value, Codec) else value


def register_scheme(name: str, **preset: Any) -> Callable[[type[T]], type[T]]:
    """Class decorator that makes a user's scheme reachable by name.

    The class is a frozen dataclass derived from ``thinwire.Scheme`` with ``sender``, ``receiver``,
    ``stateless`` and ``row_nbytes``; its fields become the arguments of the spec string, a field of
    type ``thinwire.Codec`` the spec of a codec. ``preset`` fixes some of them. Raises ValueError on
    a name that is taken and on a class that is no such.
    """
    add = register("scheme", name, **preset)

    def add_scheme(cls: type[T]) -> type[T]:
        if not issubclass(cls, Scheme):
            raise ValueError(f"{cls.__name__} is not derived from tw.Scheme")
        return add(cls)

    return add_scheme
