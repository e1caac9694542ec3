"""The figure of a study: learning curves and final figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .ledger import Record
from .study import Study
from .table import Row, best

# Okabe and Ito's colours, which are safe for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
MARKERS = "osD^vPX*"


def draw_curves(study: Study, rows: Sequence[Row], path: Path) -> Path | None:
    """Write a PNG: a line for each system with a band over its seeds, and the final figures.

    None if no run has a curve yet. The file is replaced in one step.
    """
    drawn = [(n, row) for n, row in enumerate(rows) if _curve(row)]
    if not drawn:
        return None
    plt = _pyplot()
    style = {
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
        "axes.edgecolor": "#888888", "xtick.color": "#444444", "ytick.color": "#444444",
    }  # fmt: skip
    with plt.rc_context(style):
        height = max(4.2, 0.42 * len(rows) + 1.6)
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(10, height), layout="constrained", width_ratios=(1.6, 1)
        )
        try:
            for n, row in drawn:
                # Later lines are thinner, so that a line below another still shows.
                _draw_line(left, row, *_look(n), width=3.0 - 1.8 * n / len(rows))
            _finish_lines(left, study, drawn)
            _draw_ends(right, study, rows)
            figure.suptitle(study.title or study.name, x=0.01, ha="left", fontweight="bold")
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                figure.savefig(temporary, dpi=150, format="png")
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        finally:
            plt.close(figure)
    return path


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _look(n: int) -> tuple[str, str]:
    return COLOURS[n % len(COLOURS)], MARKERS[n % len(MARKERS)]


def _curve(row: Row) -> dict[int, list[float]]:
    """step -> the metric of each seed, at the steps that all seeds have.

    A mean over other seeds at each step would rise and fall with them. Seeds without any point,
    such as those whose loss was not finite before the first one, are left out.
    """
    found = [points for record in row.records if (points := _points(record, row))]
    common = set.intersection(*map(set, found)) if found else set()
    return {step: [points[step] for points in found] for step in sorted(common)}


def _points(record: Record, row: Row) -> dict[int, float]:
    """step -> the metric of a run, where it was measured on as much as at the first point."""
    points: dict[int, float] = {}
    number: Any = None
    for entry in record.history:
        value, step = entry.get(row.metric.curve.key), entry.get("step")
        if not isinstance(value, int | float) or not isinstance(step, int | float):
            continue
        number = entry.get("eval_items") if not points else number
        if entry.get("eval_items") == number:
            points[int(step)] = value
    return points


def _draw_line(axes: Any, row: Row, colour: str, marker: str, *, width: float) -> None:
    points = _curve(row)
    steps = list(points)
    means = [sum(values) / len(values) for values in points.values()]
    axes.fill_between(
        steps, [min(v) for v in points.values()], [max(v) for v in points.values()],
        color=colour, alpha=0.18, linewidth=0,
    )  # fmt: skip
    axes.plot(
        steps,
        means,
        color=colour,
        marker=marker,
        markersize=2.5 + width,
        linewidth=width,
        label=row.variant,
    )
    if row.diverged:
        axes.plot(steps[-1], means[-1], marker="x", color=colour, markersize=9, markeredgewidth=2)


def _finish_lines(axes: Any, study: Study, drawn: Sequence[tuple[int, Row]]) -> None:
    metric = study.metric.curve
    curves = [_curve(row) for _, row in drawn]
    end = max(step for curve in curves for step in curve)
    # The first measurements are much larger and would flatten the rest.
    later = [v for curve in curves for s, values in curve.items() if s >= end / 5 for v in values]
    if later:
        low, high = min(later), max(later)
        room = 0.06 * (high - low) or 0.05
        axes.set_ylim(low - room, high + room)
    axes.set_xlabel("step")
    axes.set_ylabel(f"validation {metric.title}")
    axes.set_title(
        "mean, and band from the lowest to the highest seed, at steps that all seeds have",
        fontsize=8,
        loc="left",
    )
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper right" if metric.lower_is_better else "lower right")


def _draw_ends(axes: Any, study: Study, rows: Sequence[Row]) -> None:
    """A dot for each seed and a bar at their mean, the best system on top."""
    sign = 1 if study.metric.lower_is_better else -1
    order = sorted(
        range(len(rows)), key=lambda n: (rows[n].mean is None, sign * (rows[n].mean or 0.0))
    )
    first = best(rows)
    for place, n in enumerate(order):
        row = rows[n]
        colour, marker = _look(n)
        if row.values:
            axes.plot(
                row.values, [place] * len(row.values), marker, color=colour, markersize=6, alpha=0.7
            )
        if row.mean is not None:
            axes.plot([row.mean] * 2, [place - 0.3, place + 0.3], color=colour, linewidth=2)
            said = row.figure.strip()
        else:
            said = row.figure or "no result yet"
        axes.annotate(
            said, (1.0, place), xycoords=("axes fraction", "data"), xytext=(6, 0),
            textcoords="offset points", va="center", fontsize=8,
            fontweight="bold" if row is first else "normal",
        )  # fmt: skip
    axes.set_yticks(range(len(order)), [rows[n].variant for n in order])
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"final validation {study.metric.title}")
    better = "lower" if study.metric.lower_is_better else "higher"
    axes.set_title(f"one mark a seed, {better} is better", fontsize=8, loc="left")
