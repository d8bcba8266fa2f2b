"""The ``thinwire`` command: what its process does about mistakes and signals.

A mistake of the user is one line on stderr, ``thinwire: error: …``, and exit code 2. An interrupt
is exit code 130, whenever it comes. Hence nothing slow is imported before ``main``. Where nobody
reads stdout any more, as behind ``| head``, a run goes on; all else ends with exit code 141.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["_worker"]:
        from thinwire.train.launch import worker_main

        return worker_main(words[1:])
    with _leaving_at_once():
        from thinwire.train.config import ConfigError

        try:
            code = _run(words)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            from thinwire.train.streams import drop

            drop(sys.stdout)  # what is left would be written at the exit
            return 128 + signal.SIGPIPE
        except ConfigError as error:
            print(f"thinwire: error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("thinwire: stopped", file=sys.stderr)
            return 130


def _run(words: list[str]) -> int:
    if words[:1] == ["bench"]:
        from thinwire.bench.arguments import run as bench

        return bench(words[1:])
    if words[:1] == ["study"]:
        from thinwire.study.arguments import run as study

        return study(words[1:])
    if words[:1] == ["check"]:
        from thinwire.contract.arguments import run as check

        return check(words[1:])
    if words[:1] == ["selftest"]:
        from thinwire.selftest import run as selftest

        return selftest(words[1:])
    from thinwire.train.arguments import run

    return run(words)


@contextlib.contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Until there is something to clean up, a signal ends the process where it stands.

    An exception would come out as a traceback, or be lost, in the middle of an import.
    """
    try:
        previous = {number: signal.signal(number, _leave) for number in _SIGNALS}
    except ValueError:  # not the main thread, which alone sees signals
        previous = {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    os.write(2, f"thinwire: stopped{by}\n".encode())
    os._exit(128 + number)
