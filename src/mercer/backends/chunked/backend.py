"""Blockwise smoothing in plain PyTorch: any term, any filter, memory linear in T.

The forward keeps (out, log_mass). The backward recomputes the weights block by block. Blocks that
see nothing are skipped. Each gradient is a plain sum, so the same input gives the same bits. It is
one opaque operator, so torch.compile does not unroll the loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...opaque.operators import fake, learns, operator
from ...opaque.spec import decode
from ...term.layout import accumulator, repeat
from ...term.mix import Smoothed
from .. import Task, one_kind, spreads_nan
from .blocks import Blocks, block_side, keys_of_block

name = "chunked"
dense_mask = False
kernels, keeps_nan = one_kind, spreads_nan


def refuses(task: Task) -> str | None:
    """Nothing is refused."""
    return None


def memory(task: Task) -> int:
    """Bytes beyond the inputs and the output: the lifted features and a few blocks."""
    wide = accumulator(task.v.dtype).itemsize
    widths = sum(f.width + f.keyed for f in task.term.factors) + task.v.shape[-1]
    side = block_side(task.batch * task.heads, task.device)
    keys = min(keys_of_block(side, task.num_queries), task.num_keys)
    block = min(side, task.num_queries) * keys
    tokens = task.num_queries + task.num_keys
    return wide * task.batch * task.heads * (tokens * widths + 6 * block)


def run(tasks: Sequence[Task]) -> list[Smoothed]:
    return [_run(task) for task in tasks]


def _run(task: Task) -> Smoothed:
    term, batch, heads = task.term, task.batch, task.heads
    lifted = term.lift(accumulator(task.v.dtype))
    table, bias = term.table, term.relative
    shift, places = 0, []
    if table is not None and bias is not None:
        table = table.to(accumulator(task.v.dtype)).expand(-1, heads, -1, -1)
        if bias.places is not None and bias.places.shift is not None:
            shift = bias.places.shift
        elif bias.places is not None:
            places = list(bias.places.tensors(task.device))
    links = ["None" if part.link is None else part.link.encode([]) for part in lifted]
    tensors: list[Tensor] = []
    rule = task.filter.encode(tensors)
    rows = [
        # A missing row is an empty tensor: operators take no list with None.
        part.q.new_empty(0) if part.row is None else repeat(part.row, batch, heads)
        for part in lifted
    ]
    q = [repeat(part.q, batch, heads) for part in lifted]
    k = [repeat(part.k, batch, heads) for part in lifted]
    text = f"({', '.join(links)},)" if links else "()"
    out, mass, sign = smooth_blocks(
        q, k, rows, repeat(task.v, batch, heads), table, task.seed, tensors, text, rule,
        task.dropout_p, task.num_queries, task.bad_queries, task.bad_keys, shift, places,
    )  # fmt: skip
    return Smoothed(out.to(task.v.dtype), mass, sign if term.signed else None)


@operator
def smooth_blocks(
    q: list[Tensor], k: list[Tensor], row: list[Tensor], v: Tensor, table: Tensor | None,
    seed: Tensor | None, tensors: list[Tensor], links: str, rule: str, dropout_p: float,
    num_queries: int, bad_queries: Tensor | None, bad_keys: Tensor | None, shift: int,
    places: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, log_mass, sign) of one lifted term, unrounded: the backward needs <dO, O> exactly."""
    blocks = Blocks(
        q, k, row, v, table, seed, tensors, links, rule, dropout_p, num_queries, bad_queries,
        bad_keys, shift, places,
    )  # fmt: skip
    shape = (v.shape[0], v.shape[1], num_queries)
    out = v.new_empty(*shape, v.shape[-1], dtype=blocks.wide)
    log_mass = v.new_empty(shape, dtype=blocks.wide)
    sign = v.new_empty(shape if blocks.signed else 0, dtype=blocks.wide)
    with torch.autocast(v.device.type, enabled=False):
        for rows in blocks.queries():
            _forward_rows(blocks, rows, out, log_mass, sign)
    if blocks.spoiled is not None:
        out.masked_fill_(blocks.spoiled[..., None], math.nan)
        log_mass.masked_fill_(blocks.spoiled, math.nan)
    return out, log_mass, sign


def _forward_rows(blocks: Blocks, rows: slice, out: Tensor, log_mass: Tensor, sign: Tensor) -> None:
    v = blocks.v
    shape = (v.shape[0], v.shape[1], rows.stop - rows.start)
    peak = v.new_full(shape, -math.inf, dtype=blocks.wide)
    mass = torch.zeros_like(peak)
    sums = v.new_zeros(*shape, v.shape[-1], dtype=blocks.wide)
    for cols, visible in blocks.keys(rows):
        scores = blocks.scores(rows, cols)
        log = blocks.total(blocks.logs(scores), rows, cols, None if visible is None else ~visible)
        higher = torch.maximum(peak, log.amax(-1))
        base = torch.where(higher.isneginf(), 0.0, higher)
        weight = (log - base[..., None]).exp_()
        weight = _times(weight, blocks.signs(scores))
        shrink = (peak - base).exp_()
        mass = mass * shrink + weight.sum(-1)
        kept = blocks.kept(rows, cols, weight.shape)
        if kept is not None:
            weight = weight * kept
        sums = sums * shrink[..., None] + weight @ v[:, :, cols].to(blocks.wide)
        peak = higher
    empty = mass == 0
    safe = torch.where(empty, 1.0, mass)
    out[:, :, rows] = torch.where(empty[..., None], 0.0, sums / safe[..., None])
    log_mass[:, :, rows] = torch.where(empty, -math.inf, safe.abs().log() + peak)
    if blocks.signed:
        sign[:, :, rows] = mass.sign()


def _times(x: Tensor, signs: list[Tensor | None]) -> Tensor:
    for sign in signs:
        x = x if sign is None else x * sign
    return x


@fake(smooth_blocks)
def _(q: Any, k: Any, row: Any, v: Tensor, table: Any, seed: Any, tensors: Any, links: str,
      rule: str, dropout_p: float, num_queries: int, bad_queries: Any, bad_keys: Any, shift: int,
      places: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    signed = any(link is not None and link.signed for link in decode(links))
    shape = (v.shape[0], v.shape[1], num_queries)
    wide = accumulator(v.dtype)
    return (
        v.new_empty(*shape, v.shape[-1], dtype=wide),
        v.new_empty(shape, dtype=wide),
        v.new_empty(shape if signed else 0, dtype=wide),
    )


@operator
def smooth_blocks_backward(
    grad_out: Tensor, grad_mass: Tensor, out: Tensor, log_mass: Tensor, sign: Tensor,
    q: list[Tensor], k: list[Tensor], row: list[Tensor], v: Tensor, table: Tensor | None,
    seed: Tensor | None, tensors: list[Tensor], links: str, rule: str, dropout_p: float,
    num_queries: int, bad_queries: Tensor | None, bad_keys: Tensor | None, shift: int,
    places: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k, row (each a list), v and the table, in this order."""
    blocks = Blocks(
        q, k, row, v, table, seed, tensors, links, rule, dropout_p, num_queries, bad_queries,
        bad_keys, shift, places,
    )  # fmt: skip
    grads_q, grads_k, grads_row = ([torch.zeros_like(x) for x in xs] for xs in (q, k, row))
    grad_v = torch.zeros_like(v, dtype=blocks.wide)
    grad_table = [] if table is None else [torch.zeros_like(table)]
    with torch.autocast(v.device.type, enabled=False):
        upstream = grad_out
        # dL / dlog|w_ij| = P_ij (dP_ij - delta_i), where delta = <dO, O> - dlog_mass
        delta = (upstream * out).sum(-1) - grad_mass
        # Rows that see nothing have no weights; rows that are not finite have no gradient.
        base = torch.where(log_mass.isneginf(), 0.0, log_mass)
        if blocks.spoiled is not None:
            upstream = upstream.masked_fill(blocks.spoiled[..., None], 0.0)
            delta = delta.masked_fill(blocks.spoiled, 0.0)
            base = base.masked_fill(blocks.spoiled, math.inf)
        for rows in blocks.queries():
            for cols, visible in blocks.keys(rows):
                hidden = None if visible is None else ~visible
                scores = blocks.scores(rows, cols)
                logs = blocks.logs(scores)
                log = blocks.total(logs, rows, cols, hidden) - base[:, :, rows, None]
                size = log.exp()
                signs = [sign[:, :, rows, None] if blocks.signed else None, *blocks.signs(scores)]
                weight = _times(size, signs)
                g = upstream[:, :, rows]
                inner = g @ blocks.v[:, :, cols].to(blocks.wide).mT
                kept = blocks.kept(rows, cols, weight.shape)
                dropped = weight
                if kept is not None:
                    inner, dropped = inner * kept, weight * kept
                grad_v[:, :, cols] += dropped.mT @ g
                inner -= delta[:, :, rows, None]
                if hidden is not None:
                    inner.masked_fill_(hidden, 0.0)
                dlog = weight * inner
                if grad_table:
                    blocks.add_to_table(grad_table[0], dlog, rows, cols)
                for n, link in enumerate(blocks.links):
                    ds = dlog
                    if link is not None:
                        rest = blocks.total(logs[:n] + logs[n + 1 :], rows, cols, hidden)
                        rest = rest - base[:, :, rows, None]
                        # `pull` already has the sign of its factor.
                        others = signs[: n + 1] + signs[n + 2 :]
                        ds = _times(link.pull(scores[n], size, rest), others) * inner
                    grads_q[n][:, :, rows] += ds @ blocks.k[n][:, :, cols]
                    grads_k[n][:, :, cols] += ds.mT @ blocks.q[n][:, :, rows]
                    if blocks.row[n] is not None:
                        grads_row[n][:, :, rows] += ds.sum(-1)
    return [*grads_q, *grads_k, *grads_row, grad_v.to(v.dtype), *grad_table]


@fake(smooth_blocks_backward)
def _(grad_out: Any, grad_mass: Any, out: Any, log_mass: Any, sign: Any, q: Any, k: Any, row: Any,
      v: Tensor, table: Any, seed: Any, tensors: Any, links: str, rule: str, dropout_p: float,
      num_queries: int, bad_queries: Any, bad_keys: Any, shift: int, places: Any,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x) for x in (*q, *k, *row, v, *([] if table is None else [table]))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, row, v, table, seed, tensors, links, rule, dropout_p, num_queries, *rest = inputs
    *bad, shift, places = rest
    ctx.count, ctx.num_tensors, ctx.num_places = len(q), len(tensors), len(places)
    ctx.save_for_backward(*output, *q, *k, *row, v, table, seed, *bad, *places, *tensors)
    ctx.static, ctx.shift = (links, rule, dropout_p, num_queries), shift


def _backward(ctx: Any, grad_out: Tensor, grad_mass: Tensor, grad_sign: Any) -> tuple[Any, ...]:
    n = ctx.count
    out, log_mass, sign, *rest = ctx.saved_tensors
    q, k, row, rest = rest[:n], rest[n : 2 * n], rest[2 * n : 3 * n], rest[3 * n :]
    v, table, seed, bad_queries, bad_keys, *rest = rest
    places, tensors = rest[: ctx.num_places], rest[ctx.num_places :]
    grads = smooth_blocks_backward(
        grad_out, grad_mass, out, log_mass, sign, q, k, row, v, table, seed, tensors, *ctx.static,
        bad_queries, bad_keys, ctx.shift, places,
    )  # fmt: skip
    grad_table = None if table is None else grads[3 * n + 1]
    return (
        grads[:n], grads[n : 2 * n], grads[2 * n : 3 * n], grads[3 * n], grad_table,
        None, [None] * ctx.num_tensors, None, None, None, None, None, None, None,
        [None] * ctx.num_places,
    )  # fmt: skip


learns(smooth_blocks, _backward, _save)
