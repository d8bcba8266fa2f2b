"""Schemes: predict, code the rest, update. One file a scheme."""

from __future__ import annotations

from thinwire.codecs import Codec
from thinwire.schemes.base import Foreseen, Receiver, Scheme, Sender, Visit
from thinwire.schemes.delta import Delta
from thinwire.schemes.value import Value
from thinwire.spec import parse

__all__ = [
    "Delta",
    "Foreseen",
    "Receiver",
    "Scheme",
    "Sender",
    "Value",
    "Visit",
    "parse",
    "scheme",
]


def scheme(spec: str) -> Scheme:
    """The scheme that a string names: ``delta(int4)``, or a codec's name for plain values.

    Raises SpecError with the nearest match on an unknown name or option.
    """
    value = parse(spec)
    return Value(value) if isinstance(value, Codec) else value
