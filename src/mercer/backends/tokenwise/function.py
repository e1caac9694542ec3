"""Attention to convolved keys and values as one function with its own gradient.

A query sees only some taps of its P nearest keys, and all taps of the others. Flash attention takes
the others: j <= i - P is causal for the queries from P on and the first T - P keys. The nearest keys
are merged by log_mass.

The passes before and after flash attention are Triton kernels (launch.py) or, on a CPU, plain
PyTorch (plain.py). Outside of compiled graphs `Fused` runs them; inside, operators.py does.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...term.layout import accumulator
from ..runtime.device import INTERPRETED
from . import flash, launch, plain
from .plain import Call

Taps = Tensor | None


class Kept(NamedTuple):
    """The results of the forward, all of them kept for the backward."""

    out: Tensor
    kt: Tensor | None  # keys and values as flash attention saw them, [B, H, T, D]
    vt: Tensor | None
    keys: Tensor | None  # the kernels, [B, T, H or 1, 1 + P, S]
    values: Tensor | None
    lse: Tensor | None  # as in `Near`
    far_lse: Tensor | None
    scores: Tensor | None

    def raw(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs k and v. Those without kernels are equal to the copies."""
        k = k if self.kt is None or self.keys is not None else self.kt
        return k, v if self.vt is None or self.values is not None else self.vt


def passes(device: torch.device) -> ModuleType:
    """The module that has the passes around flash attention."""
    return launch if device.type == "cuda" or INTERPRETED else plain


def forward(
    q: Tensor, k: Tensor, v: Tensor, key_taps: Taps, value_taps: Taps, call: Call, chosen: int
) -> Kept:
    """q, k and v have one shape [B, H, T, D]; `chosen` is one of flash.py."""
    around, cut, length = passes(q.device), call.cut, q.shape[2]
    keys, values = around.kernels((key_taps, value_taps), call, accumulator(q.dtype))
    if length <= cut:
        out, near = around.merge(q, k, v, keys, values, None, None, None, call)
        return Kept(out, None, None, keys, values, near.lse, None, near.scores)
    kt, vt, bad = around.convolve(k, v, keys, values, call)
    far = slice(None, length - cut)
    out, far_lse = flash.forward(q[:, :, cut:], kt[:, :, far], vt[:, :, far], call, chosen)
    kept = Kept(out, kt, vt, keys, values, None, far_lse, None)
    if cut or bad is not None:
        out, near = around.merge(q, *kept.raw(k, v), keys, values, out, far_lse, bad, call)
        kept = Kept(out, kt, vt, keys, values, *near)
    return kept


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, key_taps: Taps, value_taps: Taps, kept: Kept,
    call: Call, chosen: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv and those of the taps; k and v may be those of `Kept.raw`."""
    out, kt, vt, keys, values, lse, far_lse, scores = kept
    around, cut, far = passes(q.device), call.cut, None
    if grad.stride() != out.stride():
        grad = torch.empty_like(out).copy_(grad)
    if kt is not None and vt is not None and far_lse is not None:
        seen = slice(None, q.shape[2] - cut)
        far = flash.backward(
            grad[:, :, cut:], q[:, :, cut:], kt[:, :, seen], vt[:, :, seen], out[:, :, cut:],
            far_lse, call, chosen,
        )  # fmt: skip
    dq, dk, dv, *dkernels = around.backward(
        q, *kept.raw(k, v), keys, values, grad, out, lse, scores, far, call
    )
    return (
        dq,
        dk,
        dv,
        *around.kernels_backward(dkernels, (keys, values), (key_taps, value_taps), call),
    )


class Fused(torch.autograd.Function):
    """The function outside of compiled graphs: cheaper to call than an operator."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_taps: Taps, value_taps: Taps, call: Call,
        chosen: int,
    ) -> Tensor:  # fmt: skip
        kept = forward(q, k, v, key_taps, value_taps, call, chosen)
        ctx.options = call, chosen
        ctx.save_for_backward(q, *kept.raw(k, v), key_taps, value_taps, *kept)
        return kept.out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_taps, value_taps, *kept = ctx.saved_tensors
        found = backward(grad, q, k, v, key_taps, value_taps, Kept(*kept), *ctx.options)
        return *found, None, None
