"""The few keys nearest to each query, as columns, in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch.problem import Problem
from ..term.factors import Factor
from ..term.layout import accumulator, repeat
from ..term.links import Power
from ..term.mix import Smoothed
from ..term.term import Term


def rows(x: Tensor, first: int, count: int) -> Tensor:
    """Places first, first + 1, … of x, zero before its start, [B, H, count, …]."""
    blank = min(max(-first, 0), count)
    there = x[:, :, first + blank : first + count]
    if not blank:
        return there
    return torch.cat([there.new_zeros((*x.shape[:2], blank, *x.shape[3:])), there], 2)


@dataclass(frozen=True)
class Column:
    """One term of each query and the key that is `away` places before it."""

    term: Term
    pick: Callable[[Tensor], Tensor]  # from [B, H, K, …] to these keys, [B, H, Q, …]
    away: int
    seen: Tensor  # [B or 1, 1, Q]
    value: Tensor  # [B, H, Q, V]

    def weights(self, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """w = exp(first) * second, each [B, H, Q]. Powers are in `second`: they can be 0."""
        log, power = self.value.new_zeros((), dtype=wide), self.value.new_ones((), dtype=wide)
        for f in self.term.factors:
            s = self.score(f, wide)
            if isinstance(f.link, Power):
                power = power * s**f.link.degree
            else:
                log = log + (s if f.link is None else f.link.log(s))
        if (table := self.term.table) is not None:
            clip = (table.shape[-1] - 1) // 2
            log = log + table[..., min(self.away, clip) + clip].to(wide)
        if (weight := self.term.log_weight) is not None:
            log = log + weight[:, None].to(wide)
        return log, power

    def score(self, f: Factor, wide: torch.dtype) -> Tensor:
        """s of a factor, as in `blocks`."""
        q = f.q.to(wide)
        k = torch.where(self.seen[..., None], self.pick(f.k).to(wide), 0.0)
        s = (q * repeat(k, k.shape[0], q.shape[1])).sum(-1)
        if (col := f.col) is not None:
            col = torch.where(self.seen, self.pick(col).to(wide), 0.0)
            s = s + repeat(col, col.shape[0], max(q.shape[1], col.shape[1]))
        s = s * (f.scale[..., 0] if isinstance(f.scale, Tensor) else f.scale)
        if (row := f.row) is not None:
            s = s + row.to(wide)
            if f.link is not None and f.link.cusp:
                s = torch.where(s > -32 * torch.finfo(wide).eps * row.abs(), 0.0, s)
        return s


def average(columns: list[Column], count: int, whole: Problem) -> Smoothed:
    """The smoother of `count` keys for each query; the terms of a key are consecutive columns."""
    shape, wide = (whole.batch, whole.q.heads, whole.q.length), accumulator(whole.v.dtype)
    logs, powers = [], []
    for column in columns:
        log, power = column.weights(wide)
        logs.append(log.expand(shape).masked_fill(~column.seen, -math.inf))
        powers.append(power.expand(shape).masked_fill(~column.seen, 0.0))
    log, power = torch.stack(logs, -1), torch.stack(powers, -1)  # [B, H, Q, count * terms]
    peak = (log + power.abs().log()).detach().amax(-1, keepdim=True)
    peak = torch.where(peak.isneginf(), 0.0, peak)
    weight = ((log - peak).exp() * power).unflatten(-1, (count, -1)).sum(-1)  # [B, H, Q, count]
    mass = weight.sum(-1)
    empty = mass == 0
    safe = torch.where(empty, 1.0, mass)
    share = F.dropout(weight / safe[..., None], whole.dropout_p)
    values = [column.value for column in columns[:: len(columns) // count]]
    out = torch.zeros((), dtype=wide, device=whole.v.device)
    for n, value in enumerate(values):
        out = out + share[..., n, None] * repeat(value, value.shape[0], shape[1]).to(wide)
    out = torch.where(empty[..., None], 0.0, out).to(whole.v.dtype)
    log_mass = torch.where(empty, -math.inf, safe.abs().log() + peak[..., 0])
    signed = any(column.term.signed for column in columns)
    return Smoothed(out, log_mass, mass.sign() if signed else None)
