"""Bands of tables for the fused kernels, and the gradients of tables.

A table is given as numbers for every query and distance, or as queries and rows to be multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.device import processors, settles, shared_memory
from ..runtime.launch import start
from .codes import EVERY, GRANULE
from .layout import next_power_of_two, readable_rows, strides_of
from .plan import Bias, sees_all
from .static import Static, one_sided

# Pairs of a band that is kept for the backward. A larger one is formed again.
KEPT = 2**30


def width_of(clip: int, sided: bool, num_keys: int) -> int:
    """The keys of a line of a band: all within reach of a granule's queries, and a block more."""
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
    """float16 has the range for logarithms, and more digits than bfloat16."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def form(bias: Bias, static: Static, v: Tensor) -> Tensor:
    """The band, [B or 1, H, Q, width], to the base 2; empty where there is no table."""
    if static.clip < 0:
        return v.new_empty(0)
    from .kernels import tables as kernels

    num_keys = v.shape[2]
    shape = shape_of(bias, static, num_keys)
    batch, heads, num_queries, width = shape
    band = v.new_empty(shape, dtype=dtype_of(v.dtype))
    x, rows = bias.asking, bias.rows
    constants: dict[str, Any] = {
        "CLIP": static.clip, "SIDED": one_sided(static.filter), "SCORED": rows is not None,
        "HALF": _half(bias, static), "REST": rows is not None and rows.dtype != v.dtype,
        "WIDTH": 16, "BM": 64, "BR": 64, "PRECISION": "tf32",
    }  # fmt: skip
    size, rest_of, strides = 0, 0, [0] * 7
    table = v
    if x is not None and rows is not None:
        rows = rows.contiguous()
        size, rest_of, per_head = rows.shape[-1], rows.numel(), _per_head(rows)
        x, rows = readable_rows(x), halves(rows, x.dtype)
        constants |= _product(x)
        strides[:4] = [*strides_of(x, batch), per_head]
    elif bias.table is not None:
        table = readable_rows(bias.table)
        strides[4:] = table.stride()[:3]
    block = constants["BR"] * constants["WIDTH"]
    start(
        kernels.spread, (_programs(num_queries, constants), batch * heads, 1),
        constants,
        (v if x is None else x, v if rows is None else rows, table, band),
        (heads, num_queries, num_keys, width, size, rest_of, *strides),
        _staged(v, 2 * block if constants["REST"] else block, constants),
    )  # fmt: skip
    return band


def kept(band: Tensor) -> Tensor:
    """The band if it is kept for the backward, or nothing."""
    return band if band.numel() <= KEPT else band.new_empty(0)


def again(band: Tensor, bias: Bias, static: Static, v: Tensor) -> Tensor:
    """The band that was kept, or the same formed again."""
    if static.clip < 0 or band.numel():
        return band
    return form(bias, static, readable_rows(v))


def halves(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows in a dtype, followed by their rounding errors."""
    from .kernels import tables as kernels

    if dtype == rows.dtype:
        return rows
    out = rows.new_empty(2, *rows.shape, dtype=dtype)
    count = rows.numel()
    start(kernels.halves, (-(-count // 1024), 1, 1), {"BM": 1024}, (rows, out), (count,))
    return out


def empty_gradient(band: Tensor, static: Static, v: Tensor) -> tuple[Tensor, Tensor]:
    """Empty gradients of a band and of a table's ends."""
    batch, heads, num_queries = static.shape
    shape = (batch, heads, num_queries, band.shape[-1])
    sided = one_sided(static.filter)
    # A causal pass writes every pair that is read later. Other filters leave gaps, which must be 0.
    whole = sided and static.simple
    whole = whole and all(sees_all(c, static, v.shape[2]) for c in static.filter)
    make = band.new_empty if whole else band.new_zeros
    ends = band.new_empty(1 if sided else 2, *static.shape, dtype=torch.float32)
    return make(shape, dtype=v.dtype), ends


def gradients(
    grads: tuple[Tensor, Tensor], bias: Bias, static: Static, v: Tensor,
    stored: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """The gradients of the table, or of the queries and the rows.

    `stored`: keys and dq of the dot product. The band then has the gradients of all pairs, and dq is
    formed here, too.
    """
    from .kernels import tables as kernels

    dband, ends = grads
    batch, heads, num_queries = static.shape
    num_keys, width, clip = v.shape[2], dband.shape[-1], static.clip
    sided = one_sided(static.filter)
    common = {"CLIP": clip, "SIDED": sided}
    lengths = (num_queries, num_keys, width)
    if bias.table is not None:
        dtable = ends.new_empty(batch, heads, num_queries, 2 * clip + 1)
        mine = common | {"BM": 16, "BR": 64}
        start(
            kernels.band_to_table, (_programs(num_queries, mine), batch * heads, clip // 32 + 2), mine,
            (dband, ends, dtable), lengths,
        )  # fmt: skip
        return [dtable if bias.table.shape[0] == batch else dtable.sum(0, keepdim=True)]
    assert bias.asking is not None
    assert bias.rows is not None
    x, rows = readable_rows(bias.asking), bias.rows.contiguous()
    size = x.shape[-1]
    constants = common | _product(x)
    pairs, block = constants["BM"] * constants["BR"], constants["BR"] * constants["WIDTH"]
    dx = x.new_empty(x.shape)
    # Without stored pairs the keys are not read.
    k, dq = stored or (x, dx)
    if stored is not None:
        block += pairs + constants["BR"] * next_power_of_two(k.shape[-1])
    start(
        kernels.band_to_queries, (_programs(num_queries, constants), batch * heads, 1),
        constants | {"HALF": _half(bias, static), "KEYS": next_power_of_two(k.shape[-1]) if stored else 0,
                     "TOKENS": static.tokens, "SETTLE": settles(v.device)},
        (dband, ends, rows.to(x.dtype), k, dq, dx),
        (heads, heads // k.shape[1], *lengths, size, k.shape[-1], _per_head(rows),
         *strides_of(k, batch), static.slots[0].number),
        _staged(v, pairs + block, constants),
    )  # fmt: skip
    return [dx, _of_rows(grads, bias, static, v, constants, stored=stored is not None)]


def _of_rows(
    grads: tuple[Tensor, Tensor], bias: Bias, static: Static, v: Tensor, constants: dict[str, Any],
    *, stored: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the rows."""
    from .kernels import tables as kernels

    dband, ends = grads
    assert bias.asking is not None
    assert bias.rows is not None
    batch, heads, num_queries = static.shape
    x, total = readable_rows(bias.asking), bias.rows.shape[1]
    constants = constants | {"STORED": stored}
    size, count = x.shape[-1], static.clip + 1 if constants["SIDED"] else total
    lengths = (num_queries, v.shape[2], dband.shape[-1])
    # Alignment adds up to seven distances.
    blocks = -(-(count + EVERY - 1) // constants["BR"])
    # Enough parts for all SMs.
    most = _programs(num_queries, constants) // EVERY
    parts = min(max(8 * processors(v.device) // (EVERY * heads * blocks), 1), most)
    sums = ends.new_empty(heads, EVERY * parts, count, size)
    start(
        kernels.band_to_rows, (EVERY * parts, blocks, heads), constants, (x, dband, ends, sums),
        (batch, heads, *lengths, size, count, parts, *strides_of(x, batch)),
        _staged(v, constants["BM"] * (constants["BR"] + constants["WIDTH"]), constants),
    )  # fmt: skip
    drows = bias.rows.new_empty(bias.rows.shape)
    shared = heads // drows.shape[0]
    # Rows that many heads share have many parts but few programs.
    many = shared * EVERY * parts > 32
    block = {"BR": 1 if many else 16, "BP": 32 if many else 1, "WIDTH": next_power_of_two(size)}
    start(
        kernels.sum_rows, (-(-total // block["BR"]), drows.shape[0], 1), block, (sums, drows),
        (shared, EVERY * parts, count, total, size),
    )  # fmt: skip
    return drows


def _programs(num_queries: int, constants: dict[str, Any]) -> int:
    """How many programs take BM queries each."""
    return EVERY * -(-num_queries // (EVERY * constants["BM"]))


def _staged(v: Tensor, numbers: int, constants: dict[str, Any]) -> dict[str, int]:
    """The number of pipeline stages, up to three, that shared memory holds."""
    size = v.dtype.itemsize
    kept = constants["BM"] * (constants["WIDTH"] * size + 4 * constants["BR"]) + 2048
    stages = (shared_memory(v.device) - kept) // (numbers * size)
    return {"num_warps": 8 if constants["WIDTH"] > 128 else 4, "num_stages": max(1, min(3, stages))}


def _product(x: Tensor) -> dict[str, Any]:
    """How blocks of queries and rows are multiplied. float32 takes twice the shared memory."""
    wide = x.dtype == torch.float32
    return {
        "WIDTH": next_power_of_two(x.shape[-1]), "BM": 64, "BR": 32 if wide else 64,
        "PRECISION": "ieee" if wide else "tf32",
    }  # fmt: skip


def _half(bias: Bias, static: Static) -> bool:
    """Whether the table has no rows for keys after the query."""
    return bias.rows is not None and bias.rows.shape[1] == static.clip + 1


def _per_head(rows: Tensor) -> int:
    return 0 if rows.shape[0] == 1 else rows.stride(0)
