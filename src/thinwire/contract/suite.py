"""All that is asked of a codec and of a scheme, and what came of it for one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

from thinwire import spec
from thinwire.codecs import Codec
from thinwire.contract import codec_bytes, codec_values, scheme_ends, scheme_state, training
from thinwire.contract.requirement import NotApplicable, Requirement, Result, try_out
from thinwire.schemes import Scheme

OF_CODECS: tuple[Requirement[Codec], ...] = (
    *codec_values.REQUIREMENTS,
    *codec_bytes.REQUIREMENTS,
    training.delta,
    training.of_codec,
)
OF_SCHEMES: tuple[Requirement[Scheme], ...] = (
    *scheme_ends.REQUIREMENTS,
    *scheme_state.REQUIREMENTS,
    training.of_scheme,
)


@dataclasses.dataclass(frozen=True)
class Report:
    """What came of all requirements of one codec or scheme."""

    spec: str
    kind: str
    results: tuple[Result, ...]

    @property
    def failed(self) -> list[str]:
        """The names of the requirements that do not hold."""
        return [result.requirement for result in self.results if result.status == "failed"]


def requirements_of(value: Codec | Scheme) -> tuple[Requirement[Any], ...]:
    """What is asked of a codec, or of a scheme."""
    if not isinstance(value, Codec):
        return OF_SCHEMES
    return OF_CODECS if value.alone else tuple(map(_left_out, OF_CODECS))


def _left_out(one: Requirement[Codec]) -> Requirement[Codec]:
    """The same for a codec that needs more than its payload, unless it asks for no payload."""

    def why(codec: Codec) -> NoReturn:
        raise NotApplicable("it codes no tensor by itself: it needs another link's frames")

    return one if one is codec_values.spec else Requirement(one.name, one.says, why)


def examine(text: str, progress: Callable[[str], None] = lambda requirement: None) -> Report:
    """Try all requirements on what a spec string names; ``progress`` is told which is next.

    Raises SpecError on a string that cannot be read.
    """
    value: Codec | Scheme = spec.parse(text)
    results = []
    for one in requirements_of(value):
        progress(one.name)
        results.append(try_out(one, value))
    return Report(text, "codec" if isinstance(value, Codec) else "scheme", tuple(results))
