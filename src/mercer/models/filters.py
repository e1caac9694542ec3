"""Filters of layers, joined with the filter of a batch."""

from __future__ import annotations

from torch import Tensor

from ..filters import Blocks, Causal, Columns, Filter, Fixed, Full
from ..filters.base import Joined


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


def with_padding(own: Filter, padding: Filter | None, offset: Tensor | None) -> Filter | None:
    """A layer's filter joined with the padding of the batch; None without padding."""
    if padding is None:
        return None
    if offset is not None and _counts_blocks(own):
        raise ValueError(
            f"{own!r} counts its blocks from the first place, so padding must be on the right"
        )
    return join(own, padding)


def _counts_blocks(filter: Filter) -> bool:
    if isinstance(filter, Joined):
        return any(map(_counts_blocks, filter.filters))
    return isinstance(filter, Fixed | Blocks | Columns)
