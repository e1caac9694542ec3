"""The passes around flash attention in plain PyTorch, without autograd, for CPUs.

The same functions as in launch.py; the letters are explained in kernels/convolved.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...term.layout import accumulator
from .taps import Boundary, places, visible


class Call(NamedTuple):
    """The options of a call."""

    boundary: Boundary
    causal: bool
    cut: int  # of how many nearest keys a query sees only some taps
    temperature: float | None
    scale: float

    def groups(self) -> tuple[int | None, ...]:
        """For each kernel of a key, how many places later the query is; None: all taps are visible."""
        return (None, *range(self.cut))


# Of the keys and of the values; None where there are no kernels on them.
Pair = tuple[Tensor | None, Tensor | None]


class Near(NamedTuple):
    """The nearest keys' numbers for the backward."""

    lse: Tensor  # [B, H, T], of whole rows
    far_lse: Tensor  # [B, H, N], the same for flash attention, as its backward takes it
    scores: Tensor  # [B, H, T, P]


def kernels(pair: Pair, call: Call, wide: torch.dtype) -> Pair:
    """The kernels of each key by its taps, whole and cut, [B, T, H or 1, 1 + P, S]."""
    keys, values = (None if taps is None else _kernels(taps, call, wide) for taps in pair)
    return keys, values


def _kernels(taps: Tensor, call: Call, wide: torch.dtype) -> Tensor:
    reach, groups = taps.shape[-1] // 2, call.groups()
    taps = taps.to(wide)
    out = taps.new_zeros(*taps.shape[:3], len(groups), taps.shape[-1])
    for g, away in enumerate(groups):
        first, last = visible(call.boundary, reach, away)
        seen = slice(reach + first, reach + last + 1)
        kernel = taps[..., seen]
        if call.temperature is not None:
            kernel = (kernel / call.temperature).softmax(-1)
        out[..., g, seen] = kernel
    return out


def kernels_backward(grads: Pair, kernels: Pair, pair: Pair, call: Call) -> Pair:
    """The gradients of the taps from those of their kernels; an invisible tap has none."""
    found: list[Tensor | None] = []
    for grad, kernel, taps in zip(grads, kernels, pair, strict=True):
        if grad is None or kernel is None or taps is None:
            found.append(None)
            continue
        if call.temperature is not None:
            mean = (grad * kernel).sum(-1, keepdim=True)
            grad = kernel * (grad - mean) / call.temperature
        found.append(grad.sum(-2).to(taps.dtype))
    return found[0], found[1]


def convolve(
    k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, None]:
    """Keys and values convolved with all taps; unchanged without kernels.

    Where a key or a value is not finite, the key becomes NaN and the value zero. Flash attention on
    a CPU masks by selection, so NaN reaches only the rows that see the key.
    """
    k, v = _seen(k, keys, call, None), _seen(v, values, call, None)
    if bool(k.sum().isfinite() & v.sum().isfinite()):
        return k, v, None
    spoiled = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    return k.masked_fill(spoiled[..., None], math.nan), torch.where(v.isfinite(), v, 0.0), None


def _range(kernel: Tensor, call: Call, away: int | None) -> range:
    """The range of offsets that are inside the sequence."""
    first, last = visible(call.boundary, kernel.shape[-1] // 2, away)
    return range(first, min(last, last if away is None else away) + 1)


def _group(away: int | None) -> int:
    return 0 if away is None else 1 + away


def _tap(kernel: Tensor, away: int | None, d: int, here: slice) -> Tensor:
    """[B, H or 1, k, 1]."""
    column = kernel[:, here, :, _group(away), kernel.shape[-1] // 2 + d]
    return column.transpose(1, 2)[..., None]


def _seen(x: Tensor, kernel: Tensor | None, call: Call, away: int | None) -> Tensor:
    """All keys as a query `away` places later sees them."""
    if kernel is None:
        return x
    offsets = _range(kernel, call, away)
    if offsets == range(1):
        return (_tap(kernel, away, 0, slice(None)) * x).to(x.dtype)
    out = x.new_zeros(x.shape, dtype=kernel.dtype)
    for d in offsets:
        here, there = places(d, x.shape[2])
        out[:, :, here] += _tap(kernel, away, d, here) * x[:, :, there]
    return out.to(x.dtype)


def merge(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None,
    far: Tensor | None, far_lse: Tensor | None, bad: None, call: Call,
) -> tuple[Tensor, Near]:  # fmt: skip
    """(out, `Near`) from the nearest keys and from flash attention's result for the others."""
    wide, length = accumulator(q.dtype), q.shape[2]
    scores = q.new_full((*q.shape[:3], call.cut), -math.inf, dtype=wide)
    for a in range(min(call.cut, length)):
        x = _seen(k, keys, call, a)[:, :, : length - a]
        scores[:, :, a:, a] = call.scale * (q[:, :, a:].to(wide) * x).sum(-1)
    lse = scores.logsumexp(-1)
    if far_lse is not None:
        lse[:, :, call.cut :] = torch.logaddexp(lse[:, :, call.cut :], far_lse.to(wide))
    out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=wide)
    for a in range(min(call.cut, length)):
        y = _seen(v, values, call, a)[:, :, : length - a]
        out[:, :, a:] += (scores[:, :, a:, a] - lse[:, :, a:]).exp()[..., None] * y
    if far is not None and far_lse is not None:
        rest = lse[:, :, call.cut :]
        out[:, :, call.cut :] += (far_lse.to(wide) - rest).exp()[..., None] * far
        far_lse = torch.empty_like(far_lse).copy_(rest)
    else:
        far_lse = lse[:, :, :0]
    return out.to(q.dtype), Near(lse, far_lse, scores)


def backward(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None,
    grad: Tensor, out: Tensor, lse: Tensor | None, scores: Tensor | None,
    far: tuple[Tensor, Tensor, Tensor] | None, call: Call,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """dq, dk, dv and those of the kernels; `far` are flash attention's own dq, dk~, dv~."""
    wide, length, cut = accumulator(q.dtype), q.shape[2], call.cut
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    dkeys, dvalues = (None if w is None else torch.zeros_like(w) for w in (keys, values))
    if far is not None:
        dq[:, :, cut:] = far[0]
        _spread(far[1].to(wide), k, keys, dk, dkeys, call, None)
        _spread(far[2].to(wide), v, values, dv, dvalues, call, None)
    if lse is None or scores is None:
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dkeys, dvalues
    grad = grad.to(wide)
    delta = (grad * out).sum(-1)
    for a in range(min(cut, length)):
        share = (scores[:, :, a:, a] - lse[:, :, a:]).exp()
        g = grad[:, :, a:]
        y = _seen(v, values, call, a)[:, :, : length - a]
        pull = call.scale * share * ((g * y).sum(-1) - delta[:, :, a:])
        dq[:, :, a:] += pull[..., None] * _seen(k, keys, call, a)[:, :, : length - a]
        _spread(pull[..., None] * q[:, :, a:], k, keys, dk, dkeys, call, a)
        _spread(share[..., None] * g, v, values, dv, dvalues, call, a)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dkeys, dvalues


def _spread(
    g: Tensor, x: Tensor, kernel: Tensor | None, dx: Tensor, dkernel: Tensor | None, call: Call,
    away: int | None,
) -> None:  # fmt: skip
    """Add to dx and dkernel the parts from g, the gradient of the first keys after convolution."""
    count = g.shape[2]
    if kernel is None or dkernel is None:
        dx[:, :, :count] += g
        return
    group, reach = _group(away), kernel.shape[-1] // 2
    for d in _range(kernel, call, away):
        here, there = places(d, x.shape[2])
        end = min(here.stop, count)
        if end <= here.start:
            continue
        here, there = slice(here.start, end), slice(there.start, there.start + end - here.start)
        dx[:, :, there] += _tap(kernel, away, d, here) * g[:, :, here]
        dots = (g[:, :, here] * x[:, :, there]).sum(-1).transpose(1, 2)  # [B, k, H]
        if kernel.shape[2] == 1:
            dots = dots.sum(2, keepdim=True)
        dkernel[:, here, :, group, reach + d] = dots
