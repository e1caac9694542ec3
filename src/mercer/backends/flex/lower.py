"""A term lowered for FlexAttention: one dot product and the numbers around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...term.layout import join, repeat
from ...term.links import Link
from .. import Task

# Widths that its kernels take; narrower features and values are padded with zeros.
MIN_WIDTH = 16


@dataclass(frozen=True)
class Lowered:
    """link(scale_i (<q_i, k_j> + col_j) + row_i) + bias_j + table; without a link, q is scaled."""

    q: Tensor  # [B or 1, H or 1, Q, E]
    k: Tensor  # [B or 1, h, K, E]
    scale: Tensor | None  # [B, H, Q]
    row: Tensor | None  # [B, H, Q]
    col: Tensor | None  # [B, H, K]
    bias: Tensor | None  # [B, H, K]
    table: Tensor | None  # [B, H, Q or 1, distances]
    link: Link | None
    place: Tensor | None  # of the first query, K - Q, if keys are counted from 0
    places: tuple[Tensor, Tensor] | None = None  # [B, Q] and [B, K], where they are said


def lower(task: Task) -> Lowered:
    """Features of one dot product in the dtype of values, and the numbers around it in float32."""
    dtype, shape = task.v.dtype, (task.batch, task.heads)
    linked = [f for f in task.term.factors if f.link is not None]
    plain = [f for f in task.term.factors if f.link is None]
    scale = row = col = bias = table = place = places = None
    if linked:
        (f,) = linked
        q, k = f.q.to(dtype), f.k.to(dtype)
        scale = _per_head_and_query(f.scale, task)
        row = None if f.row is None else repeat(f.row.float(), *shape)
        col = None if f.col is None else repeat(f.col.float(), *shape)
    else:
        # Round once: multiply by the scale in float32.
        parts = [f for f in plain if f.width]
        q = join([(f.q.float() * f.scale).to(dtype) for f in parts] or [_none(task)])
        k = join([f.k.to(dtype) for f in parts] or [_none(task, keys=True)])
    for f in plain:
        if f.col is None:
            continue
        number = repeat(f.col.float(), *shape)
        if f.per_query:
            scale, col = _per_head_and_query(f.scale, task), number
            continue
        number = number * (f.scale[..., 0] if isinstance(f.scale, Tensor) else f.scale)
        bias = number if bias is None else bias + number
    if (relative := task.term.relative) is not None:
        table, given = repeat(relative.table.float(), *shape), relative.places
        if given is None or given.shift is not None:
            later = 0 if given is None else given.shift or 0
            # A tensor, so that another length does not recompile.
            start = task.num_keys - task.num_queries + later
            place = q.new_full((), start, dtype=torch.int32)
        else:
            i, j = (x.expand(task.batch, -1).contiguous() for x in given.tensors(task.device))
            places = i, j
    link = linked[0].link if linked else None
    return Lowered(q, k, scale, row, col, bias, table, link, place, places)


def _none(task: Task, *, keys: bool = False) -> Tensor:
    length = task.num_keys if keys else task.num_queries
    return task.v.new_zeros(1, task.heads, length, MIN_WIDTH)


def _per_head_and_query(scale: Tensor | float, task: Task) -> Tensor:
    if not isinstance(scale, Tensor):
        scale = task.v.new_full((1, 1, 1, 1), scale, dtype=torch.float32)
    return scale.float().expand(task.batch, task.heads, task.num_queries, 1)[..., 0]
