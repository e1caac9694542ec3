"""Numbers per key and per query, computed in small kernels before a fused kernel starts."""

from __future__ import annotations

import torch
from torch import Tensor

from ...term.layout import repeat
from ..runtime.device import on_hopper
from ..runtime.launch import start
from .codes import NORMS, NOWHERE
from .layout import next_power_of_two, readable_rows, strides_of
from .plan import Inputs, Numbers
from .static import NO_LOG, Slot, Static


def prepare(
    x: Inputs, static: Static, band: Tensor, inside: tuple[int, int] = NOWHERE, few: bool = False
) -> Numbers:
    """Numbers per key and per query, except what a kernel computes itself: `inside`.

    `few`: there are few queries.
    """
    cols, rows = [], []
    # The kernels for Hopper read columns. These would overflow in float16.
    spread = len(x.q) == 1 and not few and x.v.dtype == torch.bfloat16 and on_hopper(x.v.device)
    columns: Tensor | None = None
    for n, slot in enumerate(static.slots):
        col, row, k = x.col[n], x.row[n], x.k[n]
        if slot.norm and inside[n] != NORMS:
            # The norms of a distance, plus the given numbers per key.
            came, shape = col.numel() > 0, (k.shape[0], k.shape[1], k.shape[2])
            norms, columns = _norms(k, col, None, shape, slot.mode if spread and not came else None)
            col = add(norms, col) if came else norms
        # A query's number is the same for all keys. It matters inside a link and in a sum of terms.
        if slot.norm and (slot.link or static.summed):
            row, _ = _norms(x.q[n], x.scale[n], slot, static.shape)
        cols.append(col)
        rows.append(row)
    if columns is None:
        mode = static.slots[0].mode
        wanted = spread and cols[0].numel() > 0
        columns = _columns(cols[0], x.v.dtype, mode) if wanted else cols[0]
    return Numbers(cols[0], cols[-1], rows[0], rows[-1], columns, band)


def add(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two numbers per key, which may have different head counts."""
    heads = max(a.shape[1], b.shape[1])
    return repeat(a, a.shape[0], heads) + repeat(b, b.shape[0], heads)


def _norms(
    x: Tensor, scale: Tensor, slot: Slot | None, shape: tuple[int, int, int],
    spread_for: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """-scale |x|^2 / 2 of a shape. Without a slot the scale is 1.

    `spread_for`: the MODE of the scale for which the same is also returned as columns.
    """
    from .kernels.norms import half_norms

    split = spread_for is not None
    out = x.new_empty(shape, dtype=torch.float32)
    columns = x.new_empty(*shape, 16) if split else None
    width = x.shape[-1]
    mode, number, log = (0, 1.0, NO_LOG) if slot is None else (slot.mode, slot.number, slot.log)
    start(
        half_norms, (-(-shape[2] // 32), shape[0] * shape[1], 1),
        {"WIDTH": next_power_of_two(width), "MODE": mode, "LOG": log, "BM": 32, "SPLIT": split,
         "FOR": spread_for or 0},
        (x, scale, out, out if columns is None else columns),
        (number, 0 if scale.numel() == 1 else 1, shape[1], shape[2], width, *strides_of(x, shape[0])),
    )  # fmt: skip
    return out, columns


def _columns(col: Tensor, dtype: torch.dtype, mode: int) -> Tensor:
    """Numbers per key as columns that add up to them, [B, H, K, 16]."""
    from .kernels import norms

    col = col.contiguous()
    out = col.new_empty(*col.shape, 16, dtype=dtype)
    count = col.numel()
    constants = {"BM": 256, "FOR": mode}
    start(norms.split_columns, (-(-count // 256), 1, 1), constants, (col, out), (count,))
    return out


def turn(x: Tensor, waves: Tensor, sign: float) -> Tensor:
    """Pairs of features rotated by the angles of their places, [B, H, T, P]. -1 rotates back."""
    from .kernels import norms

    x = readable_rows(x)
    batch, heads, length, width = x.shape
    out = x.new_empty(x.shape)
    start(
        norms.turn, (-(-length // 32), batch * heads, 1),
        {"PAIRS": width // 2, "ROOM": next_power_of_two(width // 2), "BM": 32},
        (x, waves, out), (heads, length, *strides_of(x, batch), sign),
    )  # fmt: skip
    return out
