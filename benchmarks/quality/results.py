"""The result files: one line of JSON for each finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.quality.cases import Case

RESULTS = Path(__file__).parent / "results"

Results = dict[Case, dict[str, Any]]


def load(folder: Path = RESULTS) -> Results:
    """All results in ``folder`` by their case."""
    found: Results = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            result = json.loads(line)
            found[Case(**result["case"])] = result
    return found


def append(line: str, file: Path) -> None:
    """Add one result; what is cut short by an interrupt would be seen as broken JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(line + "\n")
