"""How it is shown what a codec or scheme keeps to."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.contract.requirement import Result
from thinwire.contract.suite import Report
from thinwire.train.words import counted, printable

_STYLES = {"passed": "green", "failed": "bold red", "not applicable": "dim"}


def show(screen: Console, report: Report) -> None:
    """A row for each requirement, then a line that counts them."""
    table = Table(
        title=f"{report.kind} {report.spec}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("requirement", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("what was found", overflow="fold")
    for result in report.results:
        table.add_row(
            result.requirement,
            f"[{_STYLES[result.status]}]{result.status}[/]",
            printable(_found(result)).replace("[", r"\["),
        )
    screen.print(table)
    screen.print(f"{summary(report)}\n", soft_wrap=True, markup=False)


def _found(result: Result) -> str:
    if result.status != "failed":
        return result.note or ""
    given = f"{result.given}: " if result.given else ""
    return f"{given}{result.found}; expected: {result.expected}"


def summary(report: Report) -> str:
    """How many requirements hold, on one line."""
    failed, total = len(report.failed), len(report.results)
    left_out = sum(result.status == "not applicable" for result in report.results)
    held = total - failed - left_out
    return (
        f"{report.spec}: {counted(total, 'requirement')}: {held} passed, {failed} failed, "
        f"{left_out} not applicable"
    )


def document(reports: Sequence[Report]) -> dict[str, Any]:
    """All of it as JSON values; see docs/plugins.md."""
    return {
        "ok": not any(report.failed for report in reports),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "checked": [
            {
                "spec": report.spec,
                "kind": report.kind,
                "ok": not report.failed,
                "requirements": [dataclasses.asdict(result) for result in report.results],
            }
            for report in reports
        ],
    }


def complaint(reports: Sequence[Report]) -> str | None:
    """One line on what fails; None if nothing does."""
    wrong = [
        f"{report.spec} fails {', '.join(report.failed)}" for report in reports if report.failed
    ]
    return "; ".join(wrong) or None
