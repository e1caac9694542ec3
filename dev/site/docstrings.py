"""Docstrings as Markdown: formulas such as <q, k> are text, and a module's blocks are code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from pages import CODE, escape, outside

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")


class Formulas(griffe.Extension):
    """Escapes what Python-Markdown would take for tags."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_formulas(obj.docstring.value)


def with_formulas(text: str) -> str:
    """A line that is indented is code, and stays as it is, unless it belongs to a section."""
    lines, in_section = [], False
    for line in text.split("\n"):
        if line[:1].strip():
            in_section = SECTION.match(line) is not None
        is_code = line.startswith("    ") and not in_section
        lines.append(line if is_code else outside(CODE, line, escape))
    return "\n".join(lines)
