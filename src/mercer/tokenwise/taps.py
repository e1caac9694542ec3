"""Small convolution kernels, one for each key, in plain PyTorch.

Nothing is read that the query must not see, so a NaN there has no effect. Gradients are sums in a
fixed order, without atomics.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..backends.tokenwise.taps import BOUNDARIES as BOUNDARIES
from ..backends.tokenwise.taps import Boundary as Boundary
from ..backends.tokenwise.taps import num_cut as num_cut
from ..backends.tokenwise.taps import places, visible
from ..filters import Filter
from ..term.layout import accumulator


def check_boundary(boundary: object) -> None:
    if boundary not in BOUNDARIES:
        raise ValueError(f"boundary must be one of {', '.join(BOUNDARIES)}, got {boundary!r}")


def check_size(size: object) -> None:
    if not isinstance(size, int) or size < 1 or size % 2 == 0:
        raise ValueError(f"size must be an odd number such as 3, 5 or 7, got {size}")


def check_temperature(name: str, value: object) -> None:
    if value is None:
        return
    # In a compiled graph the number may be symbolic: only compare it.
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be None or a positive finite number, got {value}")


def check_taps(
    name: str, taps: object, x: Tensor, batch: int, num_keys: int, query_heads: int
) -> None:
    """Raise ValueError where taps do not fit what they convolve, [B, H, K, D]."""
    if taps is None:
        return
    if not isinstance(taps, Tensor) or taps.dim() != 4 or not taps.is_floating_point():
        came = list(taps.shape) if isinstance(taps, Tensor) else type(taps).__name__
        raise ValueError(f"{name} must be numbers [B, K, H or 1, S], got {came}")
    sequences, length, heads, size = taps.shape
    # Compared one by one: torch.compile cannot test a symbolic size with `in`.
    fits = length == num_keys and (sequences == 1 or sequences == batch)
    if not (fits and (heads == 1 or heads == x.shape[1] or heads == query_heads)):
        allowed = sorted({1, x.shape[1], query_heads})
        raise ValueError(
            f"{name} must be [{batch}, {num_keys}, {' or '.join(map(str, allowed))}, S], "
            f"got {list(taps.shape)}"
        )
    if size % 2 == 0:
        raise ValueError(f"{name} must have an odd number of taps, got {size}")
    check_size(size)
    if taps.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, but is on {taps.device}")


def cut(
    taps: Tensor, normalize: float | None, boundary: Boundary, away: int | None
) -> tuple[int, Tensor]:
    """The kernel that a query `away` places later sees: first offset, and taps [B, K, H, n]."""
    reach = taps.shape[-1] // 2
    first, last = visible(boundary, reach, away)
    kernel = taps[..., reach + first : reach + last + 1]
    if normalize is not None:
        kernel = (kernel / normalize).softmax(-1)
    if away is not None and last > away:
        # For a query the sequence ends with itself: later places contribute zero.
        kernel = kernel[..., : away - first + 1]
    return first, kernel


def joined(
    filter: Filter, first: int, length: int, reach: int, device: torch.device
) -> Tensor | None:
    """Whether tap d of key first + n stays in its sequence, [B or 1, K, S]; None if all do."""
    if not length:
        return None
    b = torch.arange(filter.batch or 1, device=device)[:, None, None]
    j = torch.arange(first, first + length, device=device)[:, None]
    d = torch.arange(-reach, reach + 1, device=device)
    joins = filter.to(device).joins(b, j, (j + d).clamp(first, first + length - 1))
    if joins is True:
        return None
    return torch.as_tensor(joins, device=device).expand(b.shape[0], length, 2 * reach + 1)


def convolve(x: Tensor, first: int, kernel: Tensor, joins: Tensor | None = None) -> Tensor:
    """sum_d kernel[j, d] x[j + d], [B, H, K, D]; beyond the ends of a sequence x is zero.

    Args:
        x: [B, H, K, D].
        first: the offset of the first tap.
        kernel: [B or 1, K, H or 1, n], for the offsets first, first + 1, …
        joins: which taps stay in their sequence, [B or 1, K, S], as `joined` gives it.
    """
    if first == 0 and kernel.shape[-1] == 0:
        return torch.zeros_like(x)
    return _Convolve.apply(x, kernel, joins, first)


class _Convolve(torch.autograd.Function):
    """Keeps x and the kernel, not a copy of x for each tap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, joins: Tensor | None, first: int) -> Tensor:
        ctx.save_for_backward(x, kernel, joins)
        ctx.first = first
        wide = accumulator(x.dtype)
        batch = max(x.shape[0], kernel.shape[0]) if x.shape[0] and kernel.shape[0] else 0
        out = x.new_zeros((batch, *x.shape[1:]), dtype=wide)
        for n in range(kernel.shape[-1]):
            here, there = places(first + n, x.shape[2])
            tap = kernel[:, here, :, n].transpose(1, 2)[..., None].to(wide)  # [B, H or 1, k, 1]
            out[:, :, here] += tap * _shown(x[:, :, there], joins, here, first + n)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel, joins = ctx.saved_tensors
        first, wide = ctx.first, accumulator(x.dtype)
        (g,) = grads
        g = g.to(wide)
        dx = torch.zeros_like(g) if ctx.needs_input_grad[0] else None
        dkernel = torch.zeros_like(kernel, dtype=wide) if ctx.needs_input_grad[1] else None
        for n in range(kernel.shape[-1]):
            here, there = places(first + n, x.shape[2])
            if dx is not None:
                tap = kernel[:, here, :, n].transpose(1, 2)[..., None].to(wide)
                dx[:, :, there] += _shown(tap * g[:, :, here], joins, here, first + n)
            if dkernel is not None:
                y = _shown(x[:, :, there], joins, here, first + n)
                d = (g[:, :, here] * y).sum(-1).transpose(1, 2)  # [B, k, H]
                d = d if kernel.shape[2] > 1 else d.sum(2, keepdim=True)
                dkernel[:, here, :, n] = d if kernel.shape[0] > 1 else d.sum(0, keepdim=True)
        if dx is not None:
            dx = (dx if x.shape[0] > 1 else dx.sum(0, keepdim=True)).to(x.dtype)
        return dx, None if dkernel is None else dkernel.to(kernel.dtype), None, None


def _shown(y: Tensor, joins: Tensor | None, here: slice, d: int) -> Tensor:
    if joins is None:
        return y
    return torch.where(joins[:, None, here, d + joins.shape[-1] // 2, None], y, 0.0)
