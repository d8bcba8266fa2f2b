"""What was expected of the experiment, written down before it was run, beside what was found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.quality.cases import DIRECT, Case, delta
from benchmarks.quality.paired import against_fp32, between
from benchmarks.quality.results import Results
from thinwire.study.paired import Difference

#: Of delta: at most so much above the loss of fp32.
WITHIN = {"4/8": 0.005, "4/4": 0.005, "2/4": 0.03}
#: Of direct coding: at least so much above the loss with delta, and beyond two standard errors.
WORSE = {"4/8": 0.01, "4/4": 0.01, "3/6": 0.04, "2/4": 0.07}

Plans = Mapping[str, Sequence[Case]]


def rows(results: Results, setting: Case, plans: Plans) -> Iterator[str]:
    """Table rows for one setting: the expectation, what was found, and whether it holds."""
    for widths, most in WITHIN.items():
        plan = planned(setting, delta(DIRECT[widths]))
        found = against_fp32(results, plans.get(plan, []), "val_loss")
        if found is not None:
            yield _row(f"`{plan}` within {most:g} of fp32", found, found.mean <= most)
    for widths, least in WORSE.items():
        direct, other = planned(setting, DIRECT[widths]), planned(setting, delta(DIRECT[widths]))
        found = between(results, plans.get(direct, []), plans.get(other, []))
        if found is not None:
            claim = f"`{direct}` worse than `{other}` by {least:g} and 2 SE"
            yield _row(claim, found, found.mean >= least and found.beyond is not False)


def planned(setting: Case, plan: tuple[str, str]) -> str:
    """The name of a plan in a setting."""
    return dataclasses.replace(setting, forward=plan[0], backward=plan[1]).plan


def _row(claim: str, found: Difference, holds: bool) -> str:
    alone = ", one seed" if found.error is None else ""
    return f"| {claim} | {found} | {'holds' if holds else '**fails**'}{alone} |"
