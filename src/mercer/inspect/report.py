"""All tables of one model, as a page or a program reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .curves import Curves
from .heads import Heads
from .largest import LargestRows
from .positions import DistanceWeights
from .queries import Spreads
from .style import Distances, Features, distances
from .tokens import TagSummaries, Tokens


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was read of a model; a part that it does not have is None or empty.

    Attributes:
        title: the name of the model.
        facts: names and values about it, as text.
        notes: sentences about what is missing, and why.
        words: the text of each id.
        ids: of the text that was read.
        context: how many tokens the model saw at a time.
        unit: what heads look at, "tokens" or the "patches" of images.
        first: the name of the first of these.
        rows: of tokens in the first `context` tokens.
        corpus: the published corpus that `tags` are compared with.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    context: int = 0
    unit: str = "tokens"
    first: str = "first token"
    heads: Heads | None = None
    positions: DistanceWeights | None = None
    spreads: Spreads | None = None
    rows: LargestRows | None = None
    tokens: Tokens | None = None
    tags: TagSummaries | None = None
    corpus: str | None = None
    curves: Curves | None = None

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, without the text and its rows."""
        tables = {
            name: None if table is None else table.as_dicts()
            for name in ("heads", "positions", "spreads", "tokens", "tags", "curves")
            for table in [getattr(self, name)]
        }
        about = {"title": self.title, "unit": self.unit, **dict(self.facts)}
        return {**about, "notes": list(self.notes), **tables}


def name_apart(reports: Sequence[Report]) -> list[Report]:
    """The reports with titles that differ."""
    times = Counter(report.title for report in reports)
    return [
        report if times[report.title] == 1 else replace(report, title=f"{report.title} ({n})")
        for n, report in enumerate(reports, 1)
    ]


def distances_between(reports: Sequence[Report]) -> Distances | None:
    """The distances of the token kernels of all tokens; None without some of one shape."""
    rows = []
    for report in reports:
        if not report.tokens:
            return None
        rows.append(torch.tensor([one.kernel for one in report.tokens], dtype=torch.float64))
    if len({row.shape for row in rows}) != 1:
        return None
    names = tuple(report.title for report in reports)
    return distances(Features(names, torch.stack([row.flatten() for row in rows])))
