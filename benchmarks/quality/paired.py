"""Which runs are compared with which, seed by seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.quality.cases import Case
from benchmarks.quality.results import Results
from thinwire.study.paired import Difference


def against_fp32(results: Results, cases: Sequence[Case], loss: str) -> Difference | None:
    """``loss`` of ``cases`` less that of fp32, seed by seed; None where there is no pair.

    fp32 gives the same bits in any number of stages, so that of two serves all.
    """
    pairs = [(case, baseline(case)) for case in cases]
    return _paired(results, pairs, loss)


def between(results: Results, worse: Sequence[Case], better: Sequence[Case]) -> Difference | None:
    """``val_loss`` of ``worse`` less that of ``better``, over the seeds that both have."""
    by_seed = {case.seed: case for case in better}
    pairs = [(case, by_seed[case.seed]) for case in worse if case.seed in by_seed]
    return _paired(results, pairs, "val_loss")


def baseline(case: Case) -> Case:
    """The fp32 run that ``case`` is compared with."""
    return dataclasses.replace(case, forward="raw", backward="raw", ulp=False, stages=2)


def _paired(results: Results, pairs: list[tuple[Case, Case]], loss: str) -> Difference | None:
    values = tuple(
        results[one][loss] - results[other][loss]
        for one, other in pairs
        if loss in results.get(one, {}) and loss in results.get(other, {})
    )
    return Difference(values) if values else None
