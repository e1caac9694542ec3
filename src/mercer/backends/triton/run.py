"""From tensors to launches of the fused kernels, with as little work as possible in each call.

A call computes the numbers per key and per query, looks up its `Plan`, and starts the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..runtime.device import processors
from ..runtime.launch import Launch, start
from . import tables
from .codes import LENGTHS, NORMS, NOTHING, NOWHERE, PART, SPLIT_QUERIES
from .layout import aligned_copy, empty, next_power_of_two, strides_of, tma_descriptor, tma_readable
from .numbers import prepare
from .plan import Inputs, Numbers, Plan, Rows, counters, cut_at_reach, key_parts, plan, stores
from .reductions import of_all, reduced, to_scales
from .select import forward_launch, keys_launch, queries_launch
from .static import Static, are_few


def _find_tier() -> Any:
    """The kernels for Hopper GPUs, or None where that folder is not installed."""
    found = find_spec(f"{__package__}.hopper")
    # An empty folder is found, too, but has no origin.
    missing = found is None or found.origin is None
    return None if missing else import_module(f"{__package__}.hopper.tier")


TIER = _find_tier()

# The registers hold two slots and the values up to this width. Wider ones take a pass over the keys
# for each slot.
ROOM = 512
# With keys cut into parts: programs per SM, and the most parts that are merged.
AT_WORK, MOST_PARTS = 4, 64


def _tensors(x: Inputs, ready: Numbers, p: Plan, launch: Launch, kind: str) -> list[Any]:
    """The tensors that all kernels take first. Blocks that a loop reads are TMA descriptors."""
    tensors: list[Any] = [
        x.q[0], x.k[0], x.q[-1], x.k[-1], x.v, x.scale[0], x.scale[-1], ready.row0, ready.row1,
        ready.col0, ready.col1, ready.band, ready.band,
        x.v if x.lengths is None else x.lengths, x.v if x.ids is None else x.ids,
    ]  # fmt: skip
    c = launch.constants
    if c["TABLE"].tiled:
        tensors[12] = tma_descriptor(ready.band, c["BM"], c["BN"])
    if c["TMA"]:
        rows = c["BM"] if kind == "keys" else c["BN"]
        first, second = (0, 2) if kind == "keys" else (1, 3)
        tensors[first] = tma_descriptor(tensors[first], rows, p.constants["E0"])
        if e1 := p.constants["E1"]:
            tensors[second] = tma_descriptor(tensors[second], rows, e1)
        if kind != "keys":
            tensors[4] = tma_descriptor(tensors[4], rows, c["V"])
    return tensors


def forward(x: Inputs, static: Static) -> tuple[Tensor, Tensor, Tensor, Numbers]:
    """(out, log_mass without the rows of plain factors, rounding error of out, numbers)."""
    v = x.v
    batch, heads, num_queries = static.shape
    if are_few(num_queries, v.shape[2]) and not static.trains:
        return _few(x, static)
    ready = prepare(x, static, tables.form(x.bias, static, v))
    keeps = keeps_low(static, v)
    p, *others = _plans_of(x, static, ready)
    out, low, lse = forward_of(x, p, ready, keeps=keeps)
    for other in others:
        from .kernels.forward import merge_far

        far = forward_of(x, other, ready, keeps=keeps)
        band = ready.band
        start(
            merge_far, (-(-num_queries // 64), batch * heads, 1),
            {"V": p.constants["V"], "BM": 64, "HAS_LOW": keeps, "TOKENS": static.tokens},
            (out, low, lse, *far, band),
            (heads, num_queries, v.shape[-1], *strides_of(band, batch)),
        )  # fmt: skip
    return out, lse, low, ready


def _few(x: Inputs, static: Static) -> tuple[Tensor, Tensor, Tensor, Numbers]:
    """`forward` for few queries: programs share the keys, so that all SMs are busy."""
    shape, group = static.shape, _group(x, static)
    inside = _inside(x, static)
    band = tables.form(x.bias, static, x.v)
    ready = prepare(x, static, band, inside, few=True)
    if group > 1:
        # Heads that share keys become queries at one place, so that keys are read once.
        x = replace(x, q=[_grouped(y, group) for y in x.q])
        ready = ready._replace(band=_grouped(band, group)) if band.numel() else ready
        static = static._replace(shape=(shape[0], shape[1] // group, group), grouped=True)
    (p,) = _plans_of(x, static, ready)
    out, low, lse = forward_of(x, p, ready, _parts(p), inside)
    return out.view(*shape, -1), lse.view(shape), low, ready._replace(band=band)


def _inside(x: Inputs, static: Static) -> tuple[int, int]:
    """INSIDE of each slot: what the kernel computes from keys (see codes.py)."""
    found = [
        NORMS if slot.norm and not col.numel() else LENGTHS if slot.unit else NOTHING
        for slot, col in zip(static.slots, x.col, strict=True)
    ]
    if len(found) == 2:
        return (found[0], found[1]) if static.summed else NOWHERE
    return found[0], NOTHING


def _group(x: Inputs, static: Static) -> int:
    """How many heads share all of their keys, if there is one query; else 1.

    Numbers per key may belong to fewer or to more heads.
    """
    _, heads, num_queries = static.shape
    counts = [y.shape[1] for y in (*x.k, x.v)]
    most = max(counts)
    counts += [y.shape[1] for y in x.col if y.numel() and y.shape[1] < most]
    fits = num_queries == 1 and heads // most <= SPLIT_QUERIES
    return heads // most if fits and all(most % count == 0 for count in counts) else 1


def _grouped(x: Tensor, group: int) -> Tensor:
    """[B, H, 1, E] as [B, H / group, group, E]."""
    return x[:, :, 0].unflatten(1, (-1, group))


def _plans_of(x: Inputs, static: Static, ready: Numbers) -> list[Plan]:
    """The plans of a call: one, or with a table that within its reach and that beyond."""
    return [plan(x, part, ready) for part in cut_at_reach(static, x.v.shape[2])]


def forward_of(
    x: Inputs, p: Plan, ready: Numbers, parts: int = 0, inside: tuple[int, int] = NOWHERE,
    keeps: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, its rounding error, log_mass) of one plan.

    `parts`: the number of parts of the keys for few queries.
    """
    static, v = p.static, x.v
    batch, heads, num_queries = static.shape
    out = empty(v, *static.shape, v.shape[-1], static.tokens)
    lse = v.new_empty(static.shape, dtype=torch.float32)
    low = empty_low(out, keeps)
    tier = None if parts else TIER
    if tier is not None and tier.forward(x, p, ready, out, low, lse, _outcome):
        return out, low, lse
    targets = (out, low, lse)
    if parts > 1:
        targets = (lse.new_empty(parts, *out.shape), low, lse.new_empty(parts, *lse.shape))
    launch = forward_launch(p, parts=parts, inside=inside, low=low.numel() > 0)
    launch((*_tensors(x, ready, p, launch, "forward"), *targets), p.numbers(x.seed))
    if parts > 1:
        from .kernels.forward import merge

        rows = batch * heads * num_queries
        start(
            merge, (rows, 1, 1), {"PARTS": 1 << (parts - 1).bit_length(), "V": p.constants["V"]},
            (targets[0], targets[2], out, lse), (rows, parts, v.shape[-1]),
        )  # fmt: skip
    return out, low, lse


def keeps_low(static: Static, v: Tensor) -> bool:
    """Whether to keep the rounding error of the output."""
    half = v.dtype.itemsize == 2
    return half and (static.precise or (static.trains and static.clip >= 0))


def empty_low(out: Tensor, keeps: bool) -> Tensor:
    """An empty tensor for an output's rounding error: eight bits per number."""
    if not keeps:
        return out.new_empty(0, dtype=torch.int8)
    return torch.empty_like(out, dtype=torch.int8)


def _parts(p: Plan) -> int:
    """The number of parts of the keys for few queries, so that all SMs are busy."""
    batch, heads, _ = p.static.shape
    most = AT_WORK * processors(p.device) // (batch * heads)
    return max(1, min(p.num_keys // PART, most, MOST_PARTS))


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, low: Tensor, x: Inputs,
    static: Static, band: Tensor, ready: Numbers | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of q, k, v, scale, row, col, and of the table or its queries and rows.

    What needs none has None.
    """
    v = x.v
    ready = prepare(x, static, band) if ready is None else ready
    plans = _plans_of(x, static, ready)
    p = plans[0]
    (batch, heads, num_queries), num_keys = static.shape, p.num_keys
    tokens = static.tokens
    grad_out = aligned_copy(grad_out, tokens)
    given_lse = grad_lse is not None
    if grad_lse is not None:
        grad_lse = aligned_copy(grad_lse)
    elif static.clip >= 0 or any(slot.link for slot in static.slots):
        grad_lse = torch.zeros_like(lse)
    else:
        # No kernel reads it.
        grad_lse = lse
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    width = v.shape[-1]
    slots = static.slots
    none = lse.new_empty(0)
    dq = [empty(y, batch, heads, num_queries, y.shape[-1], tokens) for y in x.q]
    dk = [empty(y, batch, heads, num_keys, y.shape[-1], tokens) for y in x.k]
    dv = empty(v, batch, heads, num_keys, width, tokens)
    ds = [
        lse.new_empty(batch, heads, num_queries + num_keys) if slot.wants else none
        for slot in slots
    ]
    drow = [torch.empty_like(y) if y.numel() else y for y in x.row]
    dcol = [lse.new_empty(batch, heads, num_keys) if slot.saves else none for slot in slots]
    dband = tables.empty_gradient(band, static, v) if static.clip >= 0 else (delta, delta)
    rows = Rows(grad_out, lse2, delta, grad_lse, counters(lse))
    of_keys = (dk, dv, dcol, ds)
    within = (dq, ds, drow, *dband)
    made = (out, low, lse)
    of_bias: list[Tensor] = []
    banded = x.bias.rows is not None and stores(p)
    whole = len(plans) == 1
    way = TIER.way(x, p, grad_out, _outcome) if whole and TIER is not None else ""
    if banded or way == "stores":
        from .kernels.norms import deltas

        start(
            deltas, (-(-num_queries // 64), batch * heads, 1),
            {"WIDTH": next_power_of_two(width), "BM": 64, "HAS_LSE": given_lse, "HAS_LOW": low.numel() > 0,
             "TOKENS": tokens},
            (grad_out, grad_lse, out, low, lse, delta, lse2, rows.counters),
            (heads, num_queries, width),
        )  # fmt: skip
    scales: list[Tensor] | None = None
    stored = False
    if way == "sums":
        scales = TIER.one_pass(x, p, ready, rows, of_keys, within, made, given_lse)
    elif way == "stores":
        stored = TIER.all_passes(x, p, ready, rows, of_keys, within, given_lse)
    alone = stored and TIER.scale_by_keys(p, given_lse)
    done = stored or scales is not None
    if banded and not done:
        _backward_keys(x, p, ready, rows, of_keys, dband[0])
        of_bias = tables.gradients(dband, x.bias, static, v, (x.k[0], dq[0]))
    elif not done:
        backward_of(x, p, ready, rows, of_keys, within, made, lse=given_lse, cut=len(plans) > 1)
    for p in plans[1:]:
        # Beyond its reach a table only shifts log_mass.
        backward_of(x, p, ready, rows._replace(lse2=lse2 - band[..., 0]), of_keys, within)
    scales = scales or [
        to_scales(y, to, slot, num_queries, alone)
        for y, to, slot in zip(ds, x.scale, slots, strict=True)
    ]
    if static.clip >= 0 and not of_bias:
        of_bias = tables.gradients(dband, x.bias, static, v)
    return [
        *[reduced(y, to) for y, to in zip(dq, x.q, strict=True)],
        *[
            reduced(y, to) if slot.keys or not n else None
            for n, (y, to, slot) in enumerate(zip(dk, x.k, slots, strict=True))
        ],
        reduced(dv, v),
        *[of_all(y, to) if y.numel() else None for y, to in zip(scales, x.scale, strict=True)],
        *[y if y.numel() else None for y in drow],
        *[reduced(y, to) if y.numel() else None for y, to in zip(dcol, x.col, strict=True)],
        *of_bias,
    ]


def backward_of(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...], of_queries: tuple[Any, ...],
    made: tuple[Tensor, Tensor, Tensor] | None = None, *, lse: bool = False, cut: bool = False,
) -> None:  # fmt: skip
    """Both passes of one plan.

    With `made`, the results of the forward, it fills `rows`. Without, it adds its share to the
    gradients of an earlier plan.
    """
    grad_out, lse2, *_ = rows
    first, low = made is not None, made is not None and made[1].numel() > 0
    dq, ds, drow, dband, ends = of_queries
    launch = queries_launch(p, add=not first, cut=cut, lse=lse, low=low)
    c = launch.constants
    if c["TABLE"].tiled:
        dband = tma_descriptor(dband, c["BM"], c["BN"])
    launch(
        (*_tensors(x, ready, p, launch, "queries"), *rows, *(made or (grad_out, grad_out, lse2)),
         dq[0], dq[-1], ds[0], ds[-1], drow[0], drow[-1], dband, ends),
        p.numbers(x.seed),
    )  # fmt: skip
    _backward_keys(x, p, ready, rows, of_keys, add=not first)


def _backward_keys(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...],
    dband: Tensor | None = None, *, add: bool = False,
) -> None:  # fmt: skip
    """The pass over keys. With `dband` it stores the gradients of all pairs there."""
    grad_out, lse2, delta, *_ = rows
    slots = p.static.slots
    dk, dv, dcol, ds = of_keys
    tier = None if add else TIER
    if tier is not None and tier.keys(x, p, ready, rows, of_keys, dband, _outcome):
        return
    wide = p.constants["E0"] + p.constants["E1"] + p.constants["V"] > ROOM
    for part in key_parts(slots, wide):
        launch = keys_launch(
            p, grad_by_tma=tma_readable(grad_out), part=part, add=add, store=dband is not None
        )
        c = launch.constants
        launch(
            (*_tensors(x, ready, p, launch, "keys"),
             tma_descriptor(grad_out, c["BM"], c["V"]) if c["TMA"] else grad_out,
             lse2, delta, delta if dband is None else tma_descriptor(dband, c["BM"], c["BN"]),
             dk[0], dk[-1], dv, dcol[0], dcol[-1], ds[0], ds[-1]),
            p.numbers(x.seed),
        )  # fmt: skip


def _outcome(x: Inputs, static: Static, backward_too: bool) -> list[Tensor]:
    """The outputs or gradients of a call, by the kernels that this thread may use now."""
    out, lse, low, ready = forward(x, static)
    if not backward_too:
        return [out, lse]
    draw = torch.Generator(out.device).manual_seed(1)
    grad = torch.randn(out.shape, generator=draw, device=out.device).to(out.dtype)
    found = backward(grad, None, out, lse, low, x, static, ready.band, ready)
    return [y for y in found if y is not None]
