"""The filter of a whole sequence, for some of its queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..filters import (
    Blocks,
    Causal,
    Columns,
    Diagonals,
    Documents,
    Earlier,
    Filter,
    Fixed,
    Full,
    Mask,
    Memory,
    Padding,
    Strided,
    Window,
)
from ..filters.base import Index, Joined, Span
from .split import Chunk

# They know their places, or are told where the sequence starts.
PLAIN = (Full, Causal, Window, Earlier, Strided, Diagonals, Fixed, Columns, Blocks, Padding, Memory)


def part(filter: Filter, q: Chunk, k: Chunk) -> Filter:
    """The filter for a call of these queries and keys whose places are said."""
    if isinstance(filter, Joined):
        return type(filter)(tuple(part(each, q, k) for each in filter.filters))
    rows, keys = slice(*q), slice(*k)
    if isinstance(filter, Documents):
        asking = filter.ids if filter.queries is None else filter.queries
        return Documents(filter.ids[:, keys], asking[:, rows])
    if isinstance(filter, Mask):
        rows = rows if filter.visible.shape[2] > 1 else slice(None)
        return Mask(filter.visible[:, :, rows, keys])
    # Memory counts from the first query of a call: here, of the whole sequence.
    return filter.until(k.stop, 0) if type(filter) in PLAIN else Whole(filter)


@dataclass(frozen=True, eq=False)
class Whole(Filter):
    """A filter of a user's own, whose first query is that of the whole sequence."""

    filter: Filter

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return self.filter.sees(b, i, j, 0)

    def shows(self, b: Index, h: Index, i: Index, j: Index, start: int) -> Index:
        return self.filter.shows(b, h, i, j, 0)

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        return self.filter.covers(i, j, 0)

    def joins(self, b: Index, j: Index, m: Index) -> Index:
        return self.filter.joins(b, j, m)

    @property
    def causal(self) -> bool:
        return self.filter.causal

    @property
    def same_for_all(self) -> bool:
        return self.filter.same_for_all

    @property
    def batch(self) -> int | None:
        return self.filter.batch

    @property
    def heads(self) -> int | None:
        return self.filter.heads

    def to(self, device: torch.device) -> Filter:
        return Whole(self.filter.to(device))
