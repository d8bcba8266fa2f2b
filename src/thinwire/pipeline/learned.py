"""What the ends of a rank's links have learned to expect: saved, compared, and learned anew.

Both ends of a link learn the same. Now and then they compare hashes of it; where they differ, both
begin anew, since a prediction that is made of nothing costs bits and no correctness.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from thinwire.counters import link_name
from thinwire.edge import EdgeEnd, LinkReceiver, LinkSender
from thinwire.pipeline.remembered import COMPARE_EVERY, place_of, unequal
from thinwire.predict import Expectations, form_of
from thinwire.schemes import scheme

_TENSOR = ("edge", "direction", "tensor")
#: By the name of a link, a hash from each of its ends that is here.
Digests = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class _Held:
    where: dict[str, Any]  # as JSON values
    link: LinkSender | LinkReceiver
    state: Expectations

    @property
    def name(self) -> str:
        return link_name(self.where["edge"], self.where["direction"])

    @property
    def tensor(self) -> str:
        """The same at both ends."""
        return f"{self.name} {self.where['tensor']}"

    @property
    def file(self) -> str:
        return _file_of(self.where)

    def read(self, file: Path) -> None:
        """Go on from a file. Raises ValueError, OSError or SafetensorError."""
        self.state.load_state_dict(load_file(file))
        shapes = {boundary.index: boundary.shape for boundary in self.link.boundaries}
        self.state.check_width(form_of(shapes[self.where["tensor"]])[2])


class Learned:
    """Of all ends of links at this rank whose scheme predicts."""

    def __init__(self, ends: Sequence[EdgeEnd]) -> None:
        links = [link for end in ends for link in (end.outgoing, end.incoming)]
        self._held = [
            _Held(place_of(link, index), link, state.learned)
            for link in links
            for index, state in link.states.items()
            if state.learned is not None
        ]
        self._steps = 0
        #: How often what was learned at the two ends of a link has differed.
        self.repairs = 0

    def digests(self) -> Digests:
        """What this rank tells the others of what it has learned."""
        found: Digests = {}
        for held in self._held:
            found.setdefault(held.tensor, []).append(f"{held.state.digest():x}")
        return found

    def report(self) -> Digests | None:
        """What it tells at the end of a step: something now and then."""
        self._steps += 1
        return self.digests() if self._held and self._steps % COMPARE_EVERY == 0 else None

    def conclude(self, found: Iterable[Digests | None]) -> bool:
        """All ranks' digests are there: where the two ends of a link differ, both begin anew.
        Whether all were equal."""
        apart = unequal([one for one in found if one])
        for held in self._held:
            if held.tensor in apart:
                held.state.forget()
                self.repairs += 1
        return not apart

    def save(self, folder: Path) -> list[dict[str, Any]]:
        """Write what was learned into ``folder``; returns what was written, as JSON."""
        written = []
        for held in self._held:
            tensors = held.state.state_dict()  # none, where nothing was learned yet
            save_file(
                {name: t.contiguous().cpu() for name, t in tensors.items()}, folder / held.file
            )
            written.append({**held.where, "scheme": str(held.link.scheme)})
        return written

    def load(self, folder: Path, written: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Go on from what ``save`` wrote; returns why some begin anew, by link."""
        anew = {}
        for held in self._held:
            held.state.forget()
            mine = [one for one in written if all(one[k] == v for k, v in held.where.items())]
            if not mine:
                anew[held.name] = "the checkpoint holds nothing"
            elif mine[0]["scheme"] != str(held.link.scheme):
                anew[held.name] = f"it was of {mine[0]['scheme']}, not of {held.link.scheme}"
            else:
                try:
                    held.read(folder / held.file)
                except (ValueError, OSError, SafetensorError) as error:
                    held.state.forget()
                    anew[held.name] = str(error)
        return anew

    def adopt(self, parts: Mapping[Path, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
        """Expect what ``save`` wrote of these links into folders, at either end; returns why some
        expect nothing, by link. For evaluation: what only learns from more is left behind."""
        without = {}
        for held in self._held:
            held.state.forget()
            tensor = {k: v for k, v in held.where.items() if k in _TENSOR}
            found = [
                (folder / _file_of(one), one["scheme"])
                for folder, written in parts.items()
                for one in written
                if all(one[k] == v for k, v in tensor.items())
            ]
            try:
                if not found:
                    raise ValueError("the checkpoint holds nothing")
                file, spec = found[0]
                if scheme(spec).evaluated() != held.link.scheme:
                    raise ValueError(f"it was of {spec}")
                held.read(file)
            except (ValueError, OSError, SafetensorError) as error:
                held.state.forget()
                without[held.name] = str(error)
        return without


def _file_of(where: Mapping[str, Any]) -> str:
    return "learned-{edge}-{direction}-{tensor}-{role}.safetensors".format(**where)


def lines(reasons: Iterable[Mapping[str, str]], what: str) -> list[str]:
    """A line for each link that expects ``what`` instead of what was saved, and why."""
    found = {name: why for one in reasons for name, why in one.items()}
    return [f"link {name} expects {what} ({why})" for name, why in sorted(found.items())]
