"""Filters that come with the batch: lengths and documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .base import Filter, Index, Span
from .entry import Entry


@dataclass(frozen=True, eq=False)
class Padding(Filter):
    """j < lengths[b]."""

    entry = Entry(text=False, examples={"padding": lambda: Padding([7, 0])})

    lengths: Tensor  # [B]

    def __init__(self, lengths: Tensor | Sequence[int]) -> None:
        table = torch.as_tensor(lengths)
        whole = not table.is_floating_point() and table.dtype != torch.bool
        if table.dim() != 1 or not whole:
            raise ValueError(f"lengths must be whole numbers, one per sequence [B], got {lengths}")
        object.__setattr__(self, "lengths", table)

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return j < self.lengths[b]

    def joins(self, b: Index, j: Index, m: Index) -> Index:
        return m < self.lengths[b]

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        if torch.compiler.is_compiling():
            return None
        shortest, longest = self.extremes
        return True if j.last < shortest else False if j.first >= longest else None

    @cached_property
    def extremes(self) -> tuple[int, int]:
        if not self.lengths.numel():
            return 0, 0
        return int(self.lengths.min()), int(self.lengths.max())

    @property
    def batch(self) -> int | None:
        return self.lengths.shape[0]

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        _check_batch("Padding", self.lengths.shape[0], batch)
        if torch.compiler.is_compiling() or not batch:
            return
        shortest, longest = self.extremes
        if longest > num_keys or shortest < 0:
            raise ValueError(
                f"lengths must be from 0 to the {num_keys} keys of the call, "
                f"but reach from {shortest} to {longest}"
            )

    def until(self, num_keys: int, start: int) -> Filter:
        return Padding(self.lengths.clamp(max=num_keys))

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        # Reading the data would synchronise with the GPU.
        return super().simplify(num_queries, num_keys) if self.lengths.is_cpu else self

    def to(self, device: torch.device) -> Filter:
        return Padding(self.lengths.to(device)) if self.lengths.device != device else self

    @property
    def same_for_all(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Padding({self.lengths.tolist()})"


@dataclass(frozen=True, eq=False)
class Documents(Filter):
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
        if table.dim() != 2 or table.is_floating_point():
            raise ValueError(
                f"ids must be whole numbers [B, K], got {table.dtype} {list(table.shape)}"
            )
        object.__setattr__(self, "ids", table)

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        # A query before the first key (Q > K) belongs to no document.
        b = b if self.ids.shape[0] > 1 else 0
        same = self.ids[b, i.clamp(min=0) if isinstance(i, Tensor) else max(i, 0)] == self.ids[b, j]
        return same & (i >= 0)

    def joins(self, b: Index, j: Index, m: Index) -> Index:
        b = b if self.ids.shape[0] > 1 else 0
        return self.ids[b, j] == self.ids[b, m]

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        if torch.compiler.is_compiling() or i.first < 0:
            return None
        queries, keys = self._range(i), self._range(j)
        apart = (queries[0] > keys[1]) | (keys[0] > queries[1])
        if bool(apart.all()):
            return False
        same = (queries[0] == queries[1]) & (keys[0] == keys[1]) & (queries[0] == keys[0])
        return True if bool(same.all()) else None

    @cached_property
    def _ranges(self) -> dict[Span, tuple[Tensor, Tensor]]:
        return {}

    def _range(self, span: Span) -> tuple[Tensor, Tensor]:
        """The smallest and largest id at these places, per sequence."""
        if span not in self._ranges:
            part = self.ids[:, span.first : span.last + 1]
            self._ranges[span] = part.amin(-1), part.amax(-1)
        return self._ranges[span]

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
        return Documents(self.ids[:, :num_keys])

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        # Reading the data would synchronise with the GPU.
        return super().simplify(num_queries, num_keys) if self.ids.is_cpu else self

    def to(self, device: torch.device) -> Filter:
        return Documents(self.ids.to(device)) if self.ids.device != device else self

    def __repr__(self) -> str:
        return f"Documents({list(self.ids.shape)})"


def _check_batch(name: str, came: int, batch: int) -> None:
    if came != batch:
        raise ValueError(f"{name} was made for {came} sequences, but the batch has {batch}")
