"""Which task a run is: that of its model's kind."""

from __future__ import annotations

from thinwire.train.config import KINDS, LANGUAGE, VISION, Config
from thinwire.train.language import Language
from thinwire.train.task import Task
from thinwire.train.vision.task import Vision

_TASKS: dict[str, Task] = {LANGUAGE: Language(), VISION: Vision()}


def task_of(config: Config) -> Task:
    """The task of a run with these settings."""
    return _TASKS[KINDS[config.model.kind]]
