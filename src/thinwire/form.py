"""Whether JSON values have the form in which they are written: what is read is not trusted.

A form maps names to checks: functions of a value, or forms of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
_LARGEST = 1 << 53


def fault(values: Mapping[str, Any], form: Mapping[str, Any]) -> str | None:
    """The first name, as ``a.b``, that ``values`` lacks or whose value is of another form; None
    where there is none. Names that ``form`` does not have may be there."""
    for name, check in form.items():
        if name not in values:
            return name
        value = values[name]
        if not callable(check):
            if not isinstance(value, dict):
                return name
            inner = fault(value, check)
            if inner is not None:
                return f"{name}.{inner}"
        elif not check(value):
            return name
    return None


def text(value: Any) -> bool:
    return isinstance(value, str)


def whole(value: Any) -> bool:
    """A whole number that JSON carries exactly."""
    return type(value) is int and 0 <= value < _LARGEST


def number(value: Any) -> bool:
    return type(value) in (int, float)


def optional(check: Check) -> Check:
    """None, or what ``check`` lets pass."""
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def values_of(check: Check) -> Check:
    """An object, whatever its names, with such values."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def record(form: Mapping[str, Any]) -> Check:
    """An object of this form."""
    return lambda value: isinstance(value, dict) and fault(value, form) is None
