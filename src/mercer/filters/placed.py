"""Filters of a call whose places are said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import And, Causal, Filter, Full, Index, Joined, Or, Span, can_read
from .data import Tabled
from .mask import Mask
from .patterns import Window
from .places import Places, Said


def place(filter: Filter, places: Places, device: torch.device) -> Filter:
    """The filter for queries and keys at these places, counted as if there were no places.

    Query n of the call is at n + K - Q then, as always, and its true place is looked up.
    """
    if isinstance(filter, Joined):
        return type(filter)(tuple(place(part, places, device) for part in filter.filters))
    # The numbers of a filter are constants of a compiled graph, and places may be symbolic.
    compiling = torch.compiler.is_compiling()
    if not compiling or places.shift == 0 or isinstance(filter, Tabled | Full):
        # The same keys, in a form that can be moved.
        moved = Window(-1, 0) if type(filter) is Causal and places.shift else filter
        found = moved.by_rows(places)
        if found is not None:
            return found
    q, k = places.tensors(device) if compiling else (places.q, places.k)
    return Placed(filter, q, k, _first(q))


def _first(q: Said) -> Said:
    if not isinstance(q, Tensor):
        return q
    return q.amin(-1) if q.shape[1] else q.new_zeros(len(q))


def hides_later(filter: Filter) -> bool:
    """Whether no query sees a key at a later place, where places are said."""
    if isinstance(filter, And):
        return any(map(hides_later, filter.filters))
    if isinstance(filter, Or):
        return all(map(hides_later, filter.filters))
    # A mask is of the queries and keys of the call, wherever they stand.
    return filter.causal and not isinstance(filter, Mask)


@dataclass(frozen=True, eq=False)
class Placed(Filter):
    """A filter of places, for queries and keys that stand at these places."""

    filter: Filter
    q: Said  # the place of the first query, or [B or 1, Q]
    k: Said  # the place of the first key, or [B or 1, K]
    first: Said  # the lowest place of a query, or that of each sequence, [B or 1]

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return self.filter.sees(b, *self._at(b, i, j, start))

    def shows(self, b: Index, h: Index, i: Index, j: Index, start: int) -> Index:
        return self.filter.shows(b, h, *self._at(b, i, j, start))

    def _at(self, b: Index, i: Index, j: Index, start: int) -> tuple[Index, Index, Index]:
        """The places of i, of j, and of the first query."""
        if isinstance(self.q, Tensor):
            assert isinstance(self.first, Tensor)
            first = self.first[b if self.first.shape[0] > 1 else 0]
            return _of(self.q, b, i - start), _of(self.k, b, j), first
        return i - start + self.q, j + self.k, self.first

    def joins(self, b: Index, j: Index, m: Index) -> Index:
        return self.filter.joins(b, _of(self.k, b, j), _of(self.k, b, m))

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        queries = Span(i.first - start, i.last - start)
        each = {self.filter.covers(*spans) for spans in self._spans(queries, j)}
        return each.pop() if len(each) == 1 else None

    def _spans(self, rows: Span, cols: Span) -> Iterator[tuple[Span, Span, int]]:
        """The places of these queries and keys in each sequence, and that of its first query."""
        if not (isinstance(self.q, Tensor) and isinstance(self.k, Tensor)):
            assert isinstance(self.q, int)
            assert isinstance(self.k, int)
            yield _moved(rows, self.q), _moved(cols, self.k), self.q
            return
        if not (can_read(self.q) and can_read(self.k)):
            return
        assert isinstance(self.first, Tensor)
        queries, keys = self._extremes("q", rows), self._extremes("k", cols)
        starts = self.first.tolist()
        for n in range(max(len(queries), len(keys))):
            yield (
                queries[n if len(queries) > 1 else 0],
                keys[n if len(keys) > 1 else 0],
                starts[n if len(starts) > 1 else 0],
            )

    def _extremes(self, name: str, span: Span) -> list[Span]:
        """The first and the last place among these, for each sequence."""
        known: dict[tuple[str, Span], list[Span]] = self.__dict__.get("_known", {})
        if (name, span) not in known:
            part = getattr(self, name)[:, span.first : span.last + 1]
            ends = zip(part.amin(-1).tolist(), part.amax(-1).tolist(), strict=True)
            known[name, span] = [Span(low, high) for low, high in ends]
            object.__setattr__(self, "_known", known)
        return known[name, span]

    @property
    def same_for_all(self) -> bool:
        return self.filter.same_for_all

    @property
    def batch(self) -> int | None:
        sizes = [x.shape[0] for x in (self.q, self.k) if isinstance(x, Tensor)]
        sizes.append(self.filter.batch or 1)
        return max(sizes) if max(sizes) > 1 else self.filter.batch

    @property
    def heads(self) -> int | None:
        return self.filter.heads

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        made = self.filter.batch
        if made is not None and made != batch:
            raise ValueError(
                f"{self.filter!r} was made for {made} sequences, but the batch has {batch}"
            )

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        # Reading the data would synchronise with the GPU.
        on_cpu = not isinstance(self.q, Tensor) or self.q.is_cpu
        return super().simplify(num_queries, num_keys) if on_cpu else self

    def to(self, device: torch.device) -> Filter:
        q, k, first = (
            x.to(device) if isinstance(x, Tensor) else x for x in (self.q, self.k, self.first)
        )
        return Placed(self.filter.to(device), q, k, first)

    def __repr__(self) -> str:
        return f"{self.filter!r} of places that are said"


def _of(x: Said, b: Index, n: Index) -> Index:
    """The place of number n."""
    if not isinstance(x, Tensor):
        return n + x
    return x[b if x.shape[0] > 1 else 0, n]


def _moved(span: Span, by: int) -> Span:
    return Span(span.first + by, span.last + by)
