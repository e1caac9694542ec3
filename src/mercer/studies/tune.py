"""Equal tuning: every variant gets the same grid, on one seed, before the study itself runs.

Each point of the grid is a study of its own, with all variants, in the folder `tuning/`. The best
point of each variant, by the study's metric on validation data, goes on to all seeds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .ledger import Ledger
from .study import Study
from .table import rows

# Settings of one point of the grid, such as {"learning_rate": 0.001}.
Point = Mapping[str, Any]


def points(study: Study) -> list[tuple[Point, Study]]:
    """Every point of the grid, with the study that tries it."""
    names = list(study.tune)
    found: list[tuple[Point, Study]] = []
    for values in itertools.product(*study.tune.values()):
        point = dict(zip(names, values, strict=True))
        budget = {**study.budget, **study.tune_budget, **point}
        trial = replace(
            study, name=slug(point), title=f"{study.title or study.name}: tuning {say(point)}",
            budget=budget, seeds=tuple(study.seeds)[:1], tune={}, tune_budget={}, paper=None,
            remark="", next_steps=(),
        )  # fmt: skip
        found.append((point, trial))
    return found


def choose(study: Study, folder: Path) -> dict[str, Point] | None:
    """The best point of each variant; None while a trial is missing."""
    best: dict[str, tuple[float, Point]] = {}
    sign = 1.0 if study.metric.lower_is_better else -1.0
    for point, trial in points(study):
        records = Ledger(folder / "tuning" / trial.name).read().values()
        for row in rows(trial, records):
            if len(row.records) < row.wanted:
                return None
            # What did not converge is chosen only if nothing did.
            value = float("inf") if row.mean is None else sign * row.mean
            if row.variant not in best or value < best[row.variant][0]:
                best[row.variant] = value, point
    return {name: point for name, (_, point) in best.items()}


def tune(study: Study, folder: Path, run: Callable[[Study, Path], bool]) -> Study | None:
    """The study with what each variant was tuned to; None if it was stopped or trials are missing.

    `run` runs a trial's study in a folder, and says whether to go on.
    """
    if not study.tune:
        return study
    if (found := choose(study, folder)) is None:
        for _, trial in points(study):
            if not run(trial, folder / "tuning" / trial.name):
                return None
        found = choose(study, folder)
    return None if found is None else replace(study, chosen=found)


def slug(point: Point) -> str:
    """A point as the name of a folder."""
    return "-".join(re.sub(r"[^\w.+-]+", "_", f"{name}-{x}") for name, x in point.items())


def say(point: Point) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in point.items())


def say_chosen(study: Study) -> str:
    """What each variant was tuned to, in one sentence; "" without tuning."""
    if not study.chosen:
        return ""
    grid = "; ".join(
        f"{n.replace('_', ' ')} {', '.join(map(str, v))}" for n, v in study.tune.items()
    )
    chosen = "; ".join(f"{name} {say(point)}" for name, point in study.chosen.items())
    return f"Tuned with seed {study.seeds[0]}, the same grid for all ({grid}): {chosen}."
