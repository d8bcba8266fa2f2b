"""Asking a run to stop: it finishes the step, saves a checkpoint, and says how to go on.

The first interrupt, SIGTERM or SIGHUP asks; a second one ends the run at once. Before the first
step and after the last one, where nothing can be lost, the first one does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import thinwire as tw
from thinwire.train.metrics import write_json

_SAME_S = 2.0  # torchrun passes on to its workers what the terminal has sent them already
_PHASE = "phase.json"  # in the starting process's scratch folder
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """The run was stopped, as it was asked to, after ``step`` of ``steps``, which is saved."""

    def __init__(self, step: int, steps: int) -> None:
        super().__init__(f"stopped at step {step} of {steps}")
        self.step, self.steps = step, steps


class Stop:
    """What a process knows of being asked to stop.

    ``note`` is called with ``"training"``, ``"closing"`` (its last step is saved) or
    ``"complete"``, and the run folder, as a run gets there.
    """

    def __init__(self, note: Callable[[str, Path], None] | None = None) -> None:
        self.number: int | None = None  # of the signal that asked
        self.folder: Path | None = None  # of the run that is, or was, in training
        self.phase: str | None = None  # that it has got to
        self._note = note
        self._pipeline: tw.Pipeline | None = None
        self._first: float | None = None

    def ask(self, number: int) -> None:
        """Have the run stop after the step that it is in; from any thread or signal handler."""
        self.number = self.number or number
        if self._pipeline is not None:
            self._pipeline.ask_to_stop()

    @contextlib.contextmanager
    def training(self, pipeline: tw.Pipeline, folder: Path) -> Iterator[None]:
        """While inside, asking is answered by ``StepResult.stop``."""
        self._pipeline = pipeline
        self._tell("training", folder)
        if self.number is not None:
            pipeline.ask_to_stop()
        try:
            yield
        finally:
            self._pipeline = None
        self._tell("closing", folder)

    def complete(self, folder: Path) -> None:
        """The run has its summary: there is nothing to go on with."""
        self._tell("complete", folder)

    def _tell(self, phase: str, folder: Path) -> None:
        self.phase, self.folder = phase, folder
        if self._note is not None:
            self._note(phase, folder)

    def watch(self) -> None:
        """Take this process's signals: the first asks, a second one ends the process."""
        for number in heeded():
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None and self._pipeline is not None:
            self._first = now
            self.ask(number)
            return
        if self._first is not None and now - self._first < _SAME_S:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)  # torchrun says itself whom it stopped
        os.kill(os.getpid(), number)


def heeded() -> list[signal.Signals]:
    """The signals that stop a run: SIGHUP does not under ``nohup``, which has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if number != signal.SIGHUP or not ignored]


def stopped_by(number: int) -> str:
    """What is shown when a signal has stopped a command."""
    return f"thinwire: stopped{_by(number)}"


def stopped_line(number: int, stopped: Stopped, command: str) -> str:
    """What is shown when a run has stopped as it was asked to."""
    where = f"at step {stopped.step} of {stopped.steps}"
    return f"{stopped_by(number)} {where}; go on with: {command}"


def at_once_line(
    number: int, phase: tuple[str, Path] | None, command: Callable[[Path], str]
) -> str:
    """What is shown when a run is ended where it stands, in ``phase`` of the run in a folder;
    ``command`` gives the words that go on with it."""
    known = ""
    if phase is not None and phase[0] == "closing":
        known = f"; the last step is saved, go on with: {command(phase[1])}"
    elif phase is not None and phase[0] == "complete":
        known = f"; the run in {phase[1]} is complete"
    return f"{stopped_by(number)}{known}"


def _by(number: int) -> str:
    """What stopped it, unless it was an interrupt."""
    return "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"


def phase_writer(scratch: Path) -> Callable[[str, Path], None]:
    """A worker's ``note`` that tells the starting process, by a file in ``scratch``."""

    def note(phase: str, folder: Path) -> None:
        write_json(scratch / _PHASE, {"phase": phase, "folder": str(folder)})

    return note


def phase_in(scratch: Path) -> tuple[str, Path] | None:
    """What a worker has noted last: a phase of ``Stop``, and the run folder."""
    try:
        known = json.loads((scratch / _PHASE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return known["phase"], Path(known["folder"])


def say(line: str) -> None:
    """Show a line on stderr at once."""
    print(line, file=sys.stderr, flush=True)


def resume_command(folder: Path) -> str:
    """What is typed to go on with a run that was started without torchrun."""
    return f"thinwire train --resume {shlex.quote(str(folder))}"


def torchrun_command(folder: Path, world_size: int, local_world_size: int) -> str:
    """What is typed on each machine to go on with a run under torchrun."""
    nodes = "" if world_size == local_world_size else f"--nnodes {world_size // local_world_size} "
    more = " … " if nodes else " "  # the address of the machines is not known here
    return f"torchrun {nodes}--nproc-per-node {local_world_size}{more}-m {resume_command(folder)}"
