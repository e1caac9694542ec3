"""Filters of layers, joined with those of a model and a batch."""

from __future__ import annotations

from torch import Tensor

from ..filters import Causal, Filter, Fixed, Full
from ..filters.base import Joined


def join(*filters: Filter | None) -> Filter:
    """What all filters let through, written as simply as it goes."""
    kept = [f for f in filters if f is not None and not isinstance(f, Full)]
    if any(f.causal and not isinstance(f, Causal) for f in kept):
        kept = [f for f in kept if not isinstance(f, Causal)]
    whole: Filter | None = None
    for f in kept:
        if f != whole:
            whole = f if whole is None else whole & f
    return Full() if whole is None else whole


def with_padding(own: Filter, padding: Filter | None, offset: Tensor | None) -> Filter | None:
    """A layer's filter with that of the batch; None where the layer's own is enough."""
    if padding is None:
        return None
    each = own.filters if isinstance(own, Joined) else (own,)
    if offset is not None and any(isinstance(f, Fixed) for f in each):
        raise ValueError(
            "Fixed counts its blocks from the first place, so padding must be on the right"
        )
    return join(own, padding)
