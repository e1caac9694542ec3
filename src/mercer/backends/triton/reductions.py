"""Sums of gradients over heads, sequences or places that share a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.launch import start
from .static import Slot


def to_scales(sums: Tensor, given: Tensor, slot: Slot, num_queries: int, alone: bool) -> Tensor:
    """The gradients of scales from the shares of all queries and keys; `alone`: of keys only."""
    from .kernels import norms

    if not sums.numel() or given.dim() == 3:
        return sums[..., :num_queries]
    batch, heads, line = sums.shape
    first = num_queries if alone else 0
    out = sums.new_empty(heads)
    start(
        norms.sum_to_scale, (heads, 1, 1), {"LOG": slot.log, "BLOCK": 8192}, (sums, given, out),
        (batch, heads, line, first, line - first, 0 if given.numel() == 1 else 1), {"num_warps": 16},
    )  # fmt: skip
    return out


def of_all(scales: Tensor, given: Tensor) -> Tensor:
    """The gradients by head, summed if all heads share one scale."""
    return scales if given.numel() > 1 else scales.sum(0, keepdim=True)


def reduced(grad: Tensor, given: Tensor) -> Tensor:
    """The gradient, summed over the heads and sequences that share the tensor."""
    if given.shape[:2] == grad.shape[:2]:
        return grad.to(given.dtype)
    if given.shape[1] != grad.shape[1]:
        grad = grad.unflatten(1, (given.shape[1], -1)).sum(2, dtype=torch.float32)
    if given.shape[0] != grad.shape[0]:
        grad = grad.sum(0, keepdim=True, dtype=torch.float32)
    return grad.to(given.dtype).contiguous()
