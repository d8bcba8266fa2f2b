"""What a study compares, read from a TOML file: plans, seeds, learning rates, and what they share.

    title = "Quantized activations and gradients"
    baseline = "raw / raw"
    seeds = 3

    [settings]                        # of thinwire train, for all runs
    train.epochs = 3

    [[plan]]
    forward = "raw"
    backward = "raw"

    [[plan]]                          # lists: all combinations
    forward = ["int4", "int2"]
    backward = ["int8", "int4"]
    settings = { plan.dense_epochs = 1 }
    seeds = 1                         # fewer than the others

A case is a plan with a seed and a learning rate. What two cases of a seed share besides the plan is
the same in both: initial weights, order of the samples, dropout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire import plugins
from thinwire.spec import nearest
from thinwire.train import config as configuration
from thinwire.train.config import ConfigError
from thinwire.train.spelling import from_text, typed_values
from thinwire.train.words import one_line
from thinwire.units import parse_rate

Settings = Mapping[str, Any]

#: All stages in one process, through real schemes and frames, one thread: many runs side by side.
_SHARED: dict[str, Any] = {"link.transport": "memory", "link.rate": "none", "threads": 1}
_RATES = ("1000mbit", "500mbit", "100mbit")
_KEYS = {
    *("title", "baseline", "seeds", "settings", "plan", "learning_rates", "rates", "target"),
    *("deviations", "not_run", "plugins"),
}
_PLAN_KEYS = {"name", "forward", "backward", "settings", "seeds"}
_MOST_CASES = 10_000
_LARGEST = 1e300


@dataclasses.dataclass(frozen=True)
class Plan:
    """One of what is compared: the settings in which it differs from the others, and with how many
    seeds it is run, where that is not the study's number."""

    name: str
    settings: Settings
    seeds: int | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One run: a plan, a seed and a learning rate."""

    plan: Plan
    seed: int
    lr: float | None  # None: that of the settings
    settings: Settings

    @property
    def key(self) -> str:
        """A digest of all its settings and of what its plugins hold, wherever they lie: runs with
        the same key give the same losses on the same data."""
        settings = dict(self.settings)
        if files := settings.pop("plugin", ()):
            with contextlib.suppress(OSError):  # loading them tells
                settings["plugin"] = plugins.digest(files).hex()
        text = json.dumps(dict(sorted(settings.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Grid:
    """A study as it is asked for.

    ``baseline`` names the plan that the others are compared with. ``learning_rates``: each plan is
    tried at all of them on one seed, and takes the best on validation. ``target``: the validation
    loss to which the time is predicted; None: what the baseline reaches, and 1 % more. ``not_run``:
    why nobody has run it as it is. ``deviations``: in what it differs from what it replicates.
    """

    title: str
    settings: Settings
    plans: tuple[Plan, ...]
    baseline: str
    seeds: int = 3
    learning_rates: tuple[float, ...] = ()
    rates: tuple[str, ...] = _RATES
    target: float | None = None
    deviations: tuple[str, ...] = ()
    not_run: str | None = None

    def case(self, plan: Plan, seed: int, lr: float | None) -> Case:
        """The run of a plan."""
        settings = {**_SHARED, **self.settings, **plan.settings, "train.seed": seed}
        if lr is not None:
            settings["train.lr"] = lr
        return Case(plan, seed, lr, settings)

    def trials(self, plan: Plan) -> list[Case]:
        """The runs that choose a plan's learning rate; none where there is no choice."""
        return [self.case(plan, 0, lr) for lr in self.learning_rates]

    def finals(self, plan: Plan, lr: float | None) -> list[Case]:
        """The runs of a plan that are reported."""
        return [self.case(plan, seed, lr) for seed in range(plan.seeds or self.seeds)]


def read(
    path: Path,
    added: Sequence[str] = (),
    seeds: int | None = None,
    files: Sequence[str] = (),
    instead: Sequence[str] = (),
) -> Grid:
    """The study in ``path``, and plans ``added`` to it: ``forward``, or ``forward / backward``.

    ``files``: further plugins, that register codecs or schemes. ``instead``: settings for all runs
    in place of the file's, as ``data.path=images``.

    Raises ConfigError where something in it is unknown, of another type, or there twice.
    """
    document = _document(path)
    shared = typed_values(_table(document, path), path) | _replaced(instead)
    beside = [path.parent / file for file in _texts(document, "plugins", path)]
    if own := [*beside, *map(Path, files)]:
        shared["plugin"] = tuple(str(file.absolute()) for file in own)
    plans = [plan for entry in _entries(document, path) for plan in _plans(entry, seeds, path)]
    plans += [_added(text) for text in added]
    names = [plan.name for plan in plans]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path}: the plan '{twice}' is there twice; name one of them otherwise")
    rates = _numbers(document, "learning_rates", path)
    for settings in (shared, *[plan.settings for plan in plans]):
        _check_settings(settings, bool(rates), path)
    targets = _numbers(document, "target", path)
    if len(targets) > 1:
        raise ConfigError(f"{path}: target: write one validation loss")
    baseline = _text(document, "baseline", names[0], path)
    if baseline not in names:
        raise ConfigError(f"{path}: no plan is called '{baseline}'{nearest(baseline, names)}")
    grid = Grid(
        _text(document, "title", path.stem, path),
        shared,
        tuple(plans),
        baseline,
        _seeds(document, seeds, path) or 3,
        tuple(rates),
        tuple(_texts(document, "rates", path) or _RATES),
        next(iter(targets), None),
        tuple(_texts(document, "deviations", path)),
        _text(document, "not_run", "", path) or None,
    )
    for rate in grid.rates:
        _check_rate(rate, path)
    if (runs := sum(len(grid.finals(plan, None)) for plan in plans)) > _MOST_CASES:
        raise ConfigError(f"{path}: {runs:,} runs; at most {_MOST_CASES:,} go")
    return grid


#: Settings that a study has itself, and those of runs that leave no result of the usual form.
_OWN = {
    "train.seed": "the study's seeds are 0, 1, 2 and so on: set their number, as seeds = 3",
    "out": "a study's runs lie in its own folder: give that with --out",
    "json": "it is the study that prints JSON, with --json",
    "compare": "compare plans by a [[plan]] for each",
}


def _check_settings(settings: Settings, rates: bool, path: Path) -> None:
    """Refuse settings that runs would not have, or that leave no results."""
    for name, why in _OWN.items():
        value = settings.get(name)
        if value is not None and value is not False:  # a seed of 0 is one
            raise ConfigError(f"{path}: {name} can't be set; {why}")
    if rates and "train.lr" in settings:
        raise ConfigError(f"{path}: train.lr beside learning_rates: leave one of them out")


def _table(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The settings of a study or a plan under dotted names."""
    found = table.get("settings", {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: settings = {found!r} is no table, as [settings]")
    return _flat(found)


def _replaced(texts: Sequence[str]) -> dict[str, Any]:
    """Settings from ``name=value``."""
    known = {entry.name: entry for entry in configuration.settings()}
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write a setting and its value, as data.path=images")
        if name not in known:
            raise ConfigError(f"--set {text}: unknown setting '{name}'{nearest(name, known)}")
        found[name] = from_text(known[name], value)
    return found


def _check_rate(text: str, path: Path) -> None:
    """Refuse a rate that times cannot be predicted at."""
    try:
        rate = parse_rate(text)
    except ValueError as error:
        raise ConfigError(f"{path}: rates: {one_line(error)}") from None
    if rate is None:
        raise ConfigError(f"{path}: rates: '{text}' is none to predict times at; write 100mbit")


def _document(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read the study {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError among them
        raise ConfigError(f"{path} is no valid TOML: {one_line(error)}") from None
    for key in document:
        if key not in _KEYS:
            raise ConfigError(f"{path}: unknown key '{key}'{nearest(key, _KEYS)}")
    return document


def _entries(document: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    entries = document.get("plan")
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(e, dict) for e in entries)
    ):
        raise ConfigError(f"{path}: a study needs plans, each under [[plan]]")
    return entries


def _plans(entry: Mapping[str, Any], seeds: int | None, path: Path) -> Iterator[Plan]:
    """The plans of a table: more than one where it has lists."""
    for key in entry:
        if key not in _PLAN_KEYS:
            raise ConfigError(f"{path}: unknown key '{key}' in a plan{nearest(key, _PLAN_KEYS)}")
    given = {f"plan.{way}": entry[way] for way in ("forward", "backward") if way in entry}
    given |= _table(entry, path)
    choices = [value if isinstance(value, list) else [value] for value in given.values()]
    if not all(choices):
        raise ConfigError(f"{path}: an empty list in a plan leaves nothing to run")
    several = any(len(choice) > 1 for choice in choices)
    if several and "name" in entry:
        raise ConfigError(f"{path}: a plan with lists is several; leave its name out")
    for chosen in itertools.product(*choices):
        values = typed_values(dict(zip(given, chosen, strict=True)), path)
        name = _text(entry, "name", _name(values), path)
        yield Plan(name, values, _seeds(entry, seeds, path))


def _added(text: str) -> Plan:
    forward, slash, backward = (part.strip() for part in text.partition(" / "))
    values = {"plan.forward": forward, "plan.backward": backward if slash else forward}
    return Plan(_name(values), values)


def _name(values: Settings) -> str:
    """What a plan is called that has no name: its schemes, and what else it sets."""
    default = configuration.Config().plan
    forward = values.get("plan.forward", default.forward)
    backward = values.get("plan.backward", default.backward)
    others = [f"{key}={v}" for key, v in values.items() if key not in _SCHEMES]
    return ", ".join([f"{forward} / {backward}", *others])


_SCHEMES = ("plan.forward", "plan.backward")


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables under dotted names."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _text(table: Mapping[str, Any], key: str, default: str, path: Path) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{path}: {key} = {value!r} is no text")
    return value


def _texts(table: Mapping[str, Any], key: str, path: Path) -> list[str]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{path}: {key} = {value!r} is no list of texts")
    return value


def _numbers(table: Mapping[str, Any], key: str, path: Path) -> list[float]:
    value = table.get(key, [])
    values = value if isinstance(value, list) else [value]
    if not all(type(one) in (int, float) and 0 < one < _LARGEST for one in values):
        raise ConfigError(f"{path}: {key}: write finite numbers above 0")
    return [float(one) for one in values]


def _seeds(table: Mapping[str, Any], given: int | None, path: Path) -> int | None:
    value = table.get("seeds") if given is None else given
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= 100:
        where = f"{path}: seeds" if given is None else "--seeds"
        raise ConfigError(f"{where} = {value!r}: a whole number from 1 to 100")
    return value
