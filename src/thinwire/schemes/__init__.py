"""Schemes: predict, code the rest, update. One file a scheme."""

from __future__ import annotations

from thinwire.codecs import Codec
from thinwire.codecs.topk import TopK
from thinwire.schemes.base import Foreseen, Receiver, Scheme, Sender, Visit
from thinwire.schemes.delta import Delta
from thinwire.schemes.ef21 import EF21
from thinwire.schemes.feedback import ErrorFeedback, MixedFeedback
from thinwire.schemes.mask import SharedMask
from thinwire.schemes.value import Value
from thinwire.spec import parse

__all__ = [
    "EF21",
    "Delta",
    "ErrorFeedback",
    "Foreseen",
    "MixedFeedback",
    "Receiver",
    "Scheme",
    "Sender",
    "SharedMask",
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
    if isinstance(value, TopK) and value.mask == "shared":
        return SharedMask(value)
    return Value(value) if isinstance(value, Codec) else value
