"""What codecs that keep a share of a row's values have in common: ``0.1``, ``0.1/int8``."""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from thinwire.codecs.base import Codec
from thinwire.codecs.raw import Raw
from thinwire.errors import SpecError
from thinwire.spec import names, nearest, parse

RAW = Raw()
_SHARE = re.compile(r"[0-9]*\.?[0-9]+|[0-9]+\.")
_MOST_DECIMALS = 9
#: Codecs that select values themselves.
_SELECTING = {"topk", "randk", "threshold", "raw"}


@functools.cache
def fraction(share: str) -> Fraction:
    """The share of values that is kept, exactly."""
    return Fraction(share.partition("/")[0])


def canonical(name: str, share: str) -> str:
    """``share`` as it is printed, its number and its codec checked. Raises SpecError."""
    number, slash, coder = str(share).partition("/")
    if slash:
        values_codec(name, coder)
    return canonical_number(name, number) + slash + coder


def canonical_number(name: str, text: str) -> str:
    """A share as it is printed. Raises SpecError."""
    if not _SHARE.fullmatch(text):
        raise SpecError(
            f"{name}: {text!r} is not a share such as 0.1; write {name}:0.1 or {name}:0.1/int8"
        )
    whole, _, decimals = text.partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    share = Fraction(f"{whole}.{decimals or '0'}")
    if not 0 < share <= 1:
        raise SpecError(f"{name}: a share of {text} is not above 0 and at most 1")
    if len(decimals) > _MOST_DECIMALS:
        raise SpecError(f"{name}: a share has at most {_MOST_DECIMALS} decimals, not {text}")
    return f"{whole}.{decimals}" if decimals else whole


def values_of(name: str, share: str) -> Codec:
    """What the kept values are coded in."""
    _, slash, coder = share.partition("/")
    return values_codec(name, coder) if slash else RAW


@functools.cache
def values_codec(name: str, coder: str) -> Codec:
    """The codec ``coder`` of kept values; anything that cannot code them is a SpecError."""
    known = set(names("codec")) - _SELECTING
    found = parse(coder) if coder in known else None
    if not isinstance(found, Codec) or not found.fixed_size or found.together:
        raise SpecError(f"{name}: {coder!r} is no codec for the kept values{nearest(coder, known)}")
    return found


def kept(share: Fraction, n: int) -> int:
    """How many of ``n`` values are kept: that share, rounded up."""
    return -(-n * share.numerator // share.denominator)
