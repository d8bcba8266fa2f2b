"""A folder that one process alone may write to, for as long as it lives or holds it."""

from __future__ import annotations

import fcntl
import logging
import time
from pathlib import Path
from typing import IO

_LOG = logging.getLogger(__name__)
_NAME = ".lock"
_PATIENCE_S = 1.0  # somebody who only looks has it for a moment


class FolderLock:
    """Holds ``folder``, which must be there, until ``release``, or until the process ends however
    it does. Raises FolderInUseError if another process or another holder in this one has it."""

    def __init__(self, folder: Path) -> None:
        self._file: IO[bytes] | None = (folder / _NAME).open("ab")
        deadline = time.monotonic() + _PATIENCE_S
        while not _try(self._file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                self.release()
                raise FolderInUseError(f"{folder} is in use")
            time.sleep(0.02)

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class FolderInUseError(ValueError):
    """A folder is another's."""


def is_held(folder: Path) -> bool:
    """Whether somebody holds ``folder``; False where there is no such folder."""
    try:
        with (folder / _NAME).open("rb") as file:
            return not _try(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _try(file: IO[bytes], how: int) -> bool:
    """Whether the lock is ours now."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        _LOG.warning("%s cannot be locked: %s", file.name, error)
    return True
