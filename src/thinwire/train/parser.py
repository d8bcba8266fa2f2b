"""argparse as the command uses it: errors of one line, no abbreviations, texts as laid out."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from thinwire.train.config import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse, but for its usage dump: errors become ``ConfigError``."""

    def __init__(self, prog: str, description: str, **options: Any) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
