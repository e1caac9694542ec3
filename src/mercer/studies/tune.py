"""Equal tuning: every variant gets the same grid, on one seed, before the study itself runs.

Each point of the grid is a study of its own, with all variants, in the folder `tuning/`. The best
point of each variant, by the study's metric on validation data, goes on to all seeds.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ledger import TUNING, Ledger, Record, claim
from .study import Study
from .table import rows

if TYPE_CHECKING:
    from .conduct import Outcome

WAIT = 0.5
# Settings of one point of the grid, such as {"learning_rate": 0.001}.
Point = Mapping[str, Any]


def points(study: Study) -> list[tuple[Point, Study]]:
    """Every point of the grid, with the study that tries it; none without a grid."""
    names = list(study.tune)
    if not names:
        return []
    found: list[tuple[Point, Study]] = []
    for values in itertools.product(*study.tune.values()):
        point = dict(zip(names, values, strict=True))
        budget = {**study.budget, **study.tune_budget, **point}
        trial = replace(
            study, name=slug(point), title=f"{study.title or study.name}: tuning {say(point)}",
            budget=budget, seeds=tuple(study.seeds)[:1], tune={}, tune_budget={}, paper=None,
            # By validation, also where the study's own metric is of test data.
            main=study.metric.curve, measure=None, columns=(), analyse=None,
            remark="", next_steps=(),
        )  # fmt: skip
        found.append((point, trial))
    return found


def places(study: Study, folder: Path) -> list[Path]:
    """The folders of the study and of its trials."""
    return [folder, *(folder / TUNING / trial.name for _, trial in points(study))]


def records(study: Study, folder: Path) -> list[Record]:
    """All results in these folders."""
    return [r for place in places(study, folder) for r in Ledger(place).read().values()]


def choose(study: Study, folder: Path) -> dict[str, Point] | None:
    """The best point of each variant; None while a trial is missing."""
    best: dict[str, tuple[float, Point]] = {}
    for point, trial in points(study):
        sign = 1.0 if trial.metric.lower_is_better else -1.0
        for row in rows(trial, Ledger(folder / TUNING / trial.name).read().values()):
            if len(row.records) < row.wanted:
                return None
            # What did not converge is chosen only if nothing did.
            value = float("inf") if row.mean is None else sign * row.mean
            if row.variant not in best or value < best[row.variant][0]:
                best[row.variant] = value, point
    return {name: point for name, (_, point) in best.items()}


def tune(study: Study, folder: Path, run: Callable[[Study, Path], Outcome]) -> Study | None:
    """The study with what each variant was tuned to; None if it was stopped or trials are missing.

    `run` runs a trial's study in a folder. Trials that other processes run are waited for.
    """
    if not study.tune:
        return study
    while (found := choose(study, folder)) is None:
        busy: list[Path] = []
        for _, trial in points(study):
            place = folder / TUNING / trial.name
            outcome = run(trial, place)
            if outcome.interrupted:
                return None
            busy += [place / "jobs" / job.name for job in outcome.elsewhere]
        if not busy and choose(study, folder) is None:
            return None
        # A trial whose process died is free again, and runs here.
        while choose(study, folder) is None and not any(map(_is_free, busy)):
            time.sleep(WAIT)
    return replace(study, chosen=found)


def _is_free(place: Path) -> bool:
    with claim(place) as ours:
        return ours


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
