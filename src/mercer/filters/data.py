"""Filters that come with the batch: lengths and documents.

Each holds a table: its own copy, so that later writes to the given tensor do not reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from .base import Filter, Index, Span, can_read
from .entry import Entry
from .places import Places

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Tabled(Filter):
    """A filter whose one field is a table that comes with the batch."""

    @property
    def table(self) -> Tensor:
        table: Tensor = getattr(self, fields(self)[0].name)
        return table

    def _hold(self, table: Tensor) -> None:
        object.__setattr__(self, fields(self)[0].name, table)

    def _with(self, table: Tensor) -> Self:
        """The same filter with another table, which is not copied."""
        other = object.__new__(type(self))
        other._hold(table)
        return other

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        """make(), or its result for this key while nothing has been written to the table."""
        version = None if self.table.is_inference() else self.table._version
        known: tuple[int | None, dict[Hashable, Any]] | None = self.__dict__.get("_known")
        if known is None or known[0] != version:
            known = version, {}
            object.__setattr__(self, "_known", known)
        if key not in known[1]:
            known[1][key] = make()
        found: T = known[1][key]
        return found

    def __getstate__(self) -> dict[str, object]:
        # A copy of the table counts its versions anew.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        # Reading the data would synchronise with the GPU.
        return super().simplify(num_queries, num_keys) if self.table.is_cpu else self

    def to(self, device: torch.device) -> Filter:
        return self._with(self.table.to(device)) if self.table.device != device else self


@dataclass(frozen=True, eq=False)
class Padding(Tabled):
    """j < lengths[b]."""

    entry = Entry(text=False, examples={"padding": lambda: Padding([7, 0])})

    lengths: Tensor  # [B]

    def __init__(self, lengths: Tensor | Sequence[int]) -> None:
        table = torch.as_tensor(lengths)
        if table.dim() != 1 or not _is_whole(table) or table.dtype == torch.bool:
            raise ValueError(f"lengths must be whole numbers, one per sequence [B], got {lengths}")
        self._hold(copied(table))

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return j < self.lengths[b]

    def joins(self, b: Index, j: Index, m: Index) -> Index:
        return m < self.lengths[b]

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        if not can_read(self.lengths):
            return None
        shortest, longest = self.extremes
        return True if j.last < shortest else False if j.first >= longest else None

    @property
    def extremes(self) -> tuple[int, int]:
        """The shortest and the longest length."""
        if not self.lengths.numel():
            return 0, 0
        return self._once("extremes", lambda: (int(self.lengths.min()), int(self.lengths.max())))

    @property
    def batch(self) -> int | None:
        return self.lengths.shape[0]

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        check_batch("Padding", self.lengths.shape[0], batch)
        if not can_read(self.lengths) or not batch:
            return
        shortest, longest = self.extremes
        if longest > num_keys or shortest < 0:
            raise ValueError(
                f"lengths must be from 0 to the {num_keys} keys of the call, "
                f"but reach from {shortest} to {longest}"
            )

    def by_rows(self, places: Places) -> Filter | None:
        if isinstance(places.k, Tensor):
            return None
        return self._with((self.lengths - places.k).clamp(min=0, max=places.num_keys))

    def until(self, num_keys: int, start: int) -> Filter:
        return self._with(self.lengths.clamp(max=num_keys))

    @property
    def same_for_all(self) -> bool:
        return True

    def __repr__(self) -> str:
        # To read them from a GPU would wait for it, and a compiled graph cannot.
        readable = self.lengths.is_cpu and can_read(self.lengths)
        return f"Padding({self.lengths.tolist() if readable else f'{len(self.lengths)} lengths'})"


@dataclass(frozen=True, eq=False)
class Documents(Tabled):
    """ids[b, i] = ids[b, j]: sequences packed into one row do not see each other.

    Query n has the id of the key at its place, or queries[b, n] where those are given.
    """

    entry = Entry(
        text=False,
        examples={
            "documents": lambda: Documents([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3], [5] * 11]),
        },
    )

    ids: Tensor  # [B, K]
    queries: Tensor | None = None  # [B, Q]

    def __init__(
        self,
        ids: Tensor | Sequence[Sequence[int]],
        queries: Tensor | Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._hold(_ids("ids", "K", ids))
        given = None if queries is None else _ids("queries", "Q", queries)
        if given is not None and 1 not in (given.shape[0], self.ids.shape[0]):
            check_batch("Documents", given.shape[0], self.ids.shape[0])
        object.__setattr__(self, "queries", given)

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        own = self.ids[b if self.ids.shape[0] > 1 else 0, j]
        if self.queries is not None:
            return self.queries[b if self.queries.shape[0] > 1 else 0, i - start] == own
        # A query before the first key (Q > K) belongs to no document.
        b = b if self.ids.shape[0] > 1 else 0
        return (self.ids[b, i.clamp(min=0) if isinstance(i, Tensor) else max(i, 0)] == own) & (
            i >= 0
        )

    def joins(self, b: Index, j: Index, m: Index) -> Index:
        b = b if self.ids.shape[0] > 1 else 0
        return self.ids[b, j] == self.ids[b, m]

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        asking = self.ids if self.queries is None else self.queries
        if not (can_read(self.ids) and can_read(asking)) or (self.queries is None and i.first < 0):
            return None
        rows = i if self.queries is None else Span(i.first - start, i.last - start)
        queries, keys = self._range(asking, rows), self._range(self.ids, j)
        apart = (queries[0] > keys[1]) | (keys[0] > queries[1])
        if bool(apart.all()):
            return False
        same = (queries[0] == queries[1]) & (keys[0] == keys[1]) & (queries[0] == keys[0])
        return True if bool(same.all()) else None

    def _range(self, table: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """The smallest and largest id at these places, per sequence."""
        part = table[:, span.first : span.last + 1]
        return self._once((table is self.ids, span), lambda: (part.amin(-1), part.amax(-1)))

    @property
    def batch(self) -> int | None:
        sizes = [x.shape[0] for x in (self.ids, self.queries) if x is not None]
        return max(sizes) if max(sizes) > 1 else None

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        if self.batch is not None:
            check_batch("Documents", self.batch, batch)
        if self.ids.shape[1] != num_keys:
            raise ValueError(
                f"Documents has ids for {self.ids.shape[1]} keys, but there are {num_keys}"
            )
        if self.queries is not None and self.queries.shape[1] != num_queries:
            raise ValueError(
                f"Documents has ids for {self.queries.shape[1]} queries, "
                f"but there are {num_queries}"
            )

    def by_rows(self, places: Places) -> Filter | None:
        self.check(self.batch or 1, places.num_queries, places.num_keys + places.left_out)
        asking = self.queries
        if asking is None:
            asking = self.ids[:, rows_of_keys(self, places, "Documents(ids, queries=…)")]
        other = self._with(self.ids[:, : places.num_keys])
        object.__setattr__(other, "queries", asking)
        return other

    def until(self, num_keys: int, start: int) -> Filter:
        return self._with(self.ids[:, :num_keys])

    def to(self, device: torch.device) -> Filter:
        if self.ids.device == device:
            return self
        return self._with(self.ids.to(device))

    def _with(self, table: Tensor) -> Self:
        other = super()._with(table)
        asking = None if self.queries is None else self.queries.to(table.device)
        object.__setattr__(other, "queries", asking)
        return other

    def __repr__(self) -> str:
        asking = "" if self.queries is None else f", queries {list(self.queries.shape)}"
        return f"Documents({list(self.ids.shape)}{asking})"


def rows_of_keys(filter: Filter, places: Places, better: str) -> slice:
    """Which keys stand where the queries do."""
    whole = places.num_keys + places.left_out
    if isinstance(places.q, Tensor) or isinstance(places.k, Tensor):
        first, fits = 0, places.own
    else:
        first = places.q - places.k
        fits = 0 <= first <= whole - places.num_queries
    if not fits:
        raise ValueError(
            f"{filter!r} does not say which of its entries belong to the {places.num_queries} "
            f"queries, since places are said: give {better}"
        )
    return slice(first, first + places.num_queries)


def _ids(name: str, length: str, given: Tensor | Sequence[Sequence[int]]) -> Tensor:
    table = torch.as_tensor(given)
    table = table[None] if table.dim() == 1 else table
    if table.dim() != 2 or not _is_whole(table):
        raise ValueError(
            f"{name} must be whole numbers [B, {length}], got {table.dtype} {list(table.shape)}"
        )
    return copied(table)


def _is_whole(table: Tensor) -> bool:
    return not (table.is_floating_point() or table.is_complex())


def copied(table: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return table.clone()
    # Tensors of inference mode do not count what is written to them.
    with torch.inference_mode(False):
        return table.clone()


def check_batch(name: str, came: int, batch: int) -> None:
    if came != batch:
        raise ValueError(f"{name} was made for {came} sequences, but the batch has {batch}")
