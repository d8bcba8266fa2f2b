"""How values of settings are spelled: read from options and TOML files, and written to them.

The order is: the defaults, then a TOML file, then ``--section.field value``.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.spec import nearest
from thinwire.train.config import KINDS, Config, ConfigError, Setting, settings
from thinwire.train.words import one_line, typed


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file under their dotted names."""
    try:
        return from_toml(path.read_text(encoding="utf-8"), path)
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder; a run is repeated from its config.toml, and goes on with --resume"
        ) from None
    except OSError as error:
        raise ConfigError(f"can't read the config file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no TOML file: it is not UTF-8 text") from None


def from_toml(text: str, path: Path) -> dict[str, Any]:
    """The values of TOML text under their dotted names; errors say that it is in ``path``."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path} is no valid TOML: it is nested too deep") from None
    except ValueError as error:  # TOMLDecodeError, and a number of thousands of digits
        raise ConfigError(f"{path} is no valid TOML: {one_line(error)}") from None
    known = {s.name: s for s in settings()}
    sections = {name.split(".")[0] for name in known if "." in name}
    values: dict[str, Any] = {}
    for key, value in tables.items():
        if not isinstance(value, dict):
            values[key] = value
        elif key in sections:
            values.update({f"{key}.{inner}": v for inner, v in value.items()})
        else:
            raise ConfigError(f"{path}: unknown section [{key}]{nearest(key, sections)}")
    return typed_values(values, path)


def typed_values(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Values from ``path`` under their dotted names, each of its setting's type."""
    known = {s.name: s for s in settings()}
    for name in values:
        if name not in known:
            raise ConfigError(f"{path}: unknown setting '{name}'{nearest(name, known)}")
    return {name: _from_toml(known[name], v, path) for name, v in values.items()}


def _from_toml(setting: Setting, value: Any, path: Path) -> Any:
    kinds = setting.alternatives
    if setting.repeated and isinstance(value, list) and all(type(v) is str for v in value):
        return tuple(value)
    if float in kinds and type(value) is int:
        return float(value) if abs(value) < 2**63 else math.inf
    if type(value) in kinds:
        return _chosen(setting, value, f"{path}: {setting.name}")
    shown = typed(value) if isinstance(value, bool) else repr(value)
    raise ConfigError(f"{path}: {setting.name} = {shown} is not {_described(setting)}")


def from_text(setting: Setting, text: str) -> Any:
    """The value of a command-line option, or ConfigError naming the option."""
    if setting.optional and text.lower() == "none":
        return None
    for kind in setting.alternatives:
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        if kind is str:
            return _chosen(setting, text, f"--{setting.name}")
    raise ConfigError(f"--{setting.name}: '{text}' is not {_described(setting)}")


def _chosen(setting: Setting, value: Any, where: str) -> Any:
    if setting.choices is None or value in setting.choices:
        return value
    by_lower = {choice.lower(): choice for choice in setting.choices}
    if value.lower() in by_lower:
        return by_lower[value.lower()]
    close = nearest(value, by_lower)
    meant = next((c for lower, c in by_lower.items() if f"'{lower}'" in close), None)
    close = f"; did you mean '{meant}'?" if meant else f"; known: {', '.join(setting.choices)}"
    raise ConfigError(f"{where}: unknown value '{value}'{close}")


def _described(setting: Setting) -> str:
    if setting.repeated:
        return "a list of texts"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    shown = [words[kind] for kind in setting.alternatives]
    return " or ".join([*shown, "none"] if setting.optional else shown)


def to_toml(config: Config) -> str:
    """The settings as TOML that ``thinwire train`` reads back; those that are none left out.

    Those that the model's kind has not are left out too, and ``out``, since the folder it names is
    full once the run is over.
    """
    lines, section = [], ""
    for entry in settings():
        if entry.name == "out" or entry.task not in (None, KINDS[config.model.kind]):
            continue
        prefix, _, field = entry.name.rpartition(".")
        value = entry.of(config)
        if prefix != section:
            section = prefix
            lines.append(f"\n[{section}]")
        if value is not None:
            lines.append(f"{field} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):  # JSON escapes are TOML escapes, DEL aside
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
