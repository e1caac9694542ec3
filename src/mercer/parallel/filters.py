"""The filter of a whole sequence, for some of its queries and keys."""

from __future__ import annotations

from ..filters import Documents, Filter, Mask
from ..filters.base import Joined
from .split import Chunk


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
    return filter.until(k.stop, 0)
