"""The thread that reads and writes references while the model computes, one for each rank."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class Job:
    """Work for the thread: ``result`` once it is done, or what went wrong."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            self._error = error
        self._done.set()

    def result(self) -> Any:
        """Wait for the end; what the work returned. Raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Background:
    """Runs jobs one after the other, in the order in which they came, in a thread of its own."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy_s = 0.0

    def submit(self, work: Callable[[], Any]) -> Job:
        """Queue ``work``; the thread starts with the first."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="thinwire-references", daemon=True
            )
            self._thread.start()
        job = Job(work)
        self._jobs.put(job)
        return job

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            start = time.perf_counter()
            job.run()
            self.busy_s += time.perf_counter() - start

    def close(self) -> None:
        """End the thread after what it was given."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
