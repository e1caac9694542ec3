"""The contract of a filter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..filters import Causal, Filter, Full, Span


def check_filter(filter: Filter, *, lengths: Sequence[int] = (1, 7, 12)) -> None:
    """One definition: the mask, SDPA's arguments, FlexAttention's rule and the blocks agree."""
    for num_keys in lengths:
        for num_queries in (num_keys, max(num_keys - 3, 1), 1):
            here = filter.until(num_keys, 0)
            mask = here.mask(num_queries, num_keys)
            _check_masks(here, mask, num_queries, num_keys)
            _check_blocks(here, mask, num_queries, num_keys)
            if here.causal:
                assert torch.equal(mask, mask & Causal().mask(num_queries, num_keys)), (
                    f"{here!r} says causal, but shows a later key"
                )


def _check_masks(filter: Filter, mask: Tensor, num_queries: int, num_keys: int) -> None:
    arguments = filter.sdpa(num_queries, num_keys)
    given = arguments["attn_mask"]
    if given is None:
        kind = Causal() if arguments["is_causal"] else Full()
        given = kind.mask(num_queries, num_keys)
    assert torch.equal(mask, given.expand_as(mask)), f"{filter!r}: SDPA's arguments"
    rule = filter.mask_mod(num_queries, num_keys)
    for b in range(mask.shape[0]):
        for i in range(num_queries):
            for j in range(num_keys):
                for h in range(mask.shape[1]):
                    seen = rule(*(torch.tensor(n) for n in (b, h, i, j)))
                    at = b, h, i, j
                    assert bool(seen) == bool(mask[at]), f"{filter!r}: mask_mod at {at}"


def _check_blocks(filter: Filter, mask: Tensor, num_queries: int, num_keys: int) -> None:
    start = num_keys - num_queries
    for rows in _spans(num_queries):
        for cols in _spans(num_keys):
            block = mask[:, :, rows.first : rows.last + 1, cols.first : cols.last + 1]
            places = Span(rows.first + start, rows.last + start)
            covered = filter.covers(places, cols, start)
            if covered is not None:
                right = bool(block.all()) if covered else not bool(block.any())
                assert right, f"{filter!r}: covers({places}, {cols}) = {covered}"


def _spans(length: int) -> Iterator[Span]:
    for size in (1, 3, length):
        for first in range(0, length, size):
            yield Span(first, min(first + size, length) - 1)
