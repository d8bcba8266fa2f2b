"""stdout and stderr whose other end may go: a pipe, or a terminal that is closed.

A run goes on without them, since its files tell the same; any other command ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class _Lasting:
    """A text stream that swallows what can't be written any more; ``note`` then goes to stderr."""

    def __init__(self, stream: TextIO, note: str = "") -> None:
        self._stream, self._note = stream, note

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._leave()

    def _leave(self) -> None:
        drop(self._stream)
        if self._note:
            print(self._note, file=sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """While inside, neither stdout nor stderr is missed when its other end goes."""
    note = "thinwire: stdout is closed; the run goes on, see its folder"
    out: Any = _Lasting(sys.stdout, note)
    errors: Any = _Lasting(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        yield


def drop(stream: TextIO) -> None:
    """Let all that ``stream`` still holds, and will be given, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
