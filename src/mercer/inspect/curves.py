"""How a training went: losses, rates and bandwidths over steps, from the journal of its run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..storage.journal import read_journal
from .records import Records

# What a journal counts, which is no curve.
COUNTS = {"step", "tokens", "seconds", "eval_tokens", "eval_items", "steps", "steps_before"}
# The unit of each curve; "" for plain numbers.
UNITS = {
    "loss": "nats per token", "eval_loss": "nats per token", "unigram_loss": "nats per token",
    "bits_per_byte": "bits per byte", "learning_rate": "", "grad_norm": "",
    "tokens_per_second": "tokens per second", "accuracy": "share", "bleu": "BLEU",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One number over the steps of a run.

    Attributes:
        name: as in metrics.jsonl; a bandwidth is "bandwidth LAYER HEAD".
        unit: of its values; empty for plain numbers.
        steps, values: of equal length, in order.
    """

    name: str
    unit: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


class Curves(Records[Curve]):
    """A row for each number that the run has logged."""

    def find(self, name: str) -> Curve | None:
        """The curve of this name."""
        return next((curve for curve in self if curve.name == name), None)

    def plot(self, axes: Any = None, *, names: Iterable[str] = ("loss", "eval_loss")) -> Any:
        """Some of the curves, on matplotlib's axes."""
        from .plots import plot_curves

        return plot_curves(self, axes, names=names)


def curves(run: str | os.PathLike[str] | Iterable[Mapping[str, Any]]) -> Curves:
    """The curves of a run: its folder, or the records of its journal."""
    if isinstance(run, str | os.PathLike):
        folder = Path(run)
        if not (folder / "metrics.jsonl").is_file():
            raise ValueError(f"{folder} has no metrics.jsonl: give the folder of a run")
        run = read_journal(folder)
    points: dict[str, dict[int, float]] = {}
    for record in run:
        step = record.get("step")
        if not isinstance(step, int):
            continue
        for name, value in _numbers(record):
            points.setdefault(name, {})[step] = value
    found = []
    for name, each in points.items():
        steps = tuple(sorted(each))
        unit = "" if name.startswith("bandwidth ") else UNITS.get(name, "")
        found.append(Curve(name=name, unit=unit, steps=steps, values=tuple(each[n] for n in steps)))
    return Curves(tuple(found))


def _numbers(record: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for name, value in record.items():
        if name == "bandwidths" and isinstance(value, Mapping):
            for layer, each in value.items():
                for head, s in enumerate(each if isinstance(each, list) else ()):
                    if _finite(s):
                        yield f"bandwidth {layer} {head}", float(s)
        elif name not in COUNTS and _finite(value):
            yield name, float(value)


def _finite(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
