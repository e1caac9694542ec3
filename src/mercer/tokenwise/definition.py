"""The definition of `vicinity`, query by query."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..backends.tokenwise.taps import Convolution
from ..dispatch.problem import Problem
from ..filters import Mask
from ..smoother import reference as smooth_densely
from ..term.mix import Smoothed
from .split import in_heads, with_content


def reference(problem: Problem, convolution: Convolution) -> Smoothed:
    """Query by query, dense."""
    num_queries, num_keys = problem.q.length, problem.k.length
    if not problem.causal or not num_queries:
        return smooth_densely(_seen(problem, convolution, num_keys, None).cleaned())
    said = problem.q.places is not None
    places, _ = _places(problem)
    visible = problem.filter.mask(num_queries, num_keys, problem.v.device)
    rows = []
    for n in range(num_queries):
        # Without places, the last key of a call stands beside its query.
        length = num_keys if said else max(n + num_keys - num_queries + 1, 0)
        row = replace(
            _seen(problem, convolution, length, places[:, n : n + 1]),
            q=problem.q.rows(n, n + 1),
            filter=Mask(visible[:, :, n : n + 1, :length]),
        )
        rows.append(smooth_densely(row.cleaned()))
    masses = [row.log_mass for row in rows if row.log_mass is not None]
    return Smoothed(torch.cat([row.out for row in rows], 2), torch.cat(masses, 2))


def _places(problem: Problem) -> tuple[Tensor, Tensor]:
    """Of the queries and the keys, [B or 1, Q] and [B or 1, K]."""
    num_queries, num_keys, device = problem.q.length, problem.k.length, problem.v.device
    if problem.places is not None and problem.q.places is not None:
        return problem.places.tensors(device)
    keys = torch.arange(num_keys, device=device)[None]
    return torch.arange(num_keys - num_queries, num_keys, device=device)[None], keys


def _seen(problem: Problem, convolution: Convolution, length: int, place: Tensor | None) -> Problem:
    """The first keys and values, as the query at this place sees them."""
    key_taps, value_taps, *_ = convolution
    k, v = problem.k.rows(0, length), problem.v[:, :, :length]
    if key_taps is not None:
        content = _convolved(problem, convolution, k.part("content"), key_taps, place)
        k = with_content(k, content)
    if value_taps is not None:
        v = _convolved(problem, convolution, v, value_taps, place)
    return replace(problem, k=k, v=v)


def _convolved(
    problem: Problem, convolution: Convolution, x: Tensor, taps: Tensor, place: Tensor | None
) -> Tensor:
    _, _, normalize, boundary = convolution
    length, reach = x.shape[2], taps.shape[-1] // 2
    if not length:
        return in_heads(x, taps)
    _, places = _places(problem)
    j = places[:, :length, None]  # [B or 1, K, 1]
    d = torch.arange(-reach, reach + 1, device=x.device)
    seen = (d <= 0).expand(1, length, -1) if boundary == "left" else j + d == j + d
    beside = (j + d)[..., None] == j[:, None, None, :, 0]  # [B or 1, K, S, K]
    reads, number = beside.any(-1), beside.int().argmax(-1)
    if place is not None:
        i = place[..., None]  # [B or 1, 1, 1]
        if boundary == "truncate":
            seen = j + d <= i
        elif boundary == "shrink":
            seen = d.abs() <= i - j
        reads = reads & (j + d <= i)
        # No query sees these keys: all their taps, so that there is a softmax.
        seen = seen | (j > i)
    b = torch.arange(problem.filter.batch or 1, device=x.device)[:, None, None]
    own = torch.arange(length, device=x.device)[:, None]
    reads = reads & torch.as_tensor(problem.filter.joins(b, own, number), device=x.device)
    taps = taps[:, :length].transpose(1, 2)  # [B, H or 1, K, S]
    seen, reads = seen[:, None], (reads & seen)[:, None]
    if normalize is None:
        taps = torch.where(seen, taps, 0.0)
    else:
        taps = torch.where(seen, taps / normalize, -math.inf).softmax(-1)
    y = in_heads(x, taps.transpose(1, 2))
    batch = max(len(y), len(number))
    each = torch.arange(batch, device=x.device)[:, None, None]
    y = y.expand(batch, -1, -1, -1)[each, :, number.expand(batch, -1, -1)]  # [B, K, S, H, D]
    y = torch.where(reads[..., None], y.permute(0, 3, 1, 2, 4), 0.0)
    return (taps[..., None] * y).sum(-2).to(x.dtype)
