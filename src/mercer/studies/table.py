"""The table of a study: mean and spread over seeds, cost and speed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.markup import escape
from rich.table import Table

from .ledger import Record
from .study import Metric, Study

COSTS = ("parameters", "FLOPs/token", "tokens/s")


@dataclass(frozen=True)
class Row:
    """A variant and its records, by seed."""

    variant: str
    wanted: int
    records: tuple[Record, ...]
    metric: Metric

    @property
    def values(self) -> list[float]:
        """The final figures of the runs that converged."""
        figures = [r.metrics.get(self.metric.key) for r in self.records if r.converged]
        return [figure for figure in figures if isinstance(figure, int | float)]

    @property
    def diverged(self) -> list[Record]:
        return [record for record in self.records if not record.converged]

    @property
    def mean(self) -> float | None:
        """None if a run did not converge: the mean of the others would flatter the system."""
        return statistics.fmean(self.values) if self.values and not self.diverged else None

    @property
    def spread(self) -> float | None:
        """The sample's standard deviation over seeds."""
        return statistics.stdev(self.values) if self.mean and len(self.values) > 1 else None

    @property
    def figure(self) -> str:
        """The metric's cell in the table."""
        digits = self.metric.digits
        if self.diverged:
            if self.values:
                kept = ", ".join(f"{value:.{digits}f}" for value in self.values)
                return f"{len(self.diverged)} of {len(self.records)} not converged ({kept})"
            return self.diverged[0].status
        if self.mean is None:
            return ""
        # One run has no spread.
        if self.spread is None:
            return f"{self.mean:.{digits}f}" + " " * (digits + 5)
        return f"{self.mean:.{digits}f} ± {self.spread:.{digits}f}"

    def cell(self, metric: Metric) -> str:
        """The mean of another figure over the seeds that have it, with its spread."""
        found = [r.metrics.get(metric.key) for r in self.records if r.converged]
        values = [x for x in found if isinstance(x, int | float)]
        if not values:
            return ""
        spread = f" ± {statistics.stdev(values):.{metric.digits}f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.{metric.digits}f}{spread}"

    @property
    def costs(self) -> dict[str, str]:
        """Cost and speed; the speed is the median over seeds."""
        if not self.records:
            return dict.fromkeys(COSTS, "")
        last = self.records[-1]
        speeds = [r.tokens_per_second for r in self.records if r.tokens_per_second is not None]
        speed = shorten(statistics.median(speeds)) if speeds else ""
        return dict(
            zip(
                COSTS, (shorten(last.parameters), shorten(last.flops_per_token), speed), strict=True
            )
        )

    @property
    def seeds(self) -> str:
        return f"{len(self.records)}/{self.wanted}"


def rows(study: Study, records: Iterable[Record], seeds: Sequence[int] | None = None) -> list[Row]:
    """One row a variant, of the records that are this study's, whatever their seeds."""
    wanted = study.seeds if seeds is None else seeds
    own = [record for record in records if study.owns(record)]
    found = []
    for variant in study.variants:
        mine = sorted((r for r in own if r.variant == variant.name), key=lambda r: r.seed)
        number = len({*wanted, *(record.seed for record in mine)})
        found.append(Row(variant.name, number, tuple(mine), study.metric))
    return found


def best(found: Sequence[Row]) -> Row | None:
    """The row with the best mean; None while seeds of a row with a mean are missing."""
    known = [(row.mean, row) for row in found if row.mean is not None]
    if len(known) < 2:
        return None
    choose = min if found[0].metric.lower_is_better else max
    return choose(known, key=lambda pair: pair[0])[1]


def filled(columns: Sequence[Metric], found: Sequence[Row]) -> list[Metric]:
    """The columns in which a row has a figure: some need files that --data may not have."""
    return [metric for metric in columns if any(row.cell(metric) for row in found)]


def draw(
    found: Sequence[Row],
    active: str | None = None,
    width: int = 80,
    columns: Sequence[Metric] = (),
) -> Table:
    """The rows for a terminal of this width; the active one is marked."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("system", no_wrap=True)
    table.add_column(found[0].metric.title, justify="right", min_width=13)
    table.add_column("seeds", justify="right", no_wrap=True)
    # A narrow terminal shows no costs.
    room = width - max(len(row.variant) for row in found) - 26
    more = []
    for metric in filled(columns, found):
        cells = [metric.title, *(row.cell(metric) for row in found)]
        if (room := room - max(map(len, cells)) - 3) >= 0:
            table.add_column(metric.title, justify="right", no_wrap=True)
            more.append(metric)
    shown = []
    for title in COSTS:
        if (room := room - len(title) - 3) >= 0:
            table.add_column(title, justify="right", no_wrap=True)
            shown.append(title)
    first = best(found)
    for row in found:
        figure = row.figure
        if row.diverged:
            figure = f"[yellow]{figure}[/]"
        elif row is first:
            figure = f"[bold green]{figure}[/]"
        name = escape(row.variant)
        style = "" if row.records or row.variant == active else "dim"
        seeds = row.seeds
        if row.variant == active:
            name, seeds = f"[cyan]{name}[/]", f"[cyan]▸[/] {seeds}"
        others = (*map(row.cell, more), *(row.costs[title] for title in shown))
        table.add_row(name, figure, seeds, *others, style=style)
    return table


def as_markdown(study: Study, found: Sequence[Row]) -> str:
    """The same table, for a file."""
    more = filled(study.columns, found)
    header = ("system", study.metric.title, "seeds", *(m.title for m in more), *COSTS)
    lines = [f"# {study.title or study.name}", "", _cells(header)]
    lines.append("|---|" + "---:|" * (len(header) - 1))
    for row in found:
        cells = (row.figure.strip(), row.seeds, *map(row.cell, more), *row.costs.values())
        lines.append(_cells((row.variant, *cells)))
    budget = ", ".join(f"{name} {value}" for name, value in study.budget.items())
    return "\n".join([*lines, "", CAPTION, "", f"Budget of every system: {budget}.", ""])


CAPTION = "Mean ± standard deviation over seeds, on data that was not trained on."


def shorten(number: float) -> str:
    """Three digits and a unit: 118k, 1.32M."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.6k would round to 1e+03k.
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _cells(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
