"""What a command may name beyond what is built in: its plugins, loaded before a spec is read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from thinwire import plugins
from thinwire.train.config import ConfigError
from thinwire.train.words import printable


def load(files: Sequence[str], quiet: bool = False) -> list[str]:
    """Load what installed packages offer, then ``files``; returns the names that these register.

    A package that fails is a line on stderr, unless ``quiet``. Raises ConfigError for a file.
    """
    for line in plugins.load_installed():
        if not quiet:
            print(f"thinwire: warning: {printable(line)}", file=sys.stderr)
    names: list[str] = []
    for file in files:
        try:
            names += plugins.load(Path(file))
        except plugins.PluginError as error:
            raise ConfigError(str(error)) from None
    return list(dict.fromkeys(names))
