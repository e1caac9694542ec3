"""Bands of a table for the fused kernels, and the gradients of what they were formed from.

A table comes as numbers for every distance, or as queries and rows whose products it has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .triton_plan import (
    Bias,
    Static,
    helper,
    one_sided,
    processors,
    readable_rows,
    room,
    strides_of,
)

# Queries whose bands begin with the same key; blocks of pairs are no larger.
GRANULE = 64


def width_of(clip: int, sided: bool, num_keys: int) -> int:
    """The keys of a line of a band: those within reach of a granule's queries, and a block more."""
    reach = clip + 1 if sided else 2 * clip + 1
    return min(_whole(reach + 2 * GRANULE + 14), _whole(num_keys))


def _whole(count: int) -> int:
    """Filled up to a multiple of 16."""
    return count + -count % 16


def shape_of(bias: Bias, static: Static, num_keys: int) -> tuple[int, int, int, int]:
    batch, heads, num_queries = static.shape
    if bias.table is not None:
        batch = bias.table.shape[0]
    width = width_of(static.clip, one_sided(static.filter), num_keys)
    return batch, heads, num_queries, width


def dtype_of(dtype: torch.dtype) -> torch.dtype:
    """float16 has room for logarithms, and more of their digits than bfloat16."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def form(bias: Bias, static: Static, v: Tensor) -> Tensor:
    """The band, [B or 1, H, Q, width], to the base 2; empty where there is no table."""
    if static.clip < 0:
        return v.new_empty(0)
    num_keys = v.shape[2]
    shape = shape_of(bias, static, num_keys)
    batch, heads, num_queries, width = shape
    band = v.new_empty(shape, dtype=dtype_of(v.dtype))
    x, rows = bias.asking, bias.rows
    scored = x is not None and rows is not None
    constants = {
        "CLIP": static.clip, "SIDED": one_sided(static.filter), "SCORED": scored,
        "WIDTH": 16, "BM": GRANULE, "BR": 64, "PRECISION": "tf32",
    }  # fmt: skip
    size, strides = 0, [0] * 7
    table = v
    if x is not None and rows is not None:
        x, rows, size = readable_rows(x), rows.contiguous(), rows.shape[-1]
        constants |= _product(x)
        strides[:4] = [*strides_of(x, batch), _per_head(rows)]
    elif bias.table is not None:
        table = readable_rows(bias.table)
        strides[4:] = table.stride()[:3]
    helper(
        "spread", (-(-num_queries // GRANULE), batch * heads, 1), constants,
        (v if x is None else x, v if rows is None else rows, table, band),
        (heads, num_queries, num_keys, width, size, *strides),
    )  # fmt: skip
    return band


def empty_gradient(band: Tensor, static: Static, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for the gradient of a band, by batch, and for that of a table's ends."""
    batch, heads, num_queries = static.shape
    shape = (batch, heads, num_queries, band.shape[-1])
    sided = one_sided(static.filter)
    # A causal pass visits all that is read again; others leave gaps.
    whole = sided and static.simple and all(_all_seen(c, static) for c in static.filter)
    make = band.new_empty if whole else band.new_zeros
    ends = band.new_empty(1 if sided else 2, *static.shape, dtype=torch.float32)
    return make(shape, dtype=dtype), ends


def _all_seen(clause: tuple[int, ...], static: Static) -> bool:
    """Whether a query sees all keys before it that are within reach."""
    causal, left, right, memory, *others = clause
    near = left < 0 or left >= static.clip - 1
    old = memory < 0 or static.first <= memory
    return bool(causal) and near and old and right < 0 and not any(others)


def gradients(grads: tuple[Tensor, Tensor], bias: Bias, static: Static, v: Tensor) -> list[Tensor]:
    """Those of the table, or of the queries and the rows."""
    dband, ends = grads
    batch, heads, num_queries = static.shape
    num_keys, width, clip = v.shape[2], dband.shape[-1], static.clip
    sided = one_sided(static.filter)
    common = {"CLIP": clip, "SIDED": sided}
    lengths = (num_queries, num_keys, width)
    if bias.table is not None:
        dtable = ends.new_empty(batch, heads, num_queries, 2 * clip + 1)
        helper(
            "band_to_table", (-(-num_queries // 16), batch * heads, -(-(2 * clip + 1) // 64)),
            common | {"BM": 16, "BR": 64}, (dband, ends, dtable), lengths,
        )  # fmt: skip
        return [dtable if bias.table.shape[0] == batch else dtable.sum(0, keepdim=True)]
    assert bias.asking is not None
    assert bias.rows is not None
    x, rows = readable_rows(bias.asking), bias.rows.contiguous()
    size, total = x.shape[-1], 2 * clip + 1
    count = clip + 1 if sided else total
    constants = common | _product(x)
    dx = x.new_empty(x.shape)
    helper(
        "band_to_queries", (-(-num_queries // GRANULE), batch * heads, 1),
        constants | {"BM": GRANULE}, (dband, ends, rows, dx),
        (heads, *lengths, size, _per_head(rows)),
    )  # fmt: skip
    blocks = -(-count // constants["BR"])
    # As many parts as keep the device busy.
    parts = 8 * processors(v.device) // (batch * heads * blocks)
    part = _whole(-(-num_queries // min(max(parts, 1), -(-num_queries // 256))))
    part += -part % GRANULE
    parts = -(-num_queries // part)
    sums = rows.new_empty(batch, heads, parts, count, size)
    helper(
        "band_to_rows", (parts, batch * heads, blocks), constants | {"BM": GRANULE},
        (x, dband, ends, sums), (heads, *lengths, size, count, part, *strides_of(x, batch)),
    )  # fmt: skip
    drows = sums.sum((0, 2))
    if bias.rows.shape[0] != heads:
        drows = drows.sum(0, keepdim=True)
    if count < total:
        drows = torch.cat([drows.new_zeros(drows.shape[0], total - count, size), drows], 1)
    return [dx, drows]


def _product(x: Tensor) -> dict[str, Any]:
    """How blocks of queries and rows are multiplied; those of float32 are twice as large."""
    wide = x.dtype == torch.float32
    return {
        "WIDTH": room(x.shape[-1]), "BR": 32 if wide else 64,
        "PRECISION": "ieee" if wide else "tf32",
    }  # fmt: skip


def _per_head(rows: Tensor) -> int:
    return 0 if rows.shape[0] == 1 else rows.stride(0)
