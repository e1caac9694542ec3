"""Filters of layers, joined with the filter of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..filters import Blocks, Causal, Columns, Filter, Fixed, Full, Memory
from ..filters.base import Index, Joined


def join(*filters: Filter | None) -> Filter:
    """The intersection of all filters, simplified."""
    kept = [f for f in filters if f is not None and not isinstance(f, Full)]
    if any(f.causal and not isinstance(f, Causal) for f in kept):
        kept = [f for f in kept if not isinstance(f, Causal)]
    whole: Filter | None = None
    for f in kept:
        if f != whole:
            whole = f if whole is None else whole & f
    return Full() if whole is None else whole


def remember(own: Filter, memory: Memory | Blocks) -> Filter:
    """A layer's filter with this memory in place of its own."""
    if isinstance(own, Joined):
        return type(own)(tuple(remember(part, memory) for part in own.filters))
    return memory if isinstance(own, Memory) else own


def with_padding(own: Filter, padding: Filter | None, offset: Tensor | None) -> Filter:
    """A layer's filter joined with the padding of the batch.

    Each sequence starts behind the padding on its left, of `offset` places.
    """
    if padding is None:
        return own
    return join(own if offset is None else _behind(own, offset), padding)


@dataclass(frozen=True, eq=False)
class Behind(Filter):
    """A filter of the places i and j alone, counted from the end of the padding on the left."""

    filter: Filter
    offset: Tensor  # [B], how many places the padding has

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        before = self.offset[b]
        return self.filter.sees(b, i - before, j - before, start)

    @property
    def causal(self) -> bool:
        return self.filter.causal

    @property
    def batch(self) -> int | None:
        return self.offset.shape[0]

    def to(self, device: torch.device) -> Filter:
        return Behind(self.filter.to(device), self.offset.to(device))

    def __repr__(self) -> str:
        return f"{self.filter!r} behind padding"


def _behind(own: Filter, offset: Tensor) -> Filter:
    if isinstance(own, Joined):
        return type(own)(tuple(_behind(part, offset) for part in own.filters))
    # All other filters of layers read distances alone.
    return Behind(own, offset) if isinstance(own, Fixed | Blocks | Columns) else own
