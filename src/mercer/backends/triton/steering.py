"""Bandwidths that each query sets: computed before the fused kernels start, with their gradients.

    1 / s_i^2        log s_i = log s + reach tanh(<x_i, w> / reach)

If x are the features of the queries, as in AdaptiveRBF, this is part of the call of the fused
kernels. Otherwise it is a separate autograd step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...term.factors import QueryBandwidthFactor
from .. import Task
from ..runtime.launch import start
from .layout import expanded, next_power_of_two, readable_rows, strides_of
from .plan import Inputs
from .static import Log, Static, Steer

# Places that one program sums over: few, so that there are enough programs for all SMs.
PART = 128


def scaled(steer: Steer, inputs: Inputs, w: Tensor) -> Tensor:
    """Replace the logarithm of the base by the scale of every query."""
    slot, bend, reach = steer
    log = inputs.scale[slot].contiguous()
    found = _scales(inputs.q[slot], w.contiguous(), log, bend, reach)
    inputs.scale[slot] = found
    return found


def pass_on(static: Static, grads: list[Any], q: list[Tensor], w: Tensor, log: Tensor) -> None:
    """Pass the gradient of the scales on to the queries, the weights and the base."""
    assert static.steer is not None
    slot, bend, reach = static.steer
    at = 2 * len(q) + 1 + slot
    if not static.slots[slot].wants:
        dw = dlog = None
    else:
        _, dw, dlog = _gradients(
            grads[at], q[slot], w.contiguous(), log.contiguous(), bend, reach, grads[slot]
        )
    grads[at] = dlog
    grads.insert(5 * len(q) + 1, dw)


def by_queries(f: QueryBandwidthFactor, task: Task) -> bool:
    """Whether x are the features of the queries, as the kernels read them."""
    whole = f.q.shape[:2] == (task.batch, task.heads)
    return f.x is f.q and whole and f.q.dtype == task.v.dtype and f.q.stride(-1) == 1


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
        x, w, log = readable_rows(x), w.contiguous(), log.contiguous()
        ctx.save_for_backward(x, w, log)
        ctx.rest = bend, reach
        return _scales(x, w, log, bend, reach)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        return (*_gradients(grad, *ctx.saved_tensors, *ctx.rest), None, None)


def _scales(x: Tensor, w: Tensor, log: Tensor, bend: Log, reach: float) -> Tensor:
    """1 / s_i^2, [B, H, T], for log s_i = log s + reach tanh(<x_i, w> / reach)."""
    from .kernels import norms

    batch, heads, length, width = x.shape
    out = w.new_empty(batch, heads, length)
    start(
        norms.steer, (-(-length // 64), batch * heads, 1), {"WIDTH": next_power_of_two(width), "BM": 64, "BEND": bend},
        (x, w, log, out), (*_steering(x, w, log), reach),
    )  # fmt: skip
    return out


def _gradients(
    grad: Tensor, x: Tensor, w: Tensor, log: Tensor, bend: Log, reach: float,
    to: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, w and log. With `to`, that of x is added there."""
    from .kernels import norms

    batch, heads, length, width = x.shape
    parts = -(-length // PART)
    dx = x.new_empty(x.shape) if to is None else to
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    sums = w.new_empty(batch, heads, parts, width + 1)
    start(
        norms.steer_backward, (parts, batch * heads, 1),
        {"WIDTH": next_power_of_two(width), "BM": 64, "PART": PART, "BEND": bend, "ADD": to is not None},
        (x, w, log, grad, dx, sums),
        (*_steering(x, w, log), *strides_of(dx, batch), *grad.stride()[:2], reach),
    )  # fmt: skip
    # Of each head, for all of w and for log.
    total = sums.sum((0, 2))
    dw, dlog = total[:, :width], total[:, width]
    dw = dw if w.shape[0] == heads else dw.sum(0, keepdim=True)
    return dx, dw, dlog if log.shape[0] == heads else dlog.sum(0, keepdim=True)


def _steering(x: Tensor, w: Tensor, log: Tensor) -> tuple[int, ...]:
    heads, length, width = x.shape[1:]
    return (
        heads, length, width, *strides_of(x, x.shape[0]), 0 if w.shape[0] == 1 else w.stride(0),
        0 if log.shape[0] == 1 else 1,
    )  # fmt: skip
