"""Bandwidths that each query sets: computed before the fused kernels start, with their gradients.

1 / s_i^2        log s_i = log s + reach tanh(<x_i, w> / reach)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...term.factors import QueryBandwidthFactor
from ..runtime.launch import start
from .layout import expanded, next_power_of_two, readable_rows, strides_of
from .static import Log

# Places that one program sums over: few, so that there are enough programs for all SMs.
PART = 128


def steered(
    f: QueryBandwidthFactor, shape: tuple[int, int, int], bend: Log, dtype: torch.dtype
) -> Tensor:
    """The scale of every query."""
    x = f.x.to(dtype)
    x = expanded(x, x.shape[0], shape[1], *x.shape[2:])
    return expanded(_Steer.apply(x, f.w.float(), f.base.log.float(), bend, f.reach), *shape)


class _Steer(torch.autograd.Function):
    """The scale of every query, by one kernel each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, log: Tensor, bend: Log, reach: float) -> Tensor:
        from .kernels import norms

        x, w, log = readable_rows(x), w.contiguous(), log.contiguous()
        ctx.save_for_backward(x, w, log)
        ctx.rest = bend, reach
        batch, heads, length, width = x.shape
        out = w.new_empty(batch, heads, length)
        start(
            norms.steer, (-(-length // 64), batch * heads, 1),
            {"WIDTH": next_power_of_two(width), "BM": 64, "BEND": bend},
            (x, w, log, out), (*_steering(x, w, log), reach),
        )  # fmt: skip
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        from .kernels import norms

        x, w, log = ctx.saved_tensors
        bend, reach = ctx.rest
        batch, heads, length, width = x.shape
        parts = -(-length // PART)
        dx = x.new_empty(x.shape)
        grad = readable_rows(grad)
        sums = w.new_empty(batch, heads, parts, width + 1)
        start(
            norms.steer_backward, (parts, batch * heads, 1),
            {"WIDTH": next_power_of_two(width), "BM": 64, "PART": PART, "BEND": bend},
            (x, w, log, grad, dx, sums), (*_steering(x, w, log), *grad.stride()[:2], reach),
        )  # fmt: skip
        # Of each head, for all of w and for log.
        total = sums.sum((0, 2))
        dw, dlog = total[:, :width], total[:, width]
        dw = dw if w.shape[0] == heads else dw.sum(0, keepdim=True)
        return dx, dw, dlog if log.shape[0] == heads else dlog.sum(0, keepdim=True), None, None


def _steering(x: Tensor, w: Tensor, log: Tensor) -> tuple[int, ...]:
    heads, length, width = x.shape[1:]
    return (
        heads, length, width, *strides_of(x, x.shape[0]), 0 if w.shape[0] == 1 else w.stride(0),
        0 if log.shape[0] == 1 else 1,
    )  # fmt: skip
