"""A paper's table as data, beside our runs: figures, claims, and how well the orders agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .claims import LEAST, Interval, bootstrap, judge, kendall, paired
from .table import Row


@dataclass(frozen=True)
class Claim:
    """What a paper says of one or two variants.

    `Claim(text, a, b)`: a is better than b. With a margin: they are alike within it, in units of
    our metric. `Claim(text, a)`: a does not converge.
    """

    text: str
    first: str
    second: str | None = None
    margin: float | None = None

    def __post_init__(self) -> None:
        if self.margin is not None and (self.second is None or not self.margin > 0):
            raise ValueError(
                f"a margin must be above 0 and needs two variants, got {self.margin!r} in the "
                f"claim {self.text!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Figures of a paper by variant; None: the paper says that it does not converge."""

    source: str
    data: str
    metric: str
    figures: Mapping[str, float | None]
    claims: Sequence[Claim] = ()

    def check(self, names: Sequence[str]) -> None:
        """Raise ValueError for a variant that the study does not have."""
        told = [*self.figures, *(n for c in self.claims for n in (c.first, c.second) if n)]
        for name in told:
            if name not in names:
                raise ValueError(
                    f"the paper's table has {name!r}, but the study has only {', '.join(names)}"
                )


@dataclass(frozen=True)
class Verdict:
    """A claim, what our runs say of it, and why."""

    claim: Claim
    said: str
    interval: Interval | None = None

    def __str__(self) -> str:
        why = "" if self.interval is None else f": {self.interval}"
        return f"{self.said}{why}"


@dataclass(frozen=True)
class Comparison:
    """Our runs beside a paper's table."""

    paper: Paper
    verdicts: tuple[Verdict, ...]
    # Kendall's tau of the two orders, over so many variants.
    tau: float | None
    count: int

    @property
    def order(self) -> str:
        if self.tau is None:
            return "The orders cannot be compared yet."
        return f"Kendall's tau of our order and the paper's is {self.tau:.2f}, {self.count} rows."


def compare(paper: Paper, found: Sequence[Row]) -> Comparison:
    """Judge each claim by the rule of claims.py; a run that did not converge ranks last."""
    rows = {row.variant: row for row in found}
    lower = found[0].metric.lower_is_better
    verdicts = tuple(_judge(claim, rows, lower) for claim in paper.claims)
    ours, theirs = [], []
    sign = -1.0 if lower else 1.0
    for name, figure in paper.figures.items():
        row = rows[name]
        if row.mean is None and not row.diverged:
            continue
        ours.append(-math.inf if row.mean is None else sign * row.mean)
        theirs.append(-math.inf if figure is None else sign * figure)
    return Comparison(paper, verdicts, kendall(ours, theirs), len(ours))


def _judge(claim: Claim, rows: Mapping[str, Row], lower: bool) -> Verdict:
    first = rows[claim.first]
    if claim.second is None:
        if not first.records:
            return Verdict(claim, "no run yet")
        count = f"{len(first.diverged)} of {len(first.records)} runs did not converge"
        all_did = len(first.diverged) == len(first.records)
        said = "supported" if all_did else "undecided" if first.diverged else "contradicted"
        return Verdict(claim, f"{said}: {count}")
    second = rows[claim.second]
    for row in (first, second):
        if row.diverged:
            return Verdict(claim, f"undecided: {row.variant} did not converge")
    found = bootstrap(paired(_by_seed(first), _by_seed(second), lower))
    if found is None:
        return Verdict(claim, f"undecided: it takes {LEAST} seeds that both have")
    return Verdict(claim, judge(found, claim.margin), found)


def _by_seed(row: Row) -> dict[int, float]:
    found = {record.seed: record.metrics.get(row.metric.key) for record in row.records}
    return {seed: x for seed, x in found.items() if isinstance(x, int | float)}


def beside(paper: Paper | None, found: Sequence[Row]) -> str:
    """The part of table.md about a paper: figures side by side, then the claims."""
    if paper is None:
        return ""
    comparison = compare(paper, found)
    rows = {row.variant: row for row in found}
    ours = found[0].metric.title
    lines = [
        f"## Beside {paper.source}", "",
        f"| | ours, {ours} | the paper, {paper.metric} |", "|---|---:|---:|",
    ]  # fmt: skip
    for name, figure in paper.figures.items():
        theirs = "not converged" if figure is None else f"{figure:g}"
        lines.append(f"| {name} | {rows[name].figure.strip()} | {theirs} |")
    lines += ["", f"The paper's figures are of {paper.data}. {comparison.order}", ""]
    if comparison.verdicts:
        lines += ["| the paper's claim | our runs: difference, 95 % interval |", "|---|---|"]
        lines += [f"| {v.claim.text} | {v} |" for v in comparison.verdicts]
        lines += ["", RULE, ""]
    return "\n".join(["", *lines])


RULE = (
    "A difference is positive if the first variant is better. A claim is supported or contradicted "
    "if the whole 95 % bootstrap interval of the mean paired difference over seeds says so, and "
    "undecided otherwise."
)
