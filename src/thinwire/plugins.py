"""Plugins: Python files and installed packages that register codecs, schemes and sources.

A plugin is code that somebody chose to run, by naming its file or by installing the package.
Nothing that is received from a link or read from a checkpoint loads one. A file is run once in a
process; torch is not imported before its code asks for it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from thinwire import spec

#: Entry points of this group name modules that register codecs and schemes.
GROUP = "thinwire.plugins"


class PluginError(ValueError):
    """A plugin that cannot be run, or registers nothing; the text is one line that names it."""


_registered: dict[Path, list[str]] = {}


def load(file: Path) -> list[str]:
    """Run a plugin file, unless it has been; returns the names that it registers.

    Raises PluginError, with the line of the file where there is one.
    """
    try:
        path = file.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL character, a loop
        raise PluginError(f"can't read the plugin {file}: {error}") from None
    if path not in _registered:
        found = _names_of_imported(path) or _run(path, file)
        if not found and not sources_of(file):
            raise PluginError(
                f"{file} registers nothing: put @tw.register_codec, @tw.register_scheme or "
                "@tw.register_source, with a name, before a class"
            )
        _registered[path] = found
    return _registered[path]


def sources_of(file: Path) -> list[str]:
    """The names of the sources that a plugin file which has been run registers."""
    return [one for name in _modules_of(file.resolve()) for one in spec.noted(name)]


def load_installed() -> list[str]:
    """Import the modules that installed packages name; returns a line on each that fails."""
    lines = []
    for entry in metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever somebody's package does
            lines.append(
                f"plugin '{entry.name}' ({entry.value}) is not loaded: {_described(error)}"
            )
    return lines


def digest(files: Sequence[str]) -> bytes:
    """32 bytes that two machines with the same plugins have in common, wherever the files lie."""
    total = hashlib.sha256()
    for file in files:
        total.update(hashlib.sha256(Path(file).read_bytes()).digest())
    return total.digest()


def _names_of_imported(path: Path) -> list[str]:
    """What a module that was imported from ``path`` otherwise, as by an entry point, registers."""
    return next((spec.names_of(name) for name in _modules_of(path)), [])


def _modules_of(path: Path) -> Iterator[str]:
    """The names of the modules that were run from ``path``."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == str(path):
            yield name


def _module_name(path: Path) -> str:
    where = hashlib.sha256(str(path).encode(errors="surrogateescape")).hexdigest()[:8]
    return f"thinwire_plugin_{path.stem}_{where}"


def _run(path: Path, shown: Path) -> list[str]:
    """Run the file as a module of its own; returns the names that it registers."""
    name = _module_name(path)
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    made = importlib.util.spec_from_loader(name, loader)
    assert made is not None
    module = importlib.util.module_from_spec(made)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        loader.get_code(name)  # what cannot be read or parsed is told before torch is imported
        # so that what is built in is not taken for new
        importlib.import_module("thinwire.exchange")
        before = spec.registered()
        loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            raise PluginError(_complaint(error, path, shown)) from error
        raise
    now = spec.registered()
    return sorted(one for one in now if now[one] is not before.get(one))


def _complaint(error: BaseException, path: Path, shown: Path) -> str:
    """One line on what running ``path`` has come to."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{shown}:{error.lineno or 1}: {type(error).__name__}: {error.msg}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    if lines:
        return f"{shown}:{lines[-1]}: {_described(error)}"
    if isinstance(error, OSError):
        return f"can't read the plugin {shown}: {error.strerror}"
    return f"{shown}: {_described(error)}"


def _described(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
