"""Blockwise smoothing in plain PyTorch: any term, any filter, memory linear in T.

What this must meet: the forward keeps (out, log_mass) and the backward recomputes the weights
block by block; blocks that see nothing are skipped; every gradient is a plain sum, so the same
input gives the same bits; and it is one opaque operator, so that torch.compile does not unroll the
loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..filters import Filter, Span
from ..spec import decode
from ..term import Link, Smoothed, accumulator, repeat
from . import Task, broken

name = "chunked"
BLOCK_ELEMENTS = 2**21


def refuses(task: Task) -> str | None:
    """Nothing is refused."""
    return None


def memory(task: Task) -> int:
    """Bytes beyond the inputs and the output: the lifted features and a few blocks."""
    wide = accumulator(task.v.dtype).itemsize
    widths = sum(f.q.shape[-1] + (f.col is not None) for f in task.term.factors) + task.v.shape[-1]
    side = _block(task.batch * task.heads)
    block = min(side, task.num_queries) * min(side, task.num_keys)
    tokens = task.num_queries + task.num_keys
    return wide * task.batch * task.heads * (tokens * widths + 6 * block)


def run(task: Task) -> Smoothed:
    term, batch, heads = task.term, task.batch, task.heads
    lifted = term.lift(accumulator(task.v.dtype))
    table = term.table
    if table is not None:
        table = table.to(accumulator(task.v.dtype)).expand(-1, heads, -1, -1)
    links = ["None" if part.link is None else part.link.encode([]) for part in lifted]
    tensors: list[Tensor] = []
    rule = task.filter.encode(tensors)
    rows = [
        # An absent row is an empty tensor: operators take no list with holes.
        part.q.new_empty(0) if part.row is None else repeat(part.row, batch, heads)
        for part in lifted
    ]
    out, mass, sign = smooth_blocks(
        [repeat(part.q, batch, heads) for part in lifted],
        [repeat(part.k, batch, heads) for part in lifted],
        rows,
        repeat(task.v, batch, heads),
        table,
        task.seed,
        tensors,
        f"({', '.join(links)},)" if links else "()",
        rule,
        task.dropout_p,
        task.num_queries,
    )
    return Smoothed(out.to(task.v.dtype), mass, sign if term.signed else None)


def _block(batch_heads: int) -> int:
    """A block's side: a power of two from 64 to 1024 that keeps all heads' blocks in the cache."""
    side = math.sqrt(BLOCK_ELEMENTS / max(batch_heads, 1))
    return max(64, min(1024, 2 ** int(math.log2(max(side, 64)))))


class _Blocks:
    """The visible blocks of one call, and what every one of them computes from the inputs."""

    def __init__(
        self, q: Sequence[Tensor], k: Sequence[Tensor], row: Sequence[Tensor], v: Tensor,
        table: Tensor | None, seed: Tensor | None, tensors: Sequence[Tensor], links: str, rule: str,
        dropout_p: float, num_queries: int,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.table = q, k, v, table
        self.row = [None if r.numel() == 0 else r for r in row]
        self.links: tuple[Link | None, ...] = decode(links)
        self.filter: Filter = decode(rule, tensors)
        self.signed = any(link is not None and link.signed for link in self.links)
        self.dropout_p = dropout_p
        self.seed = 0 if seed is None else int(seed)
        self.wide = accumulator(v.dtype)
        self.num_queries, self.num_keys = num_queries, v.shape[2]
        self.start = self.num_keys - num_queries
        self.side = _block(v.shape[0] * v.shape[1])
        self.spoiled = self._clean()  # [B, H, Q], or None where all is finite

    def _clean(self) -> Tensor | None:
        """Zero what is not finite, and give the queries that see any of it."""
        present = [row for row in self.row if row is not None]
        if all(bool(x.isfinite().all()) for x in (*self.q, *self.k, *present, self.v)):
            return None
        spoiled = self.v.new_zeros(*self.v.shape[:2], self.num_queries, dtype=torch.bool)
        for q in (*self.q, *(row[..., None] for row in present)):
            spoiled |= broken(q)
        bad_keys = broken(self.v)
        for k in self.k:
            bad_keys |= broken(k)
        self.q, self.k = ([x.nan_to_num(0.0, 0.0, 0.0) for x in xs] for xs in (self.q, self.k))
        self.row = [None if row is None else row.nan_to_num(0.0, 0.0, 0.0) for row in self.row]
        self.v = self.v.nan_to_num(0.0, 0.0, 0.0)
        for rows in self.queries():
            for cols, visible in self.keys(rows):
                seen = bad_keys[:, :, None, cols]
                spoiled[:, :, rows] |= (seen if visible is None else seen & visible).any(-1)
        return spoiled

    def queries(self) -> Iterator[slice]:
        for first in range(0, self.num_queries, self.side):
            yield slice(first, min(first + self.side, self.num_queries))

    def keys(self, rows: slice) -> Iterator[tuple[slice, Tensor | None]]:
        """The key blocks that these queries see, each with its mask if it needs one."""
        i = Span(rows.start + self.start, rows.stop - 1 + self.start)
        for first in range(0, self.num_keys, self.side):
            cols = slice(first, min(first + self.side, self.num_keys))
            covered = self.filter.covers(i, Span(cols.start, cols.stop - 1), self.start)
            if covered is not False:
                yield cols, None if covered else self.visible(rows, cols)

    def visible(self, rows: slice, cols: slice) -> Tensor:
        device = self.v.device
        i = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.start
        j = torch.arange(cols.start, cols.stop, device=device)
        b = torch.arange(self.v.shape[0], device=device)[:, None, None, None]
        return torch.as_tensor(self.filter.sees(b, i, j, self.start), device=device)

    def scores(self, rows: slice, cols: slice) -> list[Tensor]:
        """s of every factor, [B, H, q, k]."""
        scores = []
        for q, k, row, link in zip(self.q, self.k, self.row, self.links, strict=True):
            s = q[:, :, rows] @ k[:, :, cols].mT
            if row is not None:
                s += row[:, :, rows, None]
            if link is not None and link.cusp and row is not None:
                # An infinite slope at 0 magnifies rounding: equal features must give exactly 0.
                noise = 32 * torch.finfo(s.dtype).eps * row[:, :, rows, None].abs()
                s = torch.where(s > -noise, 0.0, s)
            scores.append(s)
        return scores

    def logs(self, scores: list[Tensor]) -> list[Tensor]:
        pairs = zip(self.links, scores, strict=True)
        return [s if link is None else link.log(s) for link, s in pairs]

    def total(self, logs: list[Tensor], rows: slice, cols: slice, hidden: Tensor | None) -> Tensor:
        """log |w|, -inf where hidden."""
        if logs:
            log = sum(logs[1:], logs[0])
        else:
            batch, heads = self.v.shape[:2]
            shape = (batch, heads, rows.stop - rows.start, cols.stop - cols.start)
            log = self.v.new_zeros(shape, dtype=self.wide)
        if self.table is not None:
            log = log + self.bias(rows, cols)
        return log if hidden is None else log.masked_fill(hidden, -math.inf)

    def signs(self, scores: list[Tensor]) -> list[Tensor | None]:
        pairs = zip(self.links, scores, strict=True)
        return [link.sign(s) if link is not None and link.signed else None for link, s in pairs]

    def away(self, rows: slice, cols: slice) -> tuple[int, int]:
        """The smallest and largest i - j of a block."""
        return rows.start + self.start - (cols.stop - 1), rows.stop - 1 + self.start - cols.start

    def bias(self, rows: slice, cols: slice) -> Tensor:
        assert self.table is not None
        clip = (self.table.shape[-1] - 1) // 2
        i = torch.arange(rows.start, rows.stop, device=self.v.device)[:, None] + self.start
        j = torch.arange(cols.start, cols.stop, device=self.v.device)
        index = (i - j).clamp(-clip, clip) + clip
        table = self.table if self.table.shape[2] == 1 else self.table[:, :, rows]
        if table.shape[2] == 1:
            return table[:, :, 0][:, :, index]
        return table.gather(-1, index.expand(*table.shape[:2], *index.shape))

    def add_to_table(self, grad: Tensor, ds: Tensor, rows: slice, cols: slice) -> None:
        """Sums along the diagonals of a block: a shear, then slices; no scatter."""
        height, width = ds.shape[-2:]
        # Row r of the mirrored block, moved right by r, has distance (i - j) - low in its columns.
        sheared = F.pad(ds.flip(-1), (0, height)).flatten(-2)
        sheared = sheared[..., : height * (width + height - 1)]
        sheared = sheared.unflatten(-1, (height, width + height - 1))
        if grad.shape[0] == 1 and sheared.shape[0] > 1:
            sheared = sheared.sum(0, keepdim=True)
        if grad.shape[2] == 1:
            target, sheared = grad, sheared.sum(-2, keepdim=True)
        else:
            target = grad[:, :, rows]
        clip = (grad.shape[-1] - 1) // 2
        low, high = self.away(rows, cols)
        inner_low, inner_high = max(low, -clip), min(high, clip)
        if inner_low <= inner_high:
            inner = sheared[..., inner_low - low : inner_high - low + 1]
            target[..., inner_low + clip : inner_high + clip + 1] += inner
        if low < -clip:
            target[..., 0] += sheared[..., : min(-clip, high + 1) - low].sum(-1)
        if high > clip:
            target[..., -1] += sheared[..., max(clip + 1, low) - low :].sum(-1)

    def kept(self, rows: slice, cols: slice, shape: torch.Size) -> Tensor | None:
        """What dropout leaves, already divided by 1 - p; the same in forward and backward."""
        if self.dropout_p == 0.0:
            return None
        generator = torch.Generator(self.v.device)
        generator.manual_seed(self.seed + rows.start * self.num_keys + cols.start)
        draw = torch.rand(shape, generator=generator, device=self.v.device, dtype=self.wide)
        return (draw >= self.dropout_p).to(self.wide) / (1 - self.dropout_p)


@torch.library.custom_op("mercer::smooth_blocks", mutates_args=())
def smooth_blocks(
    q: list[Tensor], k: list[Tensor], row: list[Tensor], v: Tensor, table: Tensor | None,
    seed: Tensor | None, tensors: list[Tensor], links: str, rule: str, dropout_p: float,
    num_queries: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, log_mass, sign) of one lifted term, unrounded: the backward needs <dO, O> exactly."""
    blocks = _Blocks(q, k, row, v, table, seed, tensors, links, rule, dropout_p, num_queries)
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


def _forward_rows(
    blocks: _Blocks, rows: slice, out: Tensor, log_mass: Tensor, sign: Tensor
) -> None:
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


@smooth_blocks.register_fake
def _(q: Any, k: Any, row: Any, v: Tensor, table: Any, seed: Any, tensors: Any, links: str,
      rule: str, dropout_p: float, num_queries: int) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    signed = any(link is not None and link.signed for link in decode(links))
    shape = (v.shape[0], v.shape[1], num_queries)
    wide = accumulator(v.dtype)
    return (
        v.new_empty(*shape, v.shape[-1], dtype=wide),
        v.new_empty(shape, dtype=wide),
        v.new_empty(shape if signed else 0, dtype=wide),
    )


@torch.library.custom_op("mercer::smooth_blocks_backward", mutates_args=())
def smooth_blocks_backward(
    grad_out: Tensor, grad_mass: Tensor, out: Tensor, log_mass: Tensor, sign: Tensor,
    q: list[Tensor], k: list[Tensor], row: list[Tensor], v: Tensor, table: Tensor | None,
    seed: Tensor | None, tensors: list[Tensor], links: str, rule: str, dropout_p: float,
    num_queries: int,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k, row (each a list), v and the table, in this order."""
    blocks = _Blocks(q, k, row, v, table, seed, tensors, links, rule, dropout_p, num_queries)
    grads_q, grads_k, grads_row = ([torch.zeros_like(x) for x in xs] for xs in (q, k, row))
    grad_v = torch.zeros_like(v, dtype=blocks.wide)
    grad_table = [] if table is None else [torch.zeros_like(table)]
    with torch.autocast(v.device.type, enabled=False):
        upstream = grad_out
        # dL / dlog|w_ij| = P_ij (dP_ij - delta_i), where delta = <dO, O> - dlog_mass
        delta = (upstream * out).sum(-1) - grad_mass
        # Rows that see nothing have no weights; rows that are not finite pass nothing on.
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
                        # The pull has the sign of its own factor in it.
                        others = signs[: n + 1] + signs[n + 2 :]
                        ds = _times(link.pull(scores[n], size, rest), others) * inner
                    grads_q[n][:, :, rows] += ds @ blocks.k[n][:, :, cols]
                    grads_k[n][:, :, cols] += ds.mT @ blocks.q[n][:, :, rows]
                    if blocks.row[n] is not None:
                        grads_row[n][:, :, rows] += ds.sum(-1)
    return [*grads_q, *grads_k, *grads_row, grad_v.to(v.dtype), *grad_table]


@smooth_blocks_backward.register_fake
def _(grad_out: Any, grad_mass: Any, out: Any, log_mass: Any, sign: Any, q: Any, k: Any, row: Any,
      v: Tensor, table: Any, seed: Any, tensors: Any, links: str, rule: str, dropout_p: float,
      num_queries: int) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x) for x in (*q, *k, *row, v, *([] if table is None else [table]))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, row, v, table, seed, tensors, links, rule, dropout_p, num_queries = inputs
    ctx.count, ctx.num_tensors = len(q), len(tensors)
    ctx.has_table, ctx.has_seed = table is not None, seed is not None
    ctx.save_for_backward(
        *output, *q, *k, *row, v, *tensors, *([] if table is None else [table]),
        *([] if seed is None else [seed]),
    )  # fmt: skip
    ctx.static = (links, rule, dropout_p, num_queries)


def _backward(ctx: Any, grad_out: Tensor, grad_mass: Tensor, grad_sign: Any) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    out, log_mass, sign = next(saved), next(saved), next(saved)
    q, k, row = ([next(saved) for _ in range(ctx.count)] for _ in range(3))
    v = next(saved)
    tensors = [next(saved) for _ in range(ctx.num_tensors)]
    table = next(saved) if ctx.has_table else None
    seed = next(saved) if ctx.has_seed else None
    grads = smooth_blocks_backward(
        grad_out, grad_mass, out, log_mass, sign, q, k, row, v, table, seed, tensors, *ctx.static
    )
    n = ctx.count
    grad_table = grads[3 * n + 1] if ctx.has_table else None
    return (
        grads[:n], grads[n : 2 * n], grads[2 * n : 3 * n], grads[3 * n], grad_table,
        None, [None] * ctx.num_tensors, None, None, None, None,
    )  # fmt: skip


smooth_blocks.register_autograd(_backward, setup_context=_save)
