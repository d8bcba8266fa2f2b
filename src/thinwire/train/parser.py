"""argparse with errors of one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from thinwire.train.config import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse, but for its usage dump: errors become ``ConfigError``."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
