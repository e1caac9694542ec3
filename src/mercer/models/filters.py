"""Filters of layers, joined with the filter of a batch."""

from __future__ import annotations

from torch import Tensor

from ..filters import Causal, Filter, Fixed, Full
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
    each = own.filters if isinstance(own, Joined) else (own,)
    if offset is not None and any(isinstance(f, Fixed) for f in each):
        raise ValueError(
            "Fixed counts its blocks from the first place, so padding must be on the right"
        )
    return join(own, padding)
