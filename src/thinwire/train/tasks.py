"""Which task a run is: that of its model's kind."""

from __future__ import annotations

from thinwire.train.config import Config
from thinwire.train.language import Language
from thinwire.train.task import Task


def task_of(config: Config) -> Task:
    """The task of a run with these settings."""
    return Language()
