"""Launches of the kernels that only Hopper has: products of groups of warps, which may have parts.

They give what those of triton_kernels.py and triton_backward.py give, sooner, for dot products
without links, and without a table or, in the backward, with one that has all pairs.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...runtime.device import INTERPRETED, on_hopper, processors, shared_memory
from ...runtime.launch import Launch, start
from ..codes import PLAIN
from ..layout import next_power_of_two, tma_descriptor, tma_readable
from ..plan import Inputs, Numbers, Plan, Rows, key_parts

# Keys that a group of warps owns, and queries of a block.
GROUP = 64
# The most features of two slots and the values that a group has the registers for.
ROOM = 256
# From so many features and values on, it pays to store what gradients of queries are made of; of
# at most so many pairs at a time. In a window with half of that many it would be 2 % faster, and
# take five times the memory.
WIDE, PAIRS = 256, 2**30
# At least so many programs of a share of the heads for each processor: with 4 it was 2 % faster
# than not to store, with 8 10 %.
LEAST = 3
# With so many blocks of keys for each processor, programs take them head by head, but for so many
# at the end: there, and with fewer, the longest come first, so that all end at about one time.
ROUNDS, LAST = 16, 4
# Such features and values leave room for a group that sums up gradients of queries. Where a query
# sees fewer keys than so many, what comes before and after the sums takes longer than they save.
SUMMED, MANY_KEYS = 64, 1024
# Features, and as many values, that the forward takes; of the fewer, four programs share a
# processor, with so many registers for a thread.
NARROW, NARROW_REGISTERS = 64, 128
FORWARDS = (NARROW, 128)
# Sums of so many bytes stay in the cache until all keys have added to them, in whatever order.
CACHED = 2**25
# So many heads take turns where a program may have to wait for that of the next keys: it is as many
# tickets ahead then.
TOGETHER = 16
# And so many blocks of queries can be waited for, as in triton_hopper.py.
WATCHED = 64
# How the kernels that read it are cut: (queries, keys, warps, stages). With one slot, smaller ones
# are faster where a query sees no more keys than SHORT, and slower where it sees 8192.
TO_QUERIES, TO_SHORT, SHORT = (128, 64, 8, 4), (64, 64, 4, 4), 2048
TO_KEYS = (64, 128, 8, 4)
# From so many keys in a window on, the pass that stores pairs reads them again itself.
NEAR = 512
# Warps and stages of the one for two such blocks.
SHARED = (4, 3)


# Gluon, the language they are in, changes with every Triton: those that they were run with. They
# compile with 3.7 to 3.9, too, and run there if this variable of the environment is 1.
CHECKED, ANY = ("3.6.",), "MERCER_GROUPS"


@lru_cache(maxsize=16)
def available(device: torch.device) -> bool:
    """Whether they run: on Hopper, with a Triton that they were run with, or with any."""
    if INTERPRETED or not on_hopper(device):
        return False
    return _checked() or os.environ.get(ANY) == "1"


def _checked() -> bool:
    """Whether they were run with this Triton."""
    import triton

    return triton.__version__.startswith(CHECKED)


def forwards(p: Plan) -> bool:
    """Whether the forward is one of these.

    Of few features, where a peak is looked for and a query sees many keys, Triton's is 2 % faster.
    """
    c, (q0, _, k0, columns, v, _) = p.constants, p.aligned
    # Rows of bytes, too, begin at multiples of 16 for the copy engine.
    alike = c["E0"] == c["V"] in FORWARDS and c["E1"] == 0 and p.widths[2] % 16 == 0
    plain = c["FORM"] == PLAIN and not (c["HAS_ROW0"] or c["DROPOUT"]) and c["CLIP"] < 0
    # Numbers per key are columns of a product.
    plain = plain and p.dtype.itemsize == 2 and (not c["HAS_COL0"] or (p.spread and columns))
    few = len(p.static.filter) == 1 and min(p.num_keys, _window(p)) <= SHORT
    plain = plain and (p.still or few or c["V"] > NARROW)
    return plain and alike and available(p.device) and q0 and k0 and v


def says_tops(p: Plan) -> bool:
    """Whether the forward says how large values are, which `sums` asks for.

    A program has those of its queries' own places before it last, where they see them.
    """
    narrow = p.constants["V"] == NARROW and _own_last(p) and _seen(p) >= MANY_KEYS
    return p.static.trains and narrow and forwards(p)


def empty_tops(p: Plan, like: Tensor) -> Tensor:
    batch, heads, num_queries = p.static.shape
    return like.new_empty(batch * heads, -(-num_queries // GROUP), dtype=torch.float32)


def forward(x: Inputs, p: Plan, ready: Numbers, out: Tensor, low: Tensor, lse: Tensor) -> None:
    """out, what rounding took from it where there is room for that, and log_mass."""
    c, keeps, tops = p.constants, low.numel() > 0, ready.tops.numel() > 0
    batch, heads, num_queries = p.static.shape
    wide, parts = c["V"] > NARROW, batch * heads
    # Of two times 128 queries each.
    pairs = -(-num_queries // (4 * GROUP))
    launch = p.launches.get(("groups-forward", keeps, tops))
    if launch is None:
        from .kernels import forward_64 as triton_narrow
        from .kernels import forward_128 as triton_wide

        constants = {name: c[name] for name in ("E0", "V", "MODE0", "LOG0", "FILTER", "SIMPLE")}
        constants |= {"HAS_LOW": keeps, "SPREAD": c["HAS_COL0"], "STILL": p.still}
        constants["STAGES"] = 4 if wide else 3
        if wide:
            grid = (min(2 * pairs * parts, processors(p.device)), 1, 1)
            launch = Launch(triton_wide.forward, grid, constants, {"num_warps": 4})
        else:
            grid, constants["HAS_TOPS"] = (-(-num_queries // GROUP), parts, 1), tops
            options = {"num_warps": 4, "maxnreg": NARROW_REGISTERS}
            launch = Launch(triton_narrow.forward, grid, constants, options)
        p.launches["groups-forward", keeps, tops] = launch
    columns = _of(ready.columns, 16, swizzle=32) if c["HAS_COL0"] else x.v
    tensors = (
        _of(x.q[0]), _of(x.k[0]), columns, _of(x.v), x.scale[0],
        x.v if x.lengths is None else x.lengths, x.v if x.ids is None else x.ids, _of(out),
        _of(low, bits=8, swizzle=c["V"]) if keeps else x.v, lse,
    )  # fmt: skip
    if wide:
        launch(tensors, (*p.numbers(x.seed), pairs, parts))
    else:
        launch((*tensors, ready.tops), p.numbers(x.seed))


def takes(p: Plan, grad: Tensor, banded: bool = False) -> bool:
    """Whether the pass over keys is one of these; `banded`: with a band of all pairs."""
    c, (q0, q1, k0, k1, v, _) = p.constants, p.aligned
    two = c["E1"] > 0
    plain = not (c["LINK0"] or c["HAS_ROW0"] or c["DROPOUT"]) and (c["CLIP"] < 0 or banded)
    plain = plain and p.dtype.itemsize == 2
    if two:
        plain = plain and c["SAME"] and not c["HAS_COL1"] and c["E1"] in (64, 128)
        plain = plain and q1 and k1
    narrow = c["E0"] in (64, 128) and c["V"] in (64, 128)
    return plain and narrow and available(p.device) and q0 and k0 and v and tma_readable(grad)


def stores(p: Plan, grad: Tensor) -> bool:
    """Whether the gradients of queries come from what the pass over keys stores, heads by heads."""
    c = p.constants
    wide = c["E0"] + c["E1"] + c["V"] >= WIDE and len(p.static.filter) == 1
    # Numbers per key as columns of a product, where scales of queries need them.
    steered = c["MODE0"] == 2 and c["HAS_COL0"] and not p.spread
    return wide and not steered and takes(p, grad) and _share(p) > 0


def _share(p: Plan) -> int:
    """How many heads are stored at a time; 0 where those would leave the device half idle."""
    batch, heads, _ = p.static.shape
    blocks, total = _aligned(p.num_keys) // (2 * GROUP), batch * heads
    most = PAIRS // (_aligned(p.num_keys) * _columns(p))
    if most >= total:
        return total
    # In equal shares.
    count = -(-total // -(-total // most)) if most else 0
    return count if count * blocks >= LEAST * processors(p.device) else 0


def keys(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...], dband: Tensor | None
) -> None:  # fmt: skip
    """The pass over keys."""
    c, banded = p.constants, dband is not None
    pairs = x.v if dband is None else _of(dband, GROUP)
    tensors = _tensors(x, p, ready, rows, of_keys, pairs)
    for part in key_parts(p.static.slots, c["E0"] + c["E1"] + c["V"] > ROOM):
        launch = _keys(p, part, store=2 * banded, banded=banded)
        launch(tensors, (*p.numbers(x.seed), *_order(p), 0, 0))


def all_passes(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...],
    of_queries: tuple[Any, ...], done: Tensor, lse: bool,
) -> list[Tensor]:  # fmt: skip
    """The pass over keys, and all that follows from what it stores, some heads at a time.

    `done` counts, from 0 on, blocks of keys that are done with some queries. Gradients of scales
    come back where they are summed up on the way.
    """
    c, static = p.constants, p.static
    batch, heads, _ = static.shape
    dq, ds, *_ = of_queries
    two = c["E1"] > 0
    count = _share(p)
    pairs = _space(x.v, 1, count, _aligned(p.num_keys), _columns(p))
    if joins(p, lse):
        _join(x, p, ready, rows, of_keys, dq[0], pairs, done, lse)
        return []
    tensors = _tensors(x, p, ready, rows, of_keys, _of(pairs, GROUP))
    lengths = tensors[8]
    bm, bn, *_ = _to_queries(p)
    shares, scales = _shares(p, lse), []
    to_queries: tuple[Any, ...] = (
        tma_descriptor(pairs, bn, bm),
        tma_descriptor(x.k[0], bn, c["E0"]),
    )
    if shares:
        scales = [ds[0].new_empty(heads)] if scale_by_keys(p, lse) else []
        to_queries += (x.scale[0], lengths, dq[0], ds[0], *(scales or ds[:1]))
    else:
        second = tma_descriptor(ready.columns, bn, 16) if p.spread else x.v
        to_queries += (
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
    for offset in range(0, batch * heads, count):
        own = min(count, batch * heads - offset)
        numbers = (*p.numbers(x.seed), offset)
        launch = _keys(p, 1 if two else 0, own, store=_together(p), by_keys=scale_by_keys(p, lse))
        launch(tensors, (*p.numbers(x.seed), *_order(p, own), offset, 0))
        if shares:
            # With the last heads, all have given their shares to scales.
            last = bool(scales) and offset + own == batch * heads
            _reader(p, "stored_to_two", own, lse, last)(to_queries, numbers)
        else:
            _reader(p, "stored_to_queries", own, lse)(to_queries, numbers)
        if two and static.slots[1].keys:
            _reader(p, "stored_to_keys", own, lse)(to_keys, numbers)
    return scales


def joins(p: Plan, lse: bool) -> bool:
    """Whether the pass that stores pairs reads them, too, while they are in the cache.

    In a causal window of places. Not for scales of queries, which have gradients of their own.
    """
    c, slot, (batch, heads, _) = p.constants, p.static.slots[0], p.static.shape
    alone = c["E1"] == 0 and c["E0"] == c["V"] == 2 * GROUP and c["MODE0"] < 2
    alone = alone and (not slot.wants or scale_by_keys(p, lse))
    if not (alone and _own_last(p) and NEAR <= _window(p) <= SHORT):
        return False
    return _share(p) == batch * heads >= _at_once(p) / 2


def _at_once(p: Plan) -> int:
    """Heads of which all keys that a query sees are at work at once, on four processors of five."""
    return max(1, 4 * processors(p.device) // (5 * (_reach(p) + 1)))


def _reach(p: Plan) -> int:
    """Blocks of keys of a program, at most, before that of a query, of which that sees one."""
    return -(-(int(_window(p)) - 1) // (2 * GROUP))


def _join(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...], dq: Tensor,
    pairs: Tensor, done: Tensor, lse: bool,
) -> None:  # fmt: skip
    """The pass over keys that forms gradients of queries, too, from what it stores."""
    counted = rows.delta, rows.delta, rows.delta, done
    joined = _of(dq), pairs
    tensors = _tensors(x, p, ready, rows, of_keys, _of(pairs, GROUP), counted, joined)
    blocks, parts, last, _ = _order(p)
    # As many each time.
    together = -(-parts // -(-parts // _at_once(p)))
    launch = _keys(p, 0, store=1, by_keys=scale_by_keys(p, lse), joined=True)
    launch(tensors, (*p.numbers(x.seed), blocks, parts, last, together, 0, _columns(p)))


def sums(p: Plan, grad: Tensor) -> bool:
    """Whether the pass over keys sums up gradients of queries, too."""
    c = p.constants
    narrow = c["E0"] == c["V"] == SUMMED and c["E1"] == 0 and len(p.static.filter) == 1
    # A scale of each query takes numbers per key as columns of products, and sums of them a bound.
    narrow = narrow and (c["MODE0"] < 2 or (p.spread and p.bounded)) and _seen(p) >= MANY_KEYS
    # What adds by the copy engine is no part of Gluon, and may be called otherwise: see `add_to`.
    return narrow and takes(p, grad) and _checked()


def one_pass(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...],
    of_queries: tuple[Any, ...], made: tuple[Tensor, Tensor, Tensor], lse: bool,
) -> Tensor:  # fmt: skip
    """All gradients; `rows` are formed here. Those of scales come back, where they are wanted."""
    from .kernels import dq_fixed_point as kernels

    c, slot = p.constants, p.static.slots[0]
    batch, heads, num_queries = p.static.shape
    grad_out, lse2, delta, grad_lse, counters = rows
    dq, ds, *_ = of_queries
    blocks, key_blocks, parts = -(-num_queries // GROUP), -(-p.num_keys // GROUP), batch * heads
    whole = delta.new_empty((batch, heads, SUMMED, blocks * GROUP), dtype=torch.int32)
    bounds, most = delta.new_empty(parts, 2, blocks), delta.new_empty(parts, 2, key_blocks)
    each = c["MODE0"] == 2 and slot.wants
    shares = delta.new_empty(parts, blocks * GROUP if each else 0, dtype=torch.int32)
    begun = delta.new_empty(parts, blocks, dtype=torch.int32)
    order = _order(p, summed=True)
    # The heads from here on begin with zeros.
    cleared = parts - order[2] if _begins(p) else 0
    numbers = p.numbers(x.seed)
    lengths = x.v if x.lengths is None else x.lengths
    flags = {"E0": c["E0"], "HAS_LSE": lse, "TOKENS": p.static.tokens}
    before = {
        "V": c["V"], "FILTER": c["FILTER"], "HAS_LOW": made[1].numel() > 0,
        # Numbers per key that are norms, and nothing else, say how large keys are.
        "NORMS": p.bounded, "EACH": each, "HAS_TOPS": ready.tops.numel() > 0,
    }  # fmt: skip
    start(
        kernels.before_sums, (blocks + key_blocks, parts, 1), flags | before,
        (x.k[0], x.v, ready.tops, ready.col0, lengths, grad_out, grad_lse, *made, delta, lse2,
         counters, bounds, most, shares, begun, whole),
        (*numbers, cleared),
    )  # fmt: skip
    found = _of(whole, GROUP, 32)
    tensors = _tensors(x, p, ready, rows, of_keys, found, (bounds, most, shares, begun))
    _keys(p, 0, summed=True, fresh=cleared > 0)(tensors, (*numbers, *order, 0, 0))
    alike = slot.wants and not each
    dscale = delta.new_empty(heads if alike else 0)
    after = {name: c[name] for name in ("MODE0", "LOG0", "HAS_COL0")} | {"EACH": each}
    start(
        kernels.after_sums, (blocks + alike, parts, 1), flags | after | {"ROOM": next_power_of_two(key_blocks)},
        (whole, shares, x.q[0], x.scale[0], ready.col0, grad_lse, lse2, bounds, most, ds[0], dscale,
         dq[0]),
        numbers,
    )  # fmt: skip
    return ds[0][..., :num_queries] if each else dscale


def _begins(p: Plan) -> bool:
    """Whether sums of queries begin with what keys at their places give; nobody clears them then.

    Not where queries have scales of their own: there are no registers for it. And only in a window:
    without one it was slower.
    """
    few = min(GROUP * WATCHED, p.num_keys // 2)
    return _own_last(p) and p.constants["MODE0"] < 2 and _window(p) <= few


def _own_last(p: Plan) -> bool:
    """Whether every query sees the key at its place, and none after it."""
    if len(p.static.filter) > 1:
        return False
    ((causal, _, right, memory, *others),) = p.static.filter
    along = right == 0 or (causal > 0 and right < 0)
    return along and memory < 0 and not any(others) and p.static.shape[2] == p.num_keys


def _to_queries(p: Plan) -> tuple[int, int, int, int]:
    short = min(p.num_keys, _window(p)) <= SHORT
    return TO_SHORT if short and not p.constants["E1"] else TO_QUERIES


def _shares(p: Plan, lse: bool) -> bool:
    """Whether two blocks of queries share keys, where only gradients of queries are wanted."""
    slot = p.static.slots[0]
    return _to_queries(p) == TO_SHORT and (not slot.wants or scale_by_keys(p, lse))


def _together(p: Plan) -> int:
    """How many blocks of queries a program reads at a time."""
    return _to_queries(p)[0] // GROUP


def _seen(p: Plan) -> float:
    """How many keys a query sees, on average, by a filter of places."""
    causal = p.static.filter[0][0]
    return min(_window(p), p.num_keys - causal * p.static.shape[2] / 2)


def _window(p: Plan) -> float:
    """How many keys a filter shows to a query, at most."""
    ((causal, left, right, *_),) = p.static.filter
    ahead = 0 if causal else right
    return left + 1 + ahead if min(left, ahead) >= 0 else math.inf


def _columns(p: Plan) -> int:
    """How many queries may see one of the keys of a program, from block to block."""
    whole = _aligned(p.static.shape[2])
    # A window may show a block more: see _odd.
    seen = _window(p) + 2 * GROUP
    return whole if math.isinf(seen) else min(whole, _aligned(int(seen)) + 2 * GROUP)


def scale_by_keys(p: Plan, lse: bool) -> bool:
    """Whether keys alone give the gradient of a head's scale, and nobody reads queries for it.

    Not with a gradient of log_mass, of which each query has a share of its own.
    """
    slots = p.static.slots
    return len(slots) == 1 and slots[0].wants and p.constants["MODE0"] == 1 and not lse


def _space(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape)


def _aligned(length: int) -> int:
    return -(-length // (2 * GROUP)) * 2 * GROUP


def _tensors(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...], pairs: Any,
    bounds: tuple[Tensor, ...] = (), joined: tuple[Any, ...] = (),
) -> tuple[Any, ...]:  # fmt: skip
    grad_out, lse2, delta, _, counters = rows
    bounds = bounds or (delta, delta, delta, counters)
    dk, dv, dcol, ds = of_keys
    two = p.constants["E1"] > 0
    q1, k1, dk1 = (_of(x.q[1]), _of(x.k[1]), _of(dk[1])) if two else (x.v, x.v, x.v)
    tiles = _of(ready.band, GROUP) if ready.band.numel() else x.v
    return (
        _of(x.q[0]), _of(x.k[0]), q1, k1, _of(x.v), tiles, x.scale[0], ready.col0,
        x.v if x.lengths is None else x.lengths, x.v if x.ids is None else x.ids, _of(grad_out),
        lse2, delta, pairs, _of(dk[0]), dk1, _of(dv), *(joined or (x.v, x.v)), dcol[0],
        *bounds, counters, ds[0],
    )  # fmt: skip


def _keys(
    p: Plan, part: int, heads: int = 0, *, store: int = 0, banded: bool = False,
    summed: bool = False, fresh: bool = False, by_keys: bool = False,
    joined: bool = False,
) -> Launch:  # fmt: skip
    key = ("groups", part, heads, store, banded, summed, fresh, by_keys, joined)
    found = p.launches.get(key)
    if found is not None:
        return found
    from .kernels import backward_keys as triton_hopper

    c, slot = p.constants, p.static.slots[0]
    names = ("E0", "E1", "V", "MODE0", "LOG0", "HAS_COL0", "FILTER", "SIMPLE")
    # Bytes of a row of all features; a block has two or three numbers beside each. Barriers and
    # tickets take less than 1024.
    row = 2 * (c["E0"] + c["E1"] + c["V"])
    left = shared_memory(p.device) - 4 * GROUP * GROUP * (store > 0) - 1024
    # Blocks of pairs, of sums of 32 bits, and of keys, that the group has which sums up.
    passing = 2 * triton_hopper.SLOTS.value + 2 * triton_hopper.LEAVING.value + 2
    left -= 2 * passing * GROUP * GROUP * summed
    # Columns: of two turns' keys, of ones, of a block's queries; float16 ends too early for them.
    sides = summed and p.dtype == torch.bfloat16
    left -= 5 * 2 * 16 * GROUP * sides
    # Otherwise numbers per key lie beside the keys, of two turns at most.
    left -= 2 * 2 * 4 * GROUP * (c["HAS_COL0"] and not sides)
    step = GROUP * (row + 4 * GROUP * banded + (8 + 2 * 16 if sides else 12))
    kept = 2 * GROUP * row
    blocks, parts, *_ = _order(p, heads)
    # Where there is room, the next keys come while these are at work. Pairs that are read again lie
    # with the keys of one turn.
    buffers = 2 if (left - 2 * kept) // step >= 3 and not joined else 1
    constants = {name: c[name] for name in names} | {
        "NORM0": slot.norm, "WANT0": slot.wants, "SAVE_COL0": slot.saves, "PART": part,
        "STAGES": min(3, (left - buffers * kept) // step), "BUFFERS": buffers, "STORE": store,
        "SUMMED": summed, "BANDED": banded,
        "HELD": not banded and max(c["E0"], c["E1"], c["V"]) <= GROUP,
        "SIDES": sides, "FRESH": fresh, "BY_KEYS": by_keys or summed,
        "JOINED": joined,
    }  # fmt: skip
    grid = (min(blocks * parts, processors(p.device)), 1, 1)
    # Spilled registers go to L1, or, if that is too small, to L2.
    found = p.launches[key] = Launch(
        triton_hopper.backward_keys, grid, constants, {"num_warps": 4}, reserve_l1=True
    )
    return found


def _order(p: Plan, heads: int = 0, *, summed: bool = False) -> tuple[int, int, int, int]:
    """Blocks of keys; heads, of which some may come at a time; those at the end, longest first.

    And how many of the others take turns, where sums begin without zeros.
    """
    batch, all_heads, num_queries = p.static.shape
    blocks, parts = -(-p.num_keys // (2 * GROUP)), heads or batch * all_heads
    count = processors(p.device)
    last = parts if blocks * parts < ROUNDS * count else min(parts, -(-LAST * count // blocks))
    together = 1
    if summed:
        last = max(1, min(last, CACHED // (4 * SUMMED * num_queries)))
        if _begins(p) and last < parts:
            # As many each time; those that are left over are among the last.
            reach = int(min(num_queries, _window(p) + 2 * GROUP))
            rounds = -(-(parts - last) // max(1, min(TOGETHER, CACHED // (4 * SUMMED * reach))))
            together = (parts - last) // rounds
            last = parts - together * rounds
    return blocks, parts, last, together


def _reader(p: Plan, name: str, heads: int, lse: bool, last: bool = False) -> Launch:
    key = (name, heads, lse, last)
    found = p.launches.get(key)
    if found is not None:
        return found
    from .kernels import dq_from_scores as triton_stored

    c, slot = p.constants, p.static.slots[0]
    flags: dict[str, Any] = {"TOKENS": p.static.tokens}
    if name == "stored_to_queries":
        bm, bn, warps, stages = _to_queries(p)
        names: tuple[str, ...] = ("E0", "E1", "MODE0", "LOG0", "HAS_COL0", "FILTER")
        blocks = -(-p.static.shape[2] // bm)
        own = {"NORM0": slot.norm, "WANT0": slot.wants, "HAS_LSE": lse}
        flags = own | {"BY_KEYS": scale_by_keys(p, lse)} | flags
    elif name == "stored_to_two":
        bm, bn, _, _ = TO_SHORT
        warps, stages = SHARED
        names, flags = ("E0", "MODE0", "LOG0", "FILTER"), {"SCALE": last} | flags
        # The first of a head is not for queries then.
        blocks = -(-p.static.shape[2] // (2 * bm)) + last
    else:
        bm, bn, warps, stages = TO_KEYS
        names, blocks = ("E1", "FILTER"), -(-p.num_keys // bn)
        # As many queries as the other reader takes at a time.
        flags["ALIGN"] = _to_queries(p)[0]
    constants = {name: c[name] for name in names} | flags | {"BM": bm, "BN": bn}
    options = {"num_warps": warps, "num_stages": stages}
    kernel = getattr(triton_stored, name)
    found = p.launches[key] = Launch(kernel, (blocks, heads, 1), constants, options)
    return found


def _of(x: Tensor, width: int = 0, bits: int = 16, swizzle: int = 128) -> Any:
    """x for the copy engine, in blocks of 64 rows."""
    cls, layout = _descriptor(bits, swizzle)
    found: Any = object.__new__(cls)
    block = tma_descriptor(x, GROUP, width or next_power_of_two(x.shape[-1]))
    found.__dict__.update(block.__dict__, layout=layout)
    return found


@lru_cache(maxsize=4)
def _descriptor(bits: int, swizzle: int) -> tuple[Any, Any]:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor, NVMMASharedLayout(swizzle, bits, 4)
