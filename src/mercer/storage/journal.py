"""The journal of a run: metrics.jsonl, a line for each log and each evaluation."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one that cannot be read, such as a torn one, is left out."""
    path = folder / "metrics.jsonl"
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [r for r in found if isinstance(r, dict) and type(r.get("step")) is int]
