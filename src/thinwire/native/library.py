"""The compiled kernels as a shared object: found, loaded once, and run at a chosen level.

A level is a set of instructions that the kernels were compiled for; the best one that the machine
has is in use from the start. Every level gives the same bytes, and so do the torch twin ("eager"),
which runs where there is no library, and Triton's programs ("triton", see ``dispatch``).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: What tw_abi_version() in csrc/dispatch.cpp has to answer.
ABI_VERSION = 4
EAGER = "eager"
TRITON = "triton"

_logger = logging.getLogger(__name__)


def function(handle: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """The function ``name`` of a library, with its ctypes declared; ``result`` None for void.

    Raises AttributeError if the library has no such function.
    """
    found = getattr(handle, name)
    found.restype = result
    found.argtypes = arguments
    return found  # type: ignore[no-any-return]


class Loader:
    """One shared object of kernels, which is loaded when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._tried = self._warned = False
        self._instead = ""
        self._handle: ctypes.CDLL | None = None
        self._reason = ""
        self._levels: list[str] = []

    def library(self) -> ctypes.CDLL | None:
        """The library, or None where it is not to run; that it is not there is logged once."""
        if self._instead:
            return None
        self._load()
        if self._handle is None and not self._warned:
            with self._lock:
                warn, self._warned = not self._warned, True
            if warn:
                _logger.warning(
                    "thinwire's kernels are not there (%s): "
                    "codecs run on the slower torch twin, with the same bytes",
                    self._reason,
                )
        return self._handle

    def why_missing(self) -> str:
        """One line that says why there is no library, and what to do; empty if there is one."""
        self._load()
        return self._reason

    def levels(self) -> list[str]:
        """The levels that this machine can run, best first; none without a library."""
        self._load()
        return list(self._levels)

    def level(self) -> str:
        """The level in use; "eager" without a library."""
        return self._instead or self._active() or EAGER

    def instead(self) -> str:
        """What is forced instead of the library: "eager", "triton" or nothing."""
        return self._instead

    def set_level(self, name: str) -> None:
        """Use another level, for the whole process; not while kernels run.

        Raises ValueError if ``name`` is none of ``levels()``.
        """
        self._load()
        if self._handle is None or name not in self._levels:
            known = ", ".join(self._levels) or f"none, since the library is {self._reason}"
            raise ValueError(f"no level {name!r} here; there is: {known}")
        self._handle.tw_set_level(name.encode())

    @contextlib.contextmanager
    def forced(self, level: str) -> Iterator[None]:
        """Use a level inside, for the whole process: for tests, or to do without Triton.

        "eager" is the torch twin on CUDA too. With "triton" tensors on the CPU take Triton's
        programs, for which TRITON_INTERPRET=1 has to be set, or where there are none the twin.
        """
        before = self._active(), self._instead
        instead = level if level in (EAGER, TRITON) else ""
        if not instead:
            self.set_level(level)
        self._instead = instead
        try:
            yield
        finally:
            active, self._instead = before
            if active is not None:
                self.set_level(active)

    def _active(self) -> str | None:
        """The library's level, whatever is forced instead; None without library."""
        self._load()
        if self._handle is None:
            return None
        name: bytes = self._handle.tw_level()
        return name.decode()

    def _load(self) -> None:
        if self._tried:
            return
        with self._lock:
            if not self._tried:
                try:
                    self._handle, self._levels = _open(self._path)
                except _MissingError as error:
                    self._reason = str(error)
                self._tried = True  # last: other threads read it without the lock


class _MissingError(Exception):
    """There is no library to use; the text says why, in one line."""


def _open(path: Path) -> tuple[ctypes.CDLL, list[str]]:
    """Load the library, which releases the GIL in every call, and ask for its levels."""
    if not path.exists():
        raise _MissingError(
            "not built when thinwire was installed, for want of a working C++17 compiler: "
            "install one, then run pip install again"
        )
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise _MissingError(f"not loadable: {' '.join(str(error).split())}") from error
    try:
        version = function(handle, "tw_abi_version", ctypes.c_int)()
        if version != ABI_VERSION:
            raise _MissingError(
                f"of another version: {path} has ABI {version}, expected {ABI_VERSION}; "
                "run pip install again"
            )
        count = function(handle, "tw_level_count", ctypes.c_int)()
        name = function(handle, "tw_level_name", ctypes.c_char_p, ctypes.c_int)
        function(handle, "tw_level", ctypes.c_char_p)
        function(handle, "tw_set_level", ctypes.c_int, ctypes.c_char_p)
    except AttributeError as error:
        raise _MissingError(f"of another version: {error}; run pip install again") from error
    return handle, [name(index).decode() for index in range(count)]


_loader = Loader(Path(__file__).with_name("libthinwire.so"))
library = _loader.library
why_missing = _loader.why_missing
levels = _loader.levels
level = _loader.level
instead = _loader.instead
set_level = _loader.set_level
forced = _loader.forced
