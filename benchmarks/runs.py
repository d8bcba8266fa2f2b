"""One `thinwire train` as a process of its own: what it says of itself, for the other scripts."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def train(words: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, the records of its steps) of a run with these options, in a folder of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = [sys.executable, "-m", "thinwire", "train", "--json", *words, "--out", str(out)]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        steps = [record for record in records if "step_ms" in record]
    return json.loads(found.stdout), steps


def where_and_when(words: list[str], summary: dict[str, Any]) -> dict[str, Any]:
    """What a committed result says of how it came about."""
    return {
        "command": "thinwire train " + " ".join(words),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": summary["versions"],
    }
