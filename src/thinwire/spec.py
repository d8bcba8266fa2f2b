"""The grammar of codec and scheme strings, and the registry of their names.

``int4:group=64,round=stochastic``, ``topk:0.1``, ``delta(int4)``, ``delta(int2,first=int4)``

    spec   = name [ ":" option { "," option } ] [ "(" argument { "," argument } ")" ]
    option = key "=" value | flag | value
    argument = spec | key "=" spec | key "=" value

A registered class is a frozen dataclass whose fields are its options, so parsing yields a value
that compares, hashes and prints: ``str`` of it is the canonical string (defaults left out, fields
in declared order). A field with ``metadata={"positional": example}`` may be given by its value
alone, as the first option. In ``delta(int4:group=64,first=int8)`` an option belongs to the
innermost spec that knows its name.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from thinwire.errors import SpecError

Kind = Literal["codec", "scheme", "exchange"]
T = TypeVar("T")

_WORD = re.compile(r"[A-Za-z0-9_.+\-/]+")
_NAME = re.compile(r"[a-z][a-z0-9_\-]*")
_FLAGS = {"on": True, "off": False, "true": True, "false": False}
_RESERVED = ("off", "default", "as-trained")  # what the command takes beside specs
_MAX_LENGTH = 200


class Named:
    """Base of everything that a spec string can name; subclasses are frozen dataclasses."""

    @property
    def name(self) -> str:
        """The name that it is registered under."""
        for name, entry in _REGISTRY.items():
            if entry.cls is type(self) and all(
                getattr(self, k) == v for k, v in entry.preset.items()
            ):
                return name
        raise SpecError(f"{type(self).__name__} is not registered")

    def of_spec(self) -> Named:
        """What its spec string stands for: itself, unless it is only a part of that."""
        return self

    def __str__(self) -> str:
        return _canonical(self)


@functools.lru_cache(maxsize=1024)
def _canonical(value: Named) -> str:
    """The spec string of a frozen value; frames carry it, so it is asked for with each message."""
    name = value.name
    entry = _REGISTRY[name]
    nested: list[str] = []
    plain: list[str] = []
    for field in entry.options.values():
        option = getattr(value, field.name)
        if isinstance(option, Named):
            if field.required:
                nested.insert(0, str(option))
            elif option != field.default_for(value):
                nested.append(f"{field.name}={option}")
        elif field.example:
            plain.insert(0, _show(option))
        elif option != field.default_for(value):
            plain.append(field.name if option is True else f"{field.name}={_show(option)}")
    if entry.takes_specs:
        return f"{name}({','.join(nested + plain)})"
    return name + (":" + ",".join(plain) if plain else "")


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclasses.dataclass(frozen=True)
class _Option:
    """One dataclass field, read as a spec option."""

    name: str
    type: Any
    default: Any  # dataclasses.MISSING where required
    nested: bool  # the value is itself a spec
    derive: Callable[[Any], Any] | None  # a default that depends on the other options
    example: str | None  # what it looks like where it is given by its value alone

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    def default_for(self, instance: Any) -> Any:
        if self.derive is not None:
            return self.derive(instance)
        if self.nested and isinstance(self.default, str):
            return parse(self.default)
        return self.default

    def read(self, text: str, where: str) -> Any:
        """Convert ``text`` to the field's type, or raise SpecError naming the choices."""
        if self.nested:
            return parse(text)
        for kind in _alternatives(self.type):
            if kind is bool and text in _FLAGS:
                return _FLAGS[text]
            if kind in (int, float):
                try:
                    return kind(text)
                except ValueError:
                    continue
            if kind is str or (text and kind == text):
                return text
        expected = _describe(self.type)
        raise SpecError(f"{where}: {self.name}={text} is not {expected}")


def _alternatives(kind: Any) -> list[Any]:
    """The types and literal words that a field accepts, unions and Literals flattened."""
    args = typing.get_args(kind)
    return [leaf for a in args for leaf in _alternatives(a)] if args else [kind]


def _describe(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    return " or ".join(names.get(a, str(a)) for a in _alternatives(kind) if a != "")


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A registered name: its class, what the name itself fixes, and the remaining options."""

    kind: Kind
    cls: type[Named]
    preset: Mapping[str, Any]
    options: Mapping[str, _Option]
    yields: bool = False  # another name for what has one: a user's class may take it

    @property
    def takes_specs(self) -> bool:
        """Whether its arguments stand in parentheses."""
        return any(option.nested for option in self.options.values())


_REGISTRY: dict[str, _Entry] = {}
_NOTED: dict[str, list[str]] = {}


def register(
    kind: Kind, name: str, *, yields: bool = False, **preset: Any
) -> Callable[[type[T]], type[T]]:
    """Class decorator: make a frozen dataclass reachable as ``name`` in spec strings.

    ``preset`` fixes fields that the name implies (``int4`` fixes ``bits=4``). A field with
    ``metadata={"derive": f}`` has the default ``f(instance)``, to be filled in ``__post_init__``.
    A class that is defined again, as in a notebook, takes the place of the one before; any class
    does where the name was registered to yield it. Raises
    ValueError on a name that is another's or not of the form ``[a-z][a-z0-9_-]*``, and on a class
    that is no frozen dataclass or lacks a method.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no spec name: use lower-case letters, digits, '-' and '_'")
    if name in _RESERVED:
        raise ValueError(f"{name!r} stands for something else; choose another name")

    def add(cls: Any) -> Any:
        _check_class(cls, kind)
        taken = _REGISTRY[name].cls if name in _REGISTRY else cls
        if _place_of(taken) != _place_of(cls) and not _REGISTRY[name].yields:
            raise ValueError(
                f"the spec name {name!r} is taken by {taken.__qualname__} of {taken.__module__}"
            )
        hints = typing.get_type_hints(cls)
        options = {
            f.name: _Option(
                f.name,
                hints[f.name],
                f.default,
                isinstance(hints[f.name], type) and issubclass(hints[f.name], Named),
                f.metadata.get("derive"),
                f.metadata.get("positional"),
            )
            for f in dataclasses.fields(cls)
            if f.name not in preset and f.init
        }
        _REGISTRY[name] = _Entry(kind, cls, dict(preset), options, yields)
        return cls

    return add


_BASES = {
    "codec": "tw.Codec or tw.TensorCodec",
    "scheme": "tw.Scheme",
    "exchange": "thinwire.exchange.Exchange",
}


def _check_class(cls: Any, kind: Kind) -> None:
    """Raise ValueError for what cannot be named in spec strings."""
    parameters = vars(cls).get("__dataclass_params__")
    if not issubclass(cls, Named) or parameters is None or not parameters.frozen:
        raise ValueError(
            f"{cls.__name__} must be a frozen dataclass derived from {_BASES[kind]}: write "
            "@dataclasses.dataclass(frozen=True) between @tw.register… and class"
        )
    for name in dir(cls):
        if getattr(getattr(cls, name, None), "__isabstractmethod__", False):
            raise ValueError(f"{cls.__name__} has no {name}, which every {kind} needs")


def _place_of(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def names(kind: Kind | None = None) -> list[str]:
    """The registered names, sorted."""
    return sorted(n for n, e in _REGISTRY.items() if kind is None or e.kind == kind)


def names_of(module: str) -> list[str]:
    """The names of the classes that ``module`` defines, sorted."""
    return sorted(n for n, entry in _REGISTRY.items() if entry.cls.__module__ == module)


def note(cls: type, name: str) -> None:
    """A class that a plugin registers elsewhere: no spec by itself, but a part of some."""
    _NOTED.setdefault(cls.__module__, []).append(name)


def noted(module: str) -> list[str]:
    """The names of such classes that ``module`` defines."""
    return list(_NOTED.get(module, ()))


def registered() -> dict[str, object]:
    """The registered names as they are now, each with what changes when it is registered anew."""
    return dict(_REGISTRY)


def simplest(name: str) -> str:
    """The shortest spec of a registered name: required codecs are ``int8``, options as their
    examples. Raises SpecError where an option is required that has none."""
    entry = _REGISTRY[name]
    given: list[str] = []
    for option in entry.options.values():
        if not option.required:
            continue
        example = "int8" if option.nested else option.example
        if example is None:
            raise SpecError(f"{name} needs {option.name}, of which no example is known")
        bare = not given if option.nested else not entry.takes_specs
        given.append(example if bare else f"{option.name}={example}")
    if not given:
        return name
    return f"{name}({','.join(given)})" if entry.takes_specs else f"{name}:{','.join(given)}"


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest known word, else the list of known ones."""
    known = sorted(known)
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(known)}" if known else ""


def parse(text: str) -> Any:
    """Read a codec or scheme string into its frozen dataclass.

    Raises SpecError with one line: what was found, where, and the nearest match.
    """
    if not isinstance(text, str):
        raise SpecError(f"a spec is a string such as 'int4', not {type(text).__name__}")
    if len(text) > _MAX_LENGTH:
        raise SpecError(f"a spec of {len(text)} characters; at most {_MAX_LENGTH} are read")
    reader = _Reader("".join(text.split()), text)
    value = reader.spec([])
    if not reader.done:
        raise reader.error(f"unexpected {reader.rest!r}")
    return value


class _Reader:
    """Recursive descent over one spec string."""

    def __init__(self, text: str, shown: str) -> None:
        self.text, self.shown, self.at = text, shown, 0

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    @property
    def done(self) -> bool:
        return self.at == len(self.text)

    def error(self, why: str) -> SpecError:
        return SpecError(f"in spec {self.shown!r}: {why}")

    def take(self, literal: str) -> bool:
        if self.text.startswith(literal, self.at):
            self.at += len(literal)
            return True
        return False

    def word(self, what: str) -> str:
        match = _WORD.match(self.text, self.at)
        if match is None:
            found = repr(self.text[self.at]) if not self.done else "the end"
            raise self.error(f"expected {what}, found {found}")
        self.at = match.end()
        return match.group()

    def spec(self, outer: list[_Entry]) -> Any:
        """One spec; ``outer`` are the enclosing entries, innermost last."""
        name = self.word("a codec or scheme name")
        entry = _REGISTRY.get(name)
        if entry is None:
            close = nearest(name, _REGISTRY)
            own = "" if close.startswith("; did") else "; the command finds others by --plugin FILE"
            raise self.error(f"unknown codec or scheme {name!r}{close}{own}")
        values: dict[str, Any] = {}
        takes_specs = entry.takes_specs
        if self.take(":"):
            if takes_specs:
                raise self.error(f"{name} takes its arguments in parentheses, as {name}(int4)")
            self.options(name, entry, values, outer)
        if self.take("("):
            if not takes_specs:
                raise self.error(
                    f"{name} is a codec; its options follow a colon, as in int4:group=64"
                )
            self.arguments(name, entry, values, outer)
        missing = [o.name for o in entry.options.values() if o.required and o.name not in values]
        if missing:
            value = entry.options[missing[0]].example or f"{missing[0]}=…"
            example = f"{name}(int4)" if takes_specs else f"{name}:{value}"
            raise self.error(f"{name} needs {missing[0]}, as in {example}")
        try:
            return entry.cls(**entry.preset, **values).of_spec()
        except ValueError as error:
            raise self.error(str(error)) from None

    def options(
        self, name: str, entry: _Entry, values: dict[str, Any], outer: list[_Entry]
    ) -> None:
        """``key=value`` and flags, up to one that only an enclosing spec knows."""
        while True:
            start = self.at
            key = self.word(f"an option of {name}")
            bare = next((o for o in entry.options.values() if o.example), None)
            if bare is not None and not values and not self.text.startswith("=", self.at):
                values[bare.name] = bare.read(key, name)
            elif key in entry.options:
                self.option(name, entry.options[key], values)
            elif values and any(key in e.options or key in _REGISTRY for e in outer):
                self.at = start - 1  # give the comma back
                return
            else:
                known = set(entry.options)
                if values:  # then it may be meant for an enclosing spec
                    known.update(*(e.options for e in outer))
                raise self.error(f"{name} has no option {key!r}{nearest(key, known)}")
            if not self.take(","):
                return

    def option(self, name: str, option: _Option, values: dict[str, Any]) -> None:
        if option.name in values:
            raise self.error(f"{name}: {option.name} is given twice")
        if self.take("="):
            text = self.word(f"a value for {option.name}")
            try:
                values[option.name] = option.read(text, name)
            except SpecError as error:
                raise self.error(str(error)) from None
        elif option.type is bool:
            values[option.name] = True
        else:
            raise self.error(f"{name}: {option.name} needs a value, as {option.name}=…")

    def arguments(
        self, name: str, entry: _Entry, values: dict[str, Any], outer: list[_Entry]
    ) -> None:
        """The parenthesized part of a scheme: its inner spec and named arguments."""
        inner = [*outer, entry]
        while True:
            start = self.at
            key = self.word(f"an argument of {name}")
            if self.take("="):
                option = entry.options.get(key)
                if option is None:
                    raise self.error(f"{name} has no argument {key!r}{nearest(key, entry.options)}")
                if option.nested and option.name not in values:
                    values[key] = self.nested(name, option, inner)
                else:
                    self.at -= 1
                    self.option(name, option, values)
            elif key in entry.options and key not in _REGISTRY:
                self.option(name, entry.options[key], values)  # a flag
            else:
                self.at = start
                first = next(o for o in entry.options.values() if o.nested)
                if first.name in values:
                    raise self.error(f"{name} takes one inner spec, then named arguments")
                values[first.name] = self.nested(name, first, inner)
            if self.take(")"):
                return
            if not self.take(","):
                found = repr(self.text[self.at]) if not self.done else "the end"
                raise self.error(f"expected ',' or ')' in {name}(…), found {found}")

    def nested(self, name: str, option: _Option, outer: list[_Entry]) -> Any:
        value = self.spec(outer)
        if not isinstance(value, option.type):
            kind = option.type.__name__.lower()
            raise self.error(f"{name} takes a {kind} as {option.name}, which {value} is not")
        return value
