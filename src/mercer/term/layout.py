"""The layout of feature tensors: heads repeated, parts side by side, dtypes of sums."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are kept: float32 for half precision, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def repeat(x: Tensor, batch: int, heads: int) -> Tensor:
    """[B or 1, h, …] -> [B, H, …], every head repeated H / h times in a row (grouped queries)."""
    if x.shape[1] != heads:
        group = heads // x.shape[1]
        x = x[:, :, None].expand(*x.shape[:2], group, *x.shape[2:]).flatten(1, 2)
    return x.expand(batch, *x.shape[1:]) if x.shape[0] != batch else x


def join(parts: list[Tensor]) -> Tensor:
    """Feature parts side by side; batches of 1 and smaller head counts are repeated."""
    parts = [p for p in parts if p.shape[-1] > 0] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    sizes = [p.shape[0] for p in parts]
    batch = 0 if 0 in sizes else max(sizes)
    heads = math.lcm(*(p.shape[1] for p in parts))
    return torch.cat([repeat(p, batch, heads) for p in parts], -1)


def pad_features(x: Tensor, width: int) -> Tensor:
    """x padded with zeros to this many features; x itself if it has them already."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def as_column(scale: Tensor | float, q: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as one more query feature, [B, H, Q, 1]."""
    if isinstance(scale, Tensor):
        heads = max(scale.shape[-3], q.shape[1])
        batch = scale.shape[0] if scale.dim() == 4 else 1
        return scale.to(dtype).expand(batch, heads, q.shape[2], 1)
    return q.new_full((1, q.shape[1], q.shape[2], 1), scale, dtype=dtype)
