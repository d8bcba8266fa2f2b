"""Codecs: tensor to payload bytes and back, without state. One file a codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from thinwire.codecs import (  # noqa: F401  each registers its names
    cast,
    integer,
    ops,
    published,
    randk,
    raw,
    threshold,
    tile,
    topk,
)
from thinwire.codecs.base import Codec
from thinwire.codecs.tensors import Bits, Ragged, TensorCodec
from thinwire.errors import SpecError
from thinwire.spec import parse, register

__all__ = [
    "Bits",
    "Codec",
    "Ragged",
    "TensorCodec",
    "codec",
    "ops",
    "register_codec",
]

T = TypeVar("T", bound=Codec | TensorCodec)


def codec(spec: str) -> Codec:
    """The codec that a string names, as ``codec("int4:group=64")``.

    Raises SpecError (a ValueError) with the nearest match on an unknown name or option, and on the
    name of a scheme.
    """
    value = parse(spec)
    if not isinstance(value, Codec):
        raise SpecError(f"{spec!r} is a scheme, which has state; a codec is wanted, such as 'int4'")
    return value


def register_codec(name: str, **preset: Any) -> Callable[[type[T]], type[T]]:
    """Class decorator that makes a user's codec reachable by name.

    The class is a frozen dataclass derived from ``thinwire.TensorCodec``, with ``encode`` and
    ``decode``, or from ``thinwire.Codec``, with ``row_nbytes``, ``_encode_rows`` and
    ``_decode_rows``; its fields become the options of the spec string. ``preset`` fixes some of
    them. Raises ValueError on a name that is taken and on a class that is no such.
    """
    add = register("codec", name, **preset)

    def add_codec(cls: type[T]) -> type[T]:
        if not issubclass(cls, Codec | TensorCodec):
            raise ValueError(f"{cls.__name__} is derived from neither tw.TensorCodec nor tw.Codec")
        return add(cls)

    return add_codec
