"""The figure of a study: final figures beside a paper's, and learning curves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .claims import bootstrap
from .ledger import Record
from .study import Study
from .table import Row, best

# Okabe and Ito's colours, which are safe for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
MARKERS = "osD^vPX*"
# Of rows beyond that many colours.
REST = ("#A6A6A6", "o")
# Inches for each row, few or many, and at most for a panel of curves.
PITCH, NARROW, PANEL = 0.42, 0.25, 3.6
FEW = 16


def draw_curves(study: Study, rows: Sequence[Row], path: Path) -> Path | None:
    """Write a PNG, and an SVG beside it: final figures with intervals, and learning curves.

    None if no run has a curve yet. Each file is replaced in one step.
    """
    drawn = [(n, row) for n, row in enumerate(rows) if _curve(row)]
    if not drawn:
        return None
    plt = _pyplot()
    style = {
        "font.size": 9, "axes.spines.right": False, "svg.hashsalt": "mercer",
        "axes.edgecolor": "#888888", "xtick.color": "#444444", "ytick.color": "#444444",
    }  # fmt: skip
    timed = any(_curve(row, "seconds") for _, row in drawn)
    with plt.rc_context(style):
        height = max(4.2, (PITCH if len(rows) <= FEW else NARROW) * len(rows) + 1.6)
        figure = plt.figure(figsize=(10, height), layout="constrained")
        panel = min(PANEL, height / (1 + timed))
        heights = [panel, *([panel] if timed else []), max(0.01, height - (1 + timed) * panel)]
        grid = figure.add_gridspec(len(heights), 2, width_ratios=(1.35, 1), height_ratios=heights)
        looks = _choose_looks(study, rows)
        try:
            _draw_ends(figure.add_subplot(grid[:, 0]), study, rows, looks)
            for place, axis in enumerate(("step", "seconds") if timed else ("step",)):
                axes = figure.add_subplot(grid[place, 1])
                # Those without a colour of their own are behind the others.
                for n, row in sorted(drawn, key=lambda pair: looks[pair[0]] != REST):
                    # Later lines are thinner, so that a line below another still shows.
                    width = 0.6 if looks[n] == REST else 2.4 - 1.4 * n / len(rows)
                    _draw_line(axes, row, axis, *looks[n], width=width)
                _finish_lines(axes, study, drawn, axis)
            figure.suptitle(study.title or study.name, x=0.01, ha="left", fontweight="bold")
            for kind in ("png", "svg"):
                _save(figure, path.with_suffix(f".{kind}"), kind)
        finally:
            plt.close(figure)
    return path


def _save(figure: Any, path: Path, kind: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # Without the date, equal figures are equal files.
    metadata = {"Date": None} if kind == "svg" else None
    try:
        figure.savefig(temporary, dpi=150, format=kind, metadata=metadata)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _choose_looks(study: Study, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """A colour and a marker for each row; of many rows for the first one and the best."""
    sign = 1 if study.metric.lower_is_better else -1
    order = sorted(
        range(1, len(rows)), key=lambda n: (rows[n].mean is None, sign * (rows[n].mean or 0.0))
    )
    # Without the last, which is grey, where the rest is grey.
    number = len(COLOURS) - (len(rows) > len(COLOURS))
    chosen = sorted([0, *order[: number - 1]])
    found = [REST] * len(rows)
    for place, n in enumerate(chosen):
        found[n] = COLOURS[place], MARKERS[place]
    return found


def _curve(row: Row, axis: str = "step") -> dict[float, list[float]]:
    """step, or mean seconds -> the metric of each seed, at the steps that all seeds have.

    A mean over other seeds at each step would rise and fall with them. Seeds without any point,
    such as those whose loss was not finite before the first one, are left out.
    """
    found = [points for record in row.records if (points := _points(record, row, axis))]
    common = set.intersection(*map(set, found)) if found else set()
    curve: dict[float, list[float]] = {}
    for step in sorted(common):
        places, values = zip(*(points[step] for points in found), strict=True)
        curve[sum(places) / len(places)] = list(values)
    return curve


def _points(record: Record, row: Row, axis: str) -> dict[int, tuple[float, float]]:
    """step -> place and metric of a run, where it was measured on as much as at the first point."""
    points: dict[int, tuple[float, float]] = {}
    number: Any = None
    for entry in record.history:
        value, step, at = entry.get(row.metric.curve.key), entry.get("step"), entry.get(axis)
        numbers = [x for x in (value, step, at) if isinstance(x, int | float)]
        if len(numbers) < 3:
            continue
        number = entry.get("eval_items") if not points else number
        if entry.get("eval_items") == number:
            points[int(numbers[1])] = numbers[2], numbers[0]
    return points


def _draw_line(axes: Any, row: Row, axis: str, colour: str, marker: str, *, width: float) -> None:
    points = _curve(row, axis)
    places = list(points)
    means = [sum(values) / len(values) for values in points.values()]
    bands = colour != REST[0]
    axes.fill_between(
        places, [min(v) for v in points.values()], [max(v) for v in points.values()],
        color=colour, alpha=0.14 if bands else 0.0, linewidth=0,
    )  # fmt: skip
    axes.plot(
        places, means, color=colour, marker=marker if bands else "", markersize=2 + width,
        linewidth=width,
        label=row.variant,
    )  # fmt: skip
    if row.diverged and places:
        axes.plot(places[-1], means[-1], marker="x", color=colour, markersize=8, markeredgewidth=2)


def _finish_lines(axes: Any, study: Study, drawn: Sequence[tuple[int, Row]], axis: str) -> None:
    metric = study.metric.curve
    curves = [_curve(row, axis) for _, row in drawn]
    end = max((at for curve in curves for at in curve), default=1.0)
    # The first measurements are much larger and would flatten the rest.
    later = [v for curve in curves for s, values in curve.items() if s >= end / 5 for v in values]
    if later:
        low, high = min(later), max(later)
        room = 0.06 * (high - low) or 0.05
        axes.set_ylim(low - room, high + room)
    axes.set_xlabel("step" if axis == "step" else "seconds of steps")
    axes.set_ylabel(f"validation {metric.title}")
    axes.spines.top.set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title("mean, and band over seeds", fontsize=8, loc="left")


def _draw_ends(
    axes: Any, study: Study, rows: Sequence[Row], looks: Sequence[tuple[str, str]]
) -> None:
    """Each system: its seeds, the mean with its interval, and the paper's figure."""
    sign = 1 if study.metric.lower_is_better else -1
    order = list(range(len(rows)))
    if study.paper is None:
        # The best on top; a paper's table keeps its order.
        order.sort(key=lambda n: (rows[n].mean is None, sign * (rows[n].mean or 0.0)))
    first = best(rows)
    for place, n in enumerate(order):
        row = rows[n]
        colour, marker = looks[n]
        if row.values:
            axes.plot(
                row.values, [place] * len(row.values), marker, color=colour, markersize=5, alpha=0.6
            )
        if row.mean is not None:
            axes.plot([row.mean] * 2, [place - 0.3, place + 0.3], color=colour, linewidth=2)
            if (interval := bootstrap(row.values)) is not None:
                axes.plot([interval.low, interval.high], [place] * 2, color=colour, linewidth=5,
                          alpha=0.35, solid_capstyle="butt")  # fmt: skip
            said = row.figure.strip()
        else:
            said = row.figure or "no result yet"
        axes.annotate(
            said, (1.0, place), xycoords=("axes fraction", "data"), xytext=(6, 0),
            textcoords="offset points", va="center", fontsize=8,
            fontweight="bold" if row is first else "normal",
        )  # fmt: skip
    axes.set_yticks(range(len(order)), [rows[n].variant for n in order])
    for label, n in zip(axes.get_yticklabels(), order, strict=True):
        # The colours of the curves: no legend is needed.
        # Grey would be too pale to read.
        label.set_color("#555555" if looks[n] == REST else looks[n][0])
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    better = "lower" if study.metric.lower_is_better else "higher"
    axes.set_xlabel(
        f"{study.metric.title}, {better} is better: a mark for each seed, the mean, "
        "its 95 % interval",
        fontsize=8,
    )
    _draw_paper(axes, study, rows, order)


def _draw_paper(axes: Any, study: Study, rows: Sequence[Row], order: Sequence[int]) -> None:
    """The paper's figures as hollow marks, on an axis of their own: their data are others."""
    figures = {} if study.paper is None else study.paper.figures
    known = [
        (figures[rows[n].variant], place)
        for place, n in enumerate(order) if figures.get(rows[n].variant) is not None
    ]  # fmt: skip
    if study.paper is None or not known:
        axes.spines.top.set_visible(False)
        return
    top = axes.twiny()
    top.spines.right.set_visible(False)
    top.plot(*zip(*known, strict=True), "D", markerfacecolor="none", color="#444444", markersize=7)
    top.margins(x=0.12)
    top.set_xlabel(f"◇ the paper's {study.paper.metric} on {study.paper.data}", fontsize=8)
