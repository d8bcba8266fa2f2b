"""The Python in the documentation, as files that can be run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

from thinwire import plugins

DOCS = Path(__file__).parents[1] / "docs"


def blocks(document: str) -> list[str]:
    """The blocks of Python of a document, in order."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / document).read_text(), re.S | re.M)


def block(document: str, name: str) -> str:
    """The block of a document that registers ``name``."""
    (found,) = [one for one in blocks(document) if re.search(rf'register_\w+\("{name}"\)', one)]
    return found


def loaded(name: str, folder: Path) -> ModuleType:
    """The block of the page on plugins that registers ``name``, loaded as one."""
    path = folder / f"{name}.py"
    path.write_text(block("plugins.md", name))
    assert plugins.load(path) == [name]
    return next(m for m in sys.modules.values() if getattr(m, "__file__", None) == str(path))
