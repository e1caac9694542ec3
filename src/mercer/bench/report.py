"""The rows of a run as JSON and Markdown, rewritten after every row."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..dispatch.rules import Rule, family
from .machine import describe, device_name, slug
from .measure import Row
from .settings import Settings
from .tune import Finding, as_markdown

FOLDER = Path("results") / "bench"
HEADER = ("", "forward ms", "forward+backward ms", "TFLOP/s", "memory MiB", "of SDPA's speed")
CONVENTION = (
    "Pairs of numbers are forward / forward+backward. TFLOP/s count the operations of softmax "
    "attention on the same shape and filter, visible pairs only: 4 D a pair forward, 2.5 times "
    "that backward. Memory is the peak beyond the inputs. The last column is the time of the "
    "fastest SDPA softmax of the run divided by the row's time."
)


@dataclass
class Report:
    """A run: its settings, its machine, and its rows so far."""

    settings: Settings
    skipped: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    complete: bool = False
    findings: list[Finding] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = describe(self.settings.device)

    @property
    def stem(self) -> Path:
        """The path of the files, without suffix."""
        if self.settings.output is not None:
            return self.settings.output
        name = f"{slug(device_name(self.settings.device))}-{self.settings.dtype}"
        return FOLDER / (name + self.settings.suffix)

    def make_folder(self) -> None:
        """Raise ValueError before measuring if files cannot be written."""
        try:
            self.stem.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.stem.parent).close()
        except OSError as error:
            raise ValueError(
                f"cannot write to {self.stem.parent}: {error.strerror or error}"
            ) from None

    def save(self) -> list[Path]:
        """Write both files, each in one step: a reader never sees half of one."""
        texts = {".json": self.as_json() + "\n", ".md": self.as_markdown()}
        return [write(self.stem.with_name(self.stem.name + end), t) for end, t in texts.items()]

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2, allow_nan=False)

    def as_dict(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "command": settings.command,
            **self.machine,
            "dtype": settings.dtype,
            "filter": settings.filter,
            "decode": settings.decode,
            "complete": self.complete,
            "convention": CONVENTION,
            "skipped": self.skipped,
            "rows": [asdict(row) for row in self.rows],
            **(self._tuned() if settings.tune else {}),
        }

    def _tuned(self) -> dict[str, Any]:
        entries = [
            {**rule.conditions, "backends": rule.backends, "because": rule.because}
            for rule in self.rules
        ]
        fastest = [asdict(finding) for finding in self.findings]
        return {"fastest": fastest, "rules": {family(self.settings.device): entries}}

    def as_markdown(self) -> str:
        versions = self.machine["versions"]
        assert isinstance(versions, dict)
        where = [str(self.machine["device"]), f"{self.machine['threads']} threads"]
        where += [f"{name} {version}" for name, version in versions.items() if version]
        where += [self.settings.dtype, self.settings.filter]
        where += [f"commit {self.machine['commit']}", str(self.machine["date"])]
        lines = [f"`{self.settings.command}`", "", ", ".join(where)]
        if not self.complete:
            lines += ["", "The run was not finished."]
        for shape in dict.fromkeys(row.shape for row in self.rows):
            what = "keys, one query" if self.settings.decode else "BxHxTxD"
            lines += ["", f"## {shape} ({what})", "", _cells(HEADER), "|" + "---|" * len(HEADER)]
            for row in self.rows:
                if row.shape == shape:
                    figures = (row.problem, "", "", "", "") if row.problem else cells(row)
                    lines.append(_cells((row.label, *(text or "" for text in figures))))
        if self.findings:
            lines += ["", "## The fastest backends", "", *as_markdown(self.findings)]
        lines += ["", CONVENTION]
        if self.skipped:
            reasons = "; ".join(f"{name} ({why})" for name, why in self.skipped.items())
            lines += ["", f"Skipped: {reasons}."]
        return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> Path:
    """Replace a file by a new one, in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """The figures of a row, as text."""
    memory = None if row.memory_bytes is None else row.memory_bytes / 2**20
    return (
        figure(row.forward_ms),
        figure(row.forward_backward_ms),
        _pair(row.forward_tflops, row.forward_backward_tflops),
        figure(memory),
        _pair(row.forward_of_sdpa, row.forward_backward_of_sdpa),
    )


def figure(x: float | None) -> str:
    """About three digits, and no exponent."""
    if x is None:
        return "-"
    return f"{x:.{next((n for n, size in enumerate((100, 10, 0.1)) if x >= size), 3)}f}"


def _pair(first: float | None, second: float | None) -> str:
    return figure(first) if second is None else f"{figure(first)} / {figure(second)}"


def _cells(texts: tuple[str, ...]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
