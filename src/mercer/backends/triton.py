"""Fused kernels on the GPU: any term of one or two factors, forward and backward, any filter.

What this must meet: memory linear in T; no silent TF32; the number per key, scales, rows and
tables in float32, each with its gradient and without atomics; feature parts read where they lie.
The kernels are in triton_kernels.py and triton_backward.py, in one opaque operator each way.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..links import Matern12, Matern32, Matern52, Power, Rational
from ..term import Factor, Link, Smoothed, Term, join, repeat
from . import Task, clauses

name = "triton"
INSTALLED = importlib.util.find_spec("triton") is not None
# Triton's own interpreter, in which the tests run these kernels on a CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_WIDTH = 256
MAX_DISTANCES = 4097
LINKS: dict[type, int] = {Power: 1, Rational: 2, Matern12: 3, Matern32: 4, Matern52: 5}


def refuses(task: Task) -> str | None:
    """Why the fused kernels cannot run this term, or None."""
    if (why := _unavailable(task.device.type)) is not None:
        return why
    if task.v.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it computes in float32, and came with {task.v.dtype}"
    if 0 in (task.batch, task.num_queries, task.num_keys):
        return "there is nothing to smooth: an empty batch or sequence"
    if task.batch * task.heads > 65535:
        return "there are more than 65535 heads in the batch"
    if task.term.signed:
        return "its weights may be negative"
    unknown = [link for link in task.term.links if type(link) not in LINKS]
    if unknown:
        return f"it has no kernel for the link {unknown[0].formula}"
    if not task.term.factors:
        return "it needs a dot product, and the term is a table alone"
    slots = _slots(task.term, task.v.dtype)
    if isinstance(slots, str):
        return slots
    if task.term.table is not None and task.term.table.shape[-1] > MAX_DISTANCES:
        return f"its table has more than {MAX_DISTANCES} distances"
    widest = max(*(factor.q.shape[-1] for factor in slots), task.v.shape[-1])
    if widest > MAX_WIDTH:
        return f"a part has {widest} features, more than {MAX_WIDTH}"
    rule = clauses.read(task.filter, task.num_queries, task.num_keys)
    return rule if isinstance(rule, str) else None


def memory(task: Task) -> int:
    """Bytes beyond the inputs and the output: scales, rows, log_mass and the table."""
    per_query = 3 + (0 if task.term.table is None else task.term.table.shape[-1])
    return 4 * task.batch * task.heads * task.num_queries * per_query


def _unavailable(device: str) -> str | None:
    if not INSTALLED:
        return "Triton is not installed"
    return None if device == "cuda" or INTERPRETED else f"it runs on CUDA, not on {device}"


def run(task: Task) -> Smoothed:
    dtype = task.v.dtype
    slots = _slots(task.term, dtype)
    assert not isinstance(slots, str)
    rule = clauses.read(task.filter, task.num_queries, task.num_keys)
    assert not isinstance(rule, str)
    shape = (task.batch, task.heads, task.num_queries)
    scales, rows, cols = [], [], []
    for f in slots:
        if isinstance(f.scale, Tensor):
            scale = f.scale.float().expand(*shape, 1)[..., 0]
        else:
            # Filled on the device: a number copied there would wait for it.
            scale = task.v.new_full((1, 1, 1), f.scale, dtype=torch.float32).expand(shape)
        scales.append(scale)
        none = f.q.new_empty(0, dtype=torch.float32)
        rows.append(none if f.row is None or f.link is None else _full(f.row, shape))
        cols.append(none if f.col is None else f.col.float())
    table = task.term.table
    if table is not None:
        table = _at_least_one(table.float()).expand(*shape, -1)
    static = (
        tuple((0, 0.0) if f.link is None else _code(f.link) for f in slots),
        rule.numbers,
        rule.first,
        rule.simple,
        tuple(scale.requires_grad for scale in scales),
    )
    out, lse = fused(
        [f.q.to(dtype) for f in slots],
        [f.k.to(dtype) for f in slots],
        task.v,
        scales,
        rows,
        cols,
        table,
        rule.lengths,
        rule.ids,
        task.seed,
        repr(static),
        task.dropout_p,
    )
    if task.log_mass:
        for f in task.term.factors:
            lse = lse if f.row is None or f.link is not None else lse + f.row
    return Smoothed(out, lse)


def _full(row: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return repeat(row, shape[0], shape[1]).float()


def _at_least_one(table: Tensor) -> Tensor:
    """A table that reaches one place each way at least: its ends are then two columns."""
    return table.expand(*table.shape[:-1], 3) if table.shape[-1] == 1 else table


def _code(link: Link) -> tuple[int, float]:
    param = getattr(link, "degree", getattr(link, "alpha", 0.0))
    return LINKS[type(link)], param


def _slots(term: Term, dtype: torch.dtype) -> list[Factor] | str:
    """One or two factors with features, or why there are more."""
    linked = [f for f in term.factors if f.link is not None]
    plain = [f for f in term.factors if f.link is None and f.q.shape[-1]]
    bare = [f for f in term.factors if f.link is None and not f.q.shape[-1]]
    if len(plain) + len(linked) > 2 and len(plain) > 1:
        if any(f.col is not None and _per_query(f) for f in plain):
            return "a bandwidth of each query cannot join other factors"
        plain = [_merged(plain, dtype)]
    for f in bare:
        # A number per key alone joins a factor whose scale it can be divided by, or gets its own.
        target = next((n for n, p in enumerate(plain) if not _per_query(p)), None)
        if target is None:
            zeros = [x.new_zeros(*x.shape[:3], 16, dtype=dtype) for x in (f.q, f.k)]
            plain.append(Factor(q=zeros[0], k=zeros[1]))
            target = len(plain) - 1
        plain[target] = _joined(plain[target], f)
    slots = plain + linked
    return slots if len(slots) <= 2 else "it takes two factors at most"


def _per_query(f: Factor) -> bool:
    return isinstance(f.scale, Tensor) and f.scale.dim() == 4


def _merged(factors: list[Factor], dtype: torch.dtype) -> Factor:
    """Plain factors side by side, scaled; their numbers per key add up."""
    q = join([(f.q.float() * f.scale).to(dtype) for f in factors])
    merged = Factor(q=q, k=join([f.k.to(dtype) for f in factors]))
    for f in factors:
        if f.col is not None:
            merged = _joined(merged, f)
    return merged


def _joined(target: Factor, f: Factor) -> Factor:
    """The number per key of f as one of the target: scale_f col_f / scale_target."""
    assert f.col is not None
    col = f.col.float()
    for scale, divide in ((f.scale, False), (target.scale, True)):
        if isinstance(scale, Tensor):
            factor = scale.reshape(1, -1, 1)
            col = repeat(col, col.shape[0], max(col.shape[1], factor.shape[1]))
            col = col / factor if divide else col * factor
        else:
            col = col / scale if divide else col * scale
    if target.col is not None:
        heads = max(col.shape[1], target.col.shape[1])
        col = repeat(col, col.shape[0], heads) + repeat(
            target.col.float(), target.col.shape[0], heads
        )
    return Factor(q=target.q, k=target.k, scale=target.scale, row=target.row, col=col)


@dataclass(frozen=True)
class _Launch:
    """One call's arguments in the order that all kernels take them."""

    tensors: tuple[Tensor, ...]
    numbers: tuple[int | float, ...]
    constants: dict[str, Any]
    batch: int
    heads: int
    num_queries: int
    num_keys: int
    want: tuple[bool, bool]
    poly: bool


def _launch(
    q: list[Tensor], k: list[Tensor], v: Tensor, scale: list[Tensor], row: list[Tensor],
    col: list[Tensor], table: Tensor | None, lengths: Tensor | None, ids: Tensor | None,
    seed: Tensor | None, static: str, dropout_p: float,
) -> _Launch:  # fmt: skip
    links, rule, first, simple, want = _parsed(static)
    batch, heads, num_queries = scale[0].shape
    num_keys = v.shape[2]
    two = len(q) == 2
    q0, q1, k0, k1 = q[0], q[-1], k[0], k[-1]
    c0, c1 = col[0], col[-1]
    none = v
    widths = [x.shape[-1] for x in (q0, q1, v)]
    e0, e1, dv = (max(16, 1 << (w - 1).bit_length()) for w in widths)
    tensors = (
        q0, k0, q1, k1, v, scale[0].contiguous(), scale[-1].contiguous(), row[0].contiguous(),
        row[-1].contiguous(), c0, c1, none if table is None else table.contiguous(),
        none if lengths is None else lengths, none if ids is None else ids,
    )  # fmt: skip
    strides = [s for x in (q0, k0, q1, k1, v) for s in _strides(x, batch)]
    strides += [s for x in (c0, c1) for s in _strides(x, batch)[:2]]
    strides.append(0 if ids is None or ids.shape[0] == 1 else ids.stride(0))
    groups = [heads // x.shape[1] for x in (k0, k1, v)]
    groups += [heads // x.shape[1] if x.dim() == 3 else 1 for x in (c0, c1)]
    numbers = (
        *strides, heads, *groups, num_queries, num_keys, first, *widths,
        0 if seed is None else int(seed) % 2**31, dropout_p,
    )  # fmt: skip
    poly = not two and links[0][0] == 1
    constants = {
        "E0": e0,
        "E1": e1 if two else 0,
        "V": dv,
        "LINK0": links[0][0],
        "LINK1": links[-1][0],
        "PARAM0": links[0][1],
        "PARAM1": links[-1][1],
        "HAS_COL0": c0.numel() > 0,
        "HAS_COL1": two and c1.numel() > 0,
        "HAS_ROW0": row[0].numel() > 0,
        "HAS_ROW1": two and row[-1].numel() > 0,
        "CLIP": -1 if table is None else (table.shape[-1] - 1) // 2,
        "FILTER": rule,
        "SIMPLE": simple,
        "EVEN": widths[0] == e0 and widths[2] == dv and (not two or widths[1] == e1),
        "POLY": poly,
        "DROPOUT": dropout_p > 0.0,
        "PRECISION": "ieee" if v.dtype == torch.float32 else "tf32",
    }
    both = (want[0] and not poly, two and want[-1])
    return _Launch(tensors, numbers, constants, batch, heads, num_queries, num_keys, both, poly)


@lru_cache(maxsize=1024)
def _parsed(static: str) -> tuple[Any, ...]:
    parsed: tuple[Any, ...] = ast.literal_eval(static)
    return parsed


def _strides(x: Tensor, batch: int) -> tuple[int, int, int]:
    """Of batch, head and place; a batch of 1 is read again for each."""
    if x.dim() < 3:
        return 0, 0, 0
    b = 0 if x.shape[0] == 1 and batch > 1 else x.stride(0)
    return b, x.stride(1), x.stride(2)


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# (BM, BN, warps, stages), measured on an H200; "heavy" has a link or a table.
SIZES: dict[tuple[str, int, bool], tuple[int, int, int, int]] = {
    ("forward", 64, False): (64, 128, 4, 3),
    ("forward", 64, True): (64, 64, 4, 3),
    ("forward", 128, False): (128, 128, 8, 2),
    ("forward", 128, True): (64, 64, 4, 2),
    ("forward", 256, False): (64, 64, 8, 2),
    ("forward", 256, True): (64, 32, 8, 2),
    ("forward", 512, False): (64, 32, 8, 2),
    ("forward", 512, True): (32, 32, 8, 1),
    ("keys", 64, False): (64, 64, 4, 3),
    ("keys", 64, True): (64, 64, 8, 2),
    ("keys", 128, False): (32, 64, 4, 3),
    ("keys", 128, True): (32, 64, 8, 2),
    ("keys", 256, False): (32, 64, 8, 2),
    ("keys", 256, True): (32, 32, 8, 1),
    ("keys", 512, False): (32, 32, 8, 1),
    ("keys", 512, True): (16, 32, 8, 1),
    ("queries", 64, False): (128, 64, 4, 3),
    ("queries", 64, True): (64, 64, 8, 2),
    ("queries", 128, False): (128, 64, 8, 3),
    ("queries", 128, True): (64, 32, 8, 2),
    ("queries", 256, False): (64, 32, 8, 2),
    ("queries", 256, True): (32, 32, 8, 1),
    ("queries", 512, False): (32, 32, 8, 1),
    ("queries", 512, True): (32, 16, 8, 1),
}


def _choose(kind: str, call: _Launch) -> dict[str, int]:
    """Block sizes, warps and stages for a kernel."""
    c = call.constants
    width = max(c["E0"] + c["E1"], c["V"])
    heavy = ((c["LINK0"] or c["LINK1"]) and not call.poly) or c["CLIP"] >= 0
    # float32 operands take twice the room.
    width *= 2 if call.tensors[4].dtype == torch.float32 else 1
    bucket = next(size for size in (64, 128, 256, 512, width) if width <= size)
    sizes = SIZES.get((kind, bucket, bool(heavy)), (16, 16, 4, 1))
    return dict(zip(("BM", "BN", "num_warps", "num_stages"), sizes, strict=True))


@torch.library.custom_op("mercer::fused", mutates_args=())
def fused(
    q: list[Tensor], k: list[Tensor], v: Tensor, scale: list[Tensor], row: list[Tensor],
    col: list[Tensor], table: Tensor | None, lengths: Tensor | None, ids: Tensor | None,
    seed: Tensor | None, static: str, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, log_mass without the rows of plain factors)."""
    from . import triton_kernels

    q, k, v = [_readable(x) for x in q], [_readable(x) for x in k], _readable(v)
    call = _launch(q, k, v, scale, row, col, table, lengths, ids, seed, static, dropout_p)
    shape = (call.batch, call.heads, call.num_queries)
    out = v.new_empty(*shape, v.shape[-1])
    lse = v.new_empty(shape, dtype=torch.float32)
    sizes = _choose("forward", call)
    grid = (-(-call.num_queries // sizes["BM"]), call.batch * call.heads)
    triton_kernels.forward[grid](*call.tensors, out, lse, *call.numbers, **call.constants, **sizes)
    return out, lse


@fused.register_fake
def _(q: Any, k: Any, v: Tensor, scale: list[Tensor], row: Any, col: Any, table: Any, lengths: Any,
      ids: Any, seed: Any, static: str, dropout_p: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = scale[0].shape
    return v.new_empty(*shape, v.shape[-1]), v.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("mercer::fused_backward", mutates_args=())
def fused_backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, q: list[Tensor], k: list[Tensor],
    v: Tensor, scale: list[Tensor], row: list[Tensor], col: list[Tensor], table: Tensor | None,
    lengths: Tensor | None, ids: Tensor | None, seed: Tensor | None, static: str, dropout_p: float,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k, v, scale, row, col and the table, in this order."""
    from . import triton_backward

    given_k, given_v = k, v
    q, k, v = [_readable(x) for x in q], [_readable(x) for x in k], _readable(v)
    call = _launch(q, k, v, scale, row, col, table, lengths, ids, seed, static, dropout_p)
    batch, heads, num_queries, num_keys = call.batch, call.heads, call.num_queries, call.num_keys
    grad_out, grad_lse = grad_out.contiguous(), grad_lse.contiguous()
    delta = torch.empty_like(lse)
    rows, width = batch * heads * num_queries, v.shape[-1]
    triton_backward.delta[(-(-rows // 64),)](
        out, grad_out, grad_lse, delta, rows, width, V=call.constants["V"], BM=64
    )
    dq = [x.new_empty(batch, heads, num_queries, x.shape[-1]) for x in q]
    dk = [x.new_empty(batch, heads, num_keys, x.shape[-1]) for x in k]
    dv = v.new_empty(batch, heads, num_keys, width)
    dscale = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in scale]
    drow = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in row]
    wide = (batch, heads, num_keys)
    dcol = [x.new_empty(wide) if x.numel() else x.new_empty(0) for x in col]
    dtable = [] if table is None else [torch.zeros(table.shape, device=v.device)]
    sizes = _choose("keys", call)
    triton_backward.backward_keys[(-(-num_keys // sizes["BN"]), batch * heads)](
        *call.tensors, grad_out, lse, delta, dk[0], dk[-1], dv, dcol[0], dcol[-1],
        *call.numbers, **call.constants, **sizes,
    )  # fmt: skip
    sizes = _choose("queries", call)
    triton_backward.backward_queries[(-(-num_queries // sizes["BM"]), batch * heads)](
        *call.tensors, grad_out, lse, delta, grad_lse, dq[0], dq[-1], dscale[0], dscale[-1],
        drow[0], drow[-1], dtable[0] if dtable else delta, *call.numbers, **call.constants,
        WANT0=call.want[0], WANT1=call.want[1], **sizes,
    )  # fmt: skip
    if call.poly:
        # The scale of a power moves all weights of a row alike: it acts on log_mass alone.
        dscale[0] = call.constants["PARAM0"] * grad_lse / scale[0]
    dq = [_reduced(x, given) for x, given in zip(dq, q, strict=True)]
    dk = [_reduced(x, given) for x, given in zip(dk, given_k, strict=True)]
    dcol = [_reduced(x, given) if x.numel() else x for x, given in zip(dcol, col, strict=True)]
    return [*dq, *dk, _reduced(dv, given_v), *dscale, *drow, *dcol, *dtable]


def _reduced(grad: Tensor, given: Tensor) -> Tensor:
    """Summed over the heads and sequences that read the same tensor."""
    if given.shape[1] != grad.shape[1]:
        grad = grad.unflatten(1, (given.shape[1], -1)).sum(2, dtype=torch.float32)
    if given.shape[0] != grad.shape[0]:
        grad = grad.sum(0, keepdim=True, dtype=torch.float32)
    return grad.to(given.dtype)


@fused_backward.register_fake
def _(grad_out: Any, grad_lse: Any, out: Any, lse: Any, q: Any, k: Any, v: Tensor, scale: Any,
      row: Any, col: Any, table: Any, lengths: Any, ids: Any, seed: Any, static: str,
      dropout_p: float) -> list[Tensor]:  # fmt: skip
    given = (*q, *k, v, *scale, *row, *col, *([] if table is None else [table]))
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, scale, row, col, table, lengths, ids, seed, static, dropout_p = inputs
    ctx.count, ctx.static, ctx.dropout_p = len(q), static, dropout_p
    ctx.save_for_backward(*output, *q, *k, *scale, *row, *col, v, table, lengths, ids, seed)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    n = ctx.count
    out, lse, *rest = ctx.saved_tensors
    q, k, scale, row, col = (rest[m * n : (m + 1) * n] for m in range(5))
    v, table, lengths, ids, seed = rest[5 * n :]
    grads = fused_backward(
        grad_out, grad_lse, out, lse, q, k, v, scale, row, col, table, lengths, ids, seed,
        ctx.static, ctx.dropout_p,
    )  # fmt: skip
    dq, dk, dv = grads[:n], grads[n : 2 * n], grads[2 * n]
    dscale, drow, dcol = (grads[2 * n + 1 + m * n : 2 * n + 1 + (m + 1) * n] for m in range(3))
    dtable = None if table is None else grads[-1]
    return dq, dk, dv, dscale, drow, dcol, dtable, None, None, None, None, None


fused.register_autograd(_backward, setup_context=_save)
