"""Heads that see different keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Literal

from .base import Causal, Filter, Index, Joined, Span
from .entry import Entry
from .patterns import Blocks, Columns, Diagonals, Fixed, Strided, Window


@dataclass(frozen=True, eq=False)
class Heads(Joined):
    """Each head has a filter of its own."""

    entry = Entry(
        text=False,
        examples={"heads": lambda: Heads([Window(3, 0), Causal()])},
    )

    def __init__(self, filters: Sequence[Filter]) -> None:
        for filter in filters:
            if not isinstance(filter, Filter) or filter.heads is not None:
                raise ValueError(
                    f"Heads takes one filter for each head, each the same for all heads, got "
                    f"{filter!r}"
                )
        if not filters:
            raise ValueError("Heads needs a filter for each head, got none")
        object.__setattr__(self, "filters", tuple(filters))

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        raise ValueError(f"{self!r} differs between heads, which is not possible here")

    def shows(self, b: Index, h: Index, i: Index, j: Index, start: int) -> Index:
        each = (f.sees(b, i, j, start) & (h == n) for n, f in enumerate(self.filters))
        return reduce(or_, each)

    def joins(self, b: Index, j: Index, m: Index) -> Index:
        return reduce(and_, (f.joins(b, j, m) for f in self.filters))

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        each = {f.covers(i, j, start) for f in self.filters}
        return each.pop() if len(each) == 1 else None

    @property
    def causal(self) -> bool:
        return all(f.causal for f in self.filters)

    @property
    def heads(self) -> int | None:
        return len(self.filters)

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        each = [f.simplify(num_queries, num_keys) for f in self.filters]
        return each[0] if all(f == each[0] for f in each) else Heads(each)

    def __repr__(self) -> str:
        return f"Heads({list(self.filters)})"


def sparse(
    pattern: Literal["strided", "fixed"], num_heads: int, stride: int, summary: int
) -> Filter:
    """The patterns of the Sparse Transformer, shared out among the heads.

    strided: the parts of `Strided` in turns, the nearest keys and every stride-th key. fixed:
    `Fixed` with summary places of its own in each head, from the last ones of a block on.
    """
    whole = Strided(stride) if pattern == "strided" else Fixed(stride, summary)
    if num_heads == 1:
        return whole
    if pattern == "strided":
        return Heads(
            [Diagonals(stride) if h % 2 else Window(stride - 1, 0) for h in range(num_heads)]
        )
    first = [stride - (h % (stride // summary) + 1) * summary for h in range(num_heads)]
    return Heads([Blocks(stride) | Columns(stride, n, summary) for n in first])
