"""Launches of the Hopper kernels: warp-specialised, with TMA and WGMMA.

They give what the portable kernels give, sooner. eligible.py says for which calls.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...runtime.device import processors, shared_memory
from ...runtime.launch import Launch, start
from ..layout import described, next_power_of_two, tma_descriptor
from ..plan import Inputs, Numbers, Plan, Rows, key_parts
from .eligible import (
    GROUP,
    SUMMED,
    TO_KEYS,
    TO_QUERIES,
    aligned,
    scale_by_keys,
    share,
    stored_queries,
)

# The most features of two slots and values for which a warp group has the registers.
ROOM = 256
# With so many blocks of keys for each multiprocessor, programs take them head by head, but for so
# many at the end. There, and with fewer, the longest come first, so that all end at about one time.
ROUNDS, LAST = 16, 4
# Sums of so many bytes stay in the L2 cache until all keys have added to them, in whatever order.
CACHED = 2**25


def forward(x: Inputs, p: Plan, ready: Numbers, out: Tensor, low: Tensor, lse: Tensor) -> None:
    """out, its rounding error if `low` has room for it, and log_mass."""
    c, keeps = p.constants, low.numel() > 0
    batch, heads, num_queries = p.static.shape
    parts = batch * heads
    # Of two times 128 queries each.
    pairs = -(-num_queries // (4 * GROUP))
    launch = p.launches.get(("hopper forward", keeps))
    if launch is None:
        from .kernels import forward_128

        constants = {name: c[name] for name in ("E0", "V", "MODE0", "LOG0", "FILTER", "SIMPLE")}
        constants |= {"HAS_LOW": keeps, "SPREAD": c["HAS_COL0"], "STILL": p.still, "STAGES": 4}
        grid = (min(2 * pairs * parts, processors(p.device)), 1, 1)
        launch = Launch(forward_128.forward, grid, constants, {"num_warps": 4})
        p.launches["hopper forward", keeps] = launch
    columns = _of(ready.columns, 16, swizzle=32) if c["HAS_COL0"] else x.v
    tensors = (
        _of(x.q[0]), _of(x.k[0]), columns, _of(x.v), x.scale[0],
        x.v if x.lengths is None else x.lengths, x.v if x.ids is None else x.ids, _of(out),
        _of(low, bits=8, swizzle=c["V"]) if keeps else x.v, lse,
    )  # fmt: skip
    launch(tensors, (*p.numbers(x.seed), pairs, parts))


def keys(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...], dband: Tensor | None,
) -> None:  # fmt: skip
    """The pass over keys; with `dband`, it stores the gradients of all pairs there."""
    c, banded = p.constants, dband is not None
    pairs = x.v if dband is None else _of(dband, GROUP)
    tensors = _tensors(x, p, ready, rows, of_keys, pairs)
    for part in key_parts(p.static.slots, c["E0"] + c["E1"] + c["V"] > ROOM):
        launch = _keys(p, part, store=banded, banded=banded)
        launch(tensors, (*p.numbers(x.seed), *_order(p), 0))


def all_passes(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...],
    of_queries: tuple[Any, ...], lse: bool,
) -> None:  # fmt: skip
    """The pass over keys, which stores scores, and the passes that read them, some heads at a time."""
    c, static = p.constants, p.static
    batch, heads, _ = static.shape
    dq, ds, *_ = of_queries
    two = c["E1"] > 0
    count = share(p)
    pairs = _space(x.v, 1, count, aligned(p.num_keys), stored_queries(p))
    tensors = _tensors(x, p, ready, rows, of_keys, _of(pairs, GROUP))
    lengths = tensors[8]
    bm, bn = TO_QUERIES[:2]
    second = tma_descriptor(ready.columns, bn, 16) if p.spread else x.v
    to_queries = (
        tma_descriptor(pairs, bn, bm), tma_descriptor(x.k[0], bn, c["E0"]),
        tma_descriptor(x.k[1], bn, c["E1"]) if two else second, x.q[0], x.scale[0], ready.col0,
        lengths, rows.grad_lse, rows.lse2, dq[0], dq[-1], ds[0],
    )  # fmt: skip
    to_keys: tuple[Any, ...] = ()
    if two:
        bm, bn = TO_KEYS[:2]
        to_keys = (
            tma_descriptor(pairs, bn, bm),
            tma_descriptor(x.q[1], bm, c["E1"]),
            lengths,
            of_keys[0][1],
        )
    common = p.numbers(x.seed)
    for offset in range(0, batch * heads, count):
        own = min(count, batch * heads - offset)
        launch = _keys(p, 1 if two else 0, own, store=True, by_keys=scale_by_keys(p, lse))
        numbers = (*common, offset)
        launch(tensors, (*common, *_order(p, own), offset))
        _reader(p, "stored_to_queries", own, lse)(to_queries, numbers)
        if two and static.slots[1].keys:
            _reader(p, "stored_to_keys", own, lse)(to_keys, numbers)


def one_pass(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...],
    of_queries: tuple[Any, ...], made: tuple[Tensor, Tensor, Tensor], lse: bool,
) -> Tensor:  # fmt: skip
    """All gradients; fills `rows`. Returns the gradients of scales if they are wanted."""
    from .kernels import dq_fixed_point

    c, slot = p.constants, p.static.slots[0]
    batch, heads, num_queries = p.static.shape
    grad_out, lse2, delta, grad_lse, counters = rows
    dq, ds, *_ = of_queries
    blocks, key_blocks, parts = -(-num_queries // GROUP), -(-p.num_keys // GROUP), batch * heads
    whole = delta.new_empty((batch, heads, SUMMED, blocks * GROUP), dtype=torch.int32)
    bounds, most = delta.new_empty(parts, 2, blocks), delta.new_empty(parts, 2, key_blocks)
    each = c["MODE0"] == 2 and slot.wants
    shares = delta.new_empty(parts, blocks * GROUP if each else 0, dtype=torch.int32)
    numbers = p.numbers(x.seed)
    lengths = x.v if x.lengths is None else x.lengths
    flags = {"E0": c["E0"], "HAS_LSE": lse, "TOKENS": p.static.tokens}
    before = {
        "V": c["V"], "FILTER": c["FILTER"], "HAS_LOW": made[1].numel() > 0,
        # If the numbers per key are just norms, they bound the size of keys.
        "NORMS": p.bounded, "EACH": each,
    }  # fmt: skip
    start(
        dq_fixed_point.before_sums, (blocks + key_blocks, parts, 1), flags | before,
        (x.k[0], x.v, ready.col0, lengths, grad_out, grad_lse, *made, delta, lse2, counters,
         bounds, most, shares, whole),
        numbers,
    )  # fmt: skip
    found = _of(whole, GROUP, 32)
    tensors = _tensors(x, p, ready, rows, of_keys, found, (bounds, most, shares))
    order = _order(p, summed=True)
    _keys(p, 0, summed=True)(tensors, (*numbers, *order, 0))
    alike = slot.wants and not each
    dscale = delta.new_empty(heads if alike else 0)
    after = {name: c[name] for name in ("MODE0", "LOG0", "HAS_COL0")} | {"EACH": each}
    start(
        dq_fixed_point.after_sums, (blocks + alike, parts, 1), flags | after | {"ROOM": next_power_of_two(key_blocks)},
        (whole, shares, x.q[0], x.scale[0], ready.col0, grad_lse, lse2, bounds, most, ds[0], dscale,
         dq[0]),
        numbers,
    )  # fmt: skip
    return ds[0][..., :num_queries] if each else dscale


def _space(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape)


def _tensors(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...], pairs: Any,
    bounds: tuple[Tensor, ...] = (),
) -> tuple[Any, ...]:  # fmt: skip
    grad_out, lse2, delta, _, counters = rows
    bounds = bounds or (delta, delta, delta)
    dk, dv, dcol, ds = of_keys
    two = p.constants["E1"] > 0
    q1, k1, dk1 = (_of(x.q[1]), _of(x.k[1]), _of(dk[1])) if two else (x.v, x.v, x.v)
    tiles = _of(ready.band, GROUP) if ready.band.numel() else x.v
    return (
        _of(x.q[0]), _of(x.k[0]), q1, k1, _of(x.v), tiles, x.scale[0], ready.col0,
        x.v if x.lengths is None else x.lengths, x.v if x.ids is None else x.ids, _of(grad_out),
        lse2, delta, pairs, _of(dk[0]), dk1, _of(dv), dcol[0], *bounds, counters, ds[0],
    )  # fmt: skip


def _keys(
    p: Plan, part: int, heads: int = 0, *, store: bool = False, banded: bool = False,
    summed: bool = False, by_keys: bool = False,
) -> Launch:  # fmt: skip
    key = ("hopper keys", part, heads, store, banded, summed, by_keys)
    found = p.launches.get(key)
    if found is not None:
        return found
    from .kernels.accumulating import LEAVING, SLOTS
    from .kernels.backward_keys import backward_keys

    c, slot = p.constants, p.static.slots[0]
    names = ("E0", "E1", "V", "MODE0", "LOG0", "HAS_COL0", "FILTER", "SIMPLE")
    # Bytes of a row of all features; a block has two or three numbers beside each. Barriers and
    # tickets take less than 1024.
    row = 2 * (c["E0"] + c["E1"] + c["V"])
    left = shared_memory(p.device) - 4 * GROUP * GROUP * store - 1024
    # Blocks of pairs, of sums of 32 bits, and of keys, for the warp group that sums up.
    passing = 2 * SLOTS.value + 2 * LEAVING.value + 2
    left -= 2 * passing * GROUP * GROUP * summed
    # Columns of products: of two turns' keys, of ones, of a block's queries. The range of float16
    # is too small for them.
    sides = summed and p.dtype == torch.bfloat16
    left -= 5 * 2 * 16 * GROUP * sides
    # Otherwise numbers per key lie beside the keys, of two turns at most.
    left -= 2 * 2 * 4 * GROUP * (c["HAS_COL0"] and not sides)
    step = GROUP * (row + 4 * GROUP * banded + (8 + 2 * 16 if sides else 12))
    kept = 2 * GROUP * row
    blocks, parts, *_ = _order(p, heads)
    # If there is room, load the next keys during the work on these.
    buffers = 2 if (left - 2 * kept) // step >= 3 else 1
    constants = {name: c[name] for name in names} | {
        "NORM0": slot.norm, "WANT0": slot.wants, "SAVE_COL0": slot.saves, "PART": part,
        "STAGES": min(3, (left - buffers * kept) // step), "BUFFERS": buffers, "STORE": store,
        "SUMMED": summed, "BANDED": banded,
        "HELD": not banded and max(c["E0"], c["E1"], c["V"]) <= GROUP,
        "SIDES": sides, "BY_KEYS": by_keys or summed,
    }  # fmt: skip
    grid = (min(blocks * parts, processors(p.device)), 1, 1)
    # Spilled registers go to L1, so the launch reserves L1 by limiting the shared-memory carve-out.
    found = p.launches[key] = Launch(
        backward_keys, grid, constants, {"num_warps": 4}, reserve_l1=True
    )
    return found


@lru_cache(maxsize=1024)
def _order(p: Plan, heads: int = 0, *, summed: bool = False) -> tuple[int, int, int]:
    """(blocks of keys, heads, heads at the end whose longest blocks come first).

    `heads`: of which some may come at a time.
    """
    batch, all_heads, num_queries = p.static.shape
    blocks, parts = -(-p.num_keys // (2 * GROUP)), heads or batch * all_heads
    count = processors(p.device)
    last = parts if blocks * parts < ROUNDS * count else min(parts, -(-LAST * count // blocks))
    if summed:
        last = max(1, min(last, CACHED // (4 * SUMMED * num_queries)))
    return blocks, parts, last


def _reader(p: Plan, name: str, heads: int, lse: bool) -> Launch:
    key = (name, heads, lse)
    found = p.launches.get(key)
    if found is not None:
        return found
    from .kernels import dq_from_scores

    c, slot = p.constants, p.static.slots[0]
    flags: dict[str, Any] = {"TOKENS": p.static.tokens}
    if name == "stored_to_queries":
        bm, bn, warps, stages = TO_QUERIES
        names: tuple[str, ...] = ("E0", "E1", "MODE0", "LOG0", "HAS_COL0", "FILTER")
        blocks = -(-p.static.shape[2] // bm)
        own = {"NORM0": slot.norm, "WANT0": slot.wants, "HAS_LSE": lse}
        flags = own | {"BY_KEYS": scale_by_keys(p, lse)} | flags
    else:
        bm, bn, warps, stages = TO_KEYS
        names, blocks = ("E1", "FILTER"), -(-p.num_keys // bn)
    constants = {name: c[name] for name in names} | flags | {"BM": bm, "BN": bn}
    options = {"num_warps": warps, "num_stages": stages}
    kernel = getattr(dq_from_scores, name)
    found = p.launches[key] = Launch(kernel, (blocks, heads, 1), constants, options)
    return found


def _of(x: Tensor, width: int = 0, bits: int = 16, swizzle: int = 128) -> Any:
    """A TMA descriptor of x, in blocks of 64 rows."""
    cls, layout = _descriptor(bits, swizzle)
    found = described(cls, x, GROUP, width or next_power_of_two(x.shape[-1]))
    found.layout = layout
    return found


@lru_cache(maxsize=4)
def _descriptor(bits: int, swizzle: int) -> tuple[Any, Any]:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor, NVMMASharedLayout(swizzle, bits, 4)
