"""Filters that come with the batch: lengths, documents, and masks.

Each holds a table: its own copy, so that later writes to the given tensor do not reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from .base import Filter, Index, Joined, Span, can_read
from .entry import Entry

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
        self._hold(_copied(table))

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
        _check_batch("Padding", self.lengths.shape[0], batch)
        if not can_read(self.lengths) or not batch:
            return
        shortest, longest = self.extremes
        if longest > num_keys or shortest < 0:
            raise ValueError(
                f"lengths must be from 0 to the {num_keys} keys of the call, "
                f"but reach from {shortest} to {longest}"
            )

    def until(self, num_keys: int, start: int) -> Filter:
        return self._with(self.lengths.clamp(max=num_keys))

    @property
    def same_for_all(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Padding({self.lengths.tolist()})"


@dataclass(frozen=True, eq=False)
class Documents(Tabled):
    """ids[b, i] = ids[b, j]: sequences packed into one row do not see each other."""

    entry = Entry(
        text=False,
        examples={
            "documents": lambda: Documents([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3], [5] * 11]),
        },
    )

    ids: Tensor  # [B, K]

    def __init__(self, ids: Tensor | Sequence[Sequence[int]]) -> None:
        table = torch.as_tensor(ids)
        table = table[None] if table.dim() == 1 else table
        if table.dim() != 2 or not _is_whole(table):
            raise ValueError(
                f"ids must be whole numbers [B, K], got {table.dtype} {list(table.shape)}"
            )
        self._hold(_copied(table))

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        # A query before the first key (Q > K) belongs to no document.
        b = b if self.ids.shape[0] > 1 else 0
        same = self.ids[b, i.clamp(min=0) if isinstance(i, Tensor) else max(i, 0)] == self.ids[b, j]
        return same & (i >= 0)

    def joins(self, b: Index, j: Index, m: Index) -> Index:
        b = b if self.ids.shape[0] > 1 else 0
        return self.ids[b, j] == self.ids[b, m]

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        if not can_read(self.ids) or i.first < 0:
            return None
        queries, keys = self._range(i), self._range(j)
        apart = (queries[0] > keys[1]) | (keys[0] > queries[1])
        if bool(apart.all()):
            return False
        same = (queries[0] == queries[1]) & (keys[0] == keys[1]) & (queries[0] == keys[0])
        return True if bool(same.all()) else None

    def _range(self, span: Span) -> tuple[Tensor, Tensor]:
        """The smallest and largest id at these places, per sequence."""
        part = self.ids[:, span.first : span.last + 1]
        return self._once(span, lambda: (part.amin(-1), part.amax(-1)))

    @property
    def batch(self) -> int | None:
        return self.ids.shape[0] if self.ids.shape[0] > 1 else None

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        if self.ids.shape[0] != 1:
            _check_batch("Documents", self.ids.shape[0], batch)
        if self.ids.shape[1] != num_keys:
            raise ValueError(
                f"Documents has ids for {self.ids.shape[1]} keys, but there are {num_keys}"
            )

    def until(self, num_keys: int, start: int) -> Filter:
        return self._with(self.ids[:, :num_keys])

    def __repr__(self) -> str:
        return f"Documents({list(self.ids.shape)})"


@dataclass(frozen=True, eq=False)
class Mask(Tabled):
    """visible[b, h, n, j] for query n; True = visible.

    Rows are aligned with the last query, so a mask [K, K] of a whole sequence also serves the calls
    of its last queries.
    """

    entry = Entry(
        text=False,
        examples={
            "mask": lambda: Mask(torch.arange(242).view(2, 1, 11, 11) * 7 % 11 < 6),
        },
    )

    visible: Tensor  # [B or 1, H or 1, Q or 1, K]

    def __init__(self, visible: Tensor | Sequence[Sequence[bool]]) -> None:
        table = torch.as_tensor(visible)
        if table.dtype != torch.bool:
            raise ValueError(
                f"a mask must be boolean, True where a key is visible, got {table.dtype}; "
                "of numbers that are added to scores, it is numbers == 0"
            )
        if not 1 <= table.dim() <= 4:
            raise ValueError(
                "a mask must be [B, H, Q, K], or fewer dimensions that repeat, "
                f"got {list(table.shape)}"
            )
        self._hold(_copied(table[(None,) * (4 - table.dim())]))

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        if self.heads is not None:
            raise ValueError(f"{self!r} differs between heads, which is not possible here")
        return self.shows(b, 0, i, j, start)

    def shows(self, b: Index, h: Index, i: Index, j: Index, start: int) -> Index:
        batch, heads, rows, keys = self.visible.shape
        n = i - (keys - rows) if rows > 1 else 0
        return self.visible[b if batch > 1 else 0, h if heads > 1 else 0, n, j]

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        if not can_read(self.visible):
            return None
        rows, keys = self.visible.shape[2:]
        first, last = (i.first - (keys - rows), i.last - (keys - rows)) if rows > 1 else (0, 0)
        block = self.visible[:, :, first : last + 1, j.first : j.last + 1]
        shown = self._once((first, last, j), lambda: (bool(block.all()), bool(block.any())))
        return True if shown[0] else None if shown[1] else False

    @property
    def causal(self) -> bool:
        # A row that serves all queries shows a key that is later than some.
        if not can_read(self.visible) or self.visible.shape[2] == 1:
            return False
        return self._once("causal", self._hides_the_future)

    def _hides_the_future(self) -> bool:
        rows, keys = self.visible.shape[2:]
        return not bool(self.visible.triu(keys - rows + 1).any())

    @property
    def batch(self) -> int | None:
        return self.visible.shape[0] if self.visible.shape[0] > 1 else None

    @property
    def heads(self) -> int | None:
        return self.visible.shape[1] if self.visible.shape[1] > 1 else None

    @property
    def same_for_all(self) -> bool:
        return self.visible.shape[2] == 1

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        if self.batch is not None:
            _check_batch("Mask", self.batch, batch)
        rows, keys = self.visible.shape[2:]
        if keys != num_keys or not (rows in (1, num_queries) or rows == keys >= num_queries):
            raise ValueError(
                f"Mask was made for {rows} queries and {keys} keys, "
                f"but there are {num_queries} queries and {num_keys} keys"
            )

    def until(self, num_keys: int, start: int) -> Filter:
        rows, keys = self.visible.shape[2:]
        kept = rows if rows == 1 else max(rows - max(keys - num_keys, 0), 0)
        return self._with(self.visible[:, :, :kept, :num_keys])

    def __repr__(self) -> str:
        return f"Mask({list(self.visible.shape)})"


def masks_of(filter: Filter) -> list[Mask]:
    """The masks in a filter."""
    if isinstance(filter, Joined):
        return [mask for part in filter.filters for mask in masks_of(part)]
    return [filter] if isinstance(filter, Mask) else []


def _is_whole(table: Tensor) -> bool:
    return not (table.is_floating_point() or table.is_complex())


def _copied(table: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return table.clone()
    # Tensors of inference mode do not count what is written to them.
    with torch.inference_mode(False):
        return table.clone()


def _check_batch(name: str, came: int, batch: int) -> None:
    if came != batch:
        raise ValueError(f"{name} was made for {came} sequences, but the batch has {batch}")
