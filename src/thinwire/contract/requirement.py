"""One requirement: what is asked, the function that tries it, and what came of it.

A function goes through its inputs from the smallest on, so the first that fails is the smallest. It
says what it is at with ``on`` and what has to hold with ``need``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Generic, Literal, NoReturn, TypeVar

T = TypeVar("T")
Status = Literal["passed", "failed", "not applicable"]

#: Seconds after which a requirement has failed: a decoder that runs for ever never fails otherwise.
LIMIT_S = 60.0


class Broken(Exception):
    """A requirement does not hold: for which input, what was found, and what else was expected."""

    def __init__(self, found: str, expected: str | None = None) -> None:
        super().__init__(found)
        self.given, self.found, self.expected = "", found, expected


class NotApplicable(Exception):
    """The requirement says nothing of this codec or scheme; the text says why."""


class _Overtime(BaseException):
    """The time is over; no ``except Exception`` of somebody's code swallows it."""


@dataclasses.dataclass(frozen=True)
class Requirement(Generic[T]):
    """``check`` raises ``Broken`` or ``NotApplicable``, or returns a note, if there is one."""

    name: str
    says: str
    check: Callable[[T], str | None]


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of one requirement; ``given`` is the smallest input for which it failed."""

    requirement: str
    expected: str
    status: Status
    given: str | None = None
    found: str | None = None
    note: str | None = None


def requirement(name: str, says: str) -> Callable[[Callable[[T], str | None]], Requirement[T]]:
    """Decorator that makes a function a requirement; ``says`` completes "expected: …"."""
    return lambda check: Requirement(name, says, check)


def try_out(one: Requirement[T], subject: T) -> Result:
    """Try a requirement on a codec or scheme. Whatever is raised there is a failure."""
    try:
        with _limited(LIMIT_S), on("its first input"):
            note = one.check(subject)
    except NotApplicable as why:
        return Result(one.name, one.says, "not applicable", note=str(why))
    except Broken as broken:
        expected = broken.expected or one.says
        return Result(one.name, expected, "failed", broken.given, broken.found)
    except _Overtime:
        return Result(one.name, one.says, "failed", None, f"it still ran after {LIMIT_S:g} s")
    return Result(one.name, one.says, "passed", note=note)


@contextlib.contextmanager
def on(given: str) -> Iterator[None]:
    """Meanwhile whatever fails fails for this input."""
    try:
        yield
    except Broken as broken:
        broken.given = broken.given or given
        raise
    except (NotApplicable, KeyboardInterrupt, _Overtime):
        raise
    except BaseException as error:  # SystemExit too: somebody's code must not end the check
        failure = Broken(described(error))
        failure.given = given
        raise failure from error


def need(condition: bool, found: str, expected: str | None = None) -> None:
    """Raise ``Broken`` unless the condition holds."""
    if not condition:
        raise Broken(found, expected)


def need_spec(value: object, kind: str, read: Callable[[str], object]) -> None:
    """Raise ``Broken`` unless the string of a ``kind``, as codec or scheme, reads as its equal."""
    with on(f"str({kind})"):
        text = str(value)
    with on(text):
        again = read(text)
        need(again == value, f"{again!r} is not {value!r}")
        need(hash(again) == hash(value), f"equal {kind}s of unequal hashes")
        need(str(again) == text, f"its string is then {str(again)!r}")


def described(error: BaseException) -> str:
    """An exception on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise ``_Overtime`` after so many seconds, where a signal can: on the main thread."""

    def over(number: int, frame: FrameType | None) -> NoReturn:
        raise _Overtime

    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer"):
        yield
        return
    before: Any = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
