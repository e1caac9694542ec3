"""The files of an evaluation: figures as JSON, and the model's answers line by line.

evaluations/test/scores.json      the figures, of which data, and how
                 hypotheses.txt   translations, a line for each pair
                 predictions.tsv  images with their class and the one that the model chose
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folder import write


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A file of answers, one line for each item."""

    name: str
    lines: Sequence[str]


def save_scores(folder: Path, figures: Mapping[str, Any], answers: Answers | None) -> None:
    """Write the files of an evaluation, each in one step; scores.json is the last."""
    folder.mkdir(parents=True, exist_ok=True)
    if answers is not None:
        write(folder / answers.name, "".join(f"{line}\n" for line in answers.lines))
    write(folder / "scores.json", json.dumps(dict(figures), indent=2) + "\n")


def one_line(text: str) -> str:
    """A text without line ends and tabs, so that it is one line and one cell."""
    return " ".join(text.split())
