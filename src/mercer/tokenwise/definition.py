"""The definition of `vicinity`, query by query."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..backends.tokenwise.taps import Convolution
from ..dispatch.problem import Problem
from ..smoother import reference as smooth_densely
from ..term.mix import Smoothed
from .split import in_heads, sliced, with_content
from .taps import joined


def reference(problem: Problem, convolution: Convolution) -> Smoothed:
    """Query by query, dense."""
    num_queries, num_keys = problem.q.length, problem.k.length
    if not problem.filter.causal or not num_queries:
        return smooth_densely(_seen(problem, convolution, num_keys, None).cleaned())
    rows = []
    for n in range(num_queries):
        place = n + num_keys - num_queries
        row = replace(
            _seen(problem, convolution, max(place + 1, 0), place),
            q=sliced(problem.q, slice(n, n + 1)),
            filter=problem.filter.until(max(place + 1, 0), num_keys - num_queries),
        )
        rows.append(smooth_densely(row.cleaned()))
    masses = [row.log_mass for row in rows if row.log_mass is not None]
    return Smoothed(torch.cat([row.out for row in rows], 2), torch.cat(masses, 2))


def _seen(problem: Problem, convolution: Convolution, length: int, place: int | None) -> Problem:
    """The first keys and values, as the query at this place sees them."""
    key_taps, value_taps, *_ = convolution
    k, v = sliced(problem.k, slice(0, length)), problem.v[:, :, :length]
    if key_taps is not None:
        content = _convolved(problem, convolution, k.part("content"), key_taps, place)
        k = with_content(k, content)
    if value_taps is not None:
        v = _convolved(problem, convolution, v, value_taps, place)
    return replace(problem, k=k, v=v)


def _convolved(
    problem: Problem, convolution: Convolution, x: Tensor, taps: Tensor, place: int | None
) -> Tensor:
    _, _, normalize, boundary = convolution
    length, reach = x.shape[2], taps.shape[-1] // 2
    if not length:
        return in_heads(x, taps)
    j = torch.arange(length, device=x.device)[:, None]
    d = torch.arange(-reach, reach + 1, device=x.device)
    seen = (d <= 0).expand(length, -1) if boundary == "left" else (d == d) & (j == j)
    reads = (j + d >= 0) & (j + d < length)
    if place is not None:
        if boundary == "truncate":
            seen = j + d <= place
        elif boundary == "shrink":
            seen = d.abs() <= place - j
        reads = reads & (j + d <= place)
    joins = joined(problem.filter, 0, length, reach, x.device)
    if joins is not None:
        reads = reads & joins
    taps = taps[:, :length].transpose(1, 2)  # [B, H or 1, K, S]
    if normalize is None:
        taps = taps.masked_fill(~seen, 0.0)
    else:
        taps = (taps / normalize).masked_fill(~seen, -math.inf).softmax(-1)
    y = in_heads(x, taps.transpose(1, 2))[:, :, (j + d).clamp(0, length - 1)]
    y = torch.where((reads & seen).view(-1, 1, length, 2 * reach + 1, 1), y, 0.0)
    return (taps[..., None] * y).sum(-2).to(x.dtype)
