"""Any filter, as a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Filter, Index, Joined, Span, can_read
from .data import Tabled, check_batch, copied, rows_of_keys
from .entry import Entry
from .places import Places


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
        self._hold(copied(table[(None,) * (4 - table.dim())]))

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
            check_batch("Mask", self.batch, batch)
        rows, keys = self.visible.shape[2:]
        if keys != num_keys or not (rows in (1, num_queries) or rows == keys >= num_queries):
            raise ValueError(
                f"Mask was made for {rows} queries and {keys} keys, "
                f"but there are {num_queries} queries and {num_keys} keys"
            )

    def by_rows(self, places: Places) -> Filter | None:
        rows = self.visible.shape[2]
        whole = places.num_keys + places.left_out
        self.check(self.batch or 1, places.num_queries, whole)
        visible = self.visible[..., : places.num_keys]
        if rows not in (1, places.num_queries):
            visible = visible[:, :, rows_of_keys(self, places, "a mask [B, H, Q, K]")]
        return self._with(visible)

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
