"""FlexAttention's block mask of a filter, made from a few rows of blocks at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from .base import Filter

# The side of FlexAttention's blocks, and how many rows of them are looked at together.
BLOCK, STRIPE = 128, 8


def block_mask(
    filter: Filter, num_queries: int, num_keys: int, device: torch.device | str
) -> BlockMask:
    """The blocks that a filter shows, and its rule within them."""
    from torch.nn.attention.flex_attention import BlockMask

    start = num_keys - num_queries
    stripes = []
    for i in torch.arange(start, num_keys, device=device).split(STRIPE * BLOCK):
        ends = (0, -num_keys % BLOCK, 0, -len(i) % BLOCK)
        seen = F.pad(filter.mask_of_rows(i, num_keys, start), ends)
        stripes.append(seen.unflatten(-1, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).sum((3, 5)))
    counts = torch.cat(stripes, 2)  # [B or 1, H or 1, blocks of queries, blocks of keys]
    whole = counts == BLOCK**2
    return BlockMask.from_kv_blocks(
        *_listed((counts > 0) & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=filter.mask_mod(num_queries, num_keys),
        seq_lengths=(num_queries, num_keys),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Per block of queries: the number of visible key blocks, and their indices, visible first."""
    return blocks.sum(-1).int(), blocks.int().argsort(dim=-1, descending=True, stable=True).int()
