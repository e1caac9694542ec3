"""Attention to convolved keys and values as one function with its own gradient.

Of T keys, those a query sees whole, all but its nearest P, are flash attention's: query i and key
j <= i - P is causal again for the queries from P on and the first T - P keys. What the nearest add
is merged by log_mass. Its backward needs no second pass over the keys: flash attention's backward
is given the output and the log_mass of the whole rows, from which it forms their own weights.

Before and after flash attention there are small passes, in Triton (taps_launch.py) or, on a CPU,
in plain PyTorch (plain_taps.py).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..taps import sum_by_id
from ..term import accumulator
from . import plain_taps, taps_launch
from .plain_taps import Call, Near
from .triton import INSTALLED
from .triton_plan import INTERPRETED

MAX_WIDTH = 256
# Of torch.nn.attention.SDPBackend.
FLASH, CUDNN = 1, 3


def refuses(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why this function cannot run, or None; q, k and v are [B, H, T, D]."""
    device = q.device.type
    if device not in ("cpu", "cuda"):
        return f"it runs on CPU and CUDA, not on {device}"
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        return "there is nothing to smooth: an empty batch or sequence"
    if q.shape[2] != k.shape[2]:
        return "it needs as many queries as keys"
    if device == "cpu" and not INTERPRETED:
        return None
    if not INSTALLED:
        return "Triton is not installed"
    halves = (torch.bfloat16, torch.float16)
    if q.dtype not in ((torch.float32,) if INTERPRETED else halves):
        return f"flash attention takes half precision, and came with {q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > MAX_WIDTH or q.shape[0] * q.shape[1] > 65535:
        return "there are too many features or heads"
    return None


def run(
    q: Tensor, k: Tensor, v: Tensor, key_taps: Tensor | None, value_taps: Tensor | None, call: Call
) -> Tensor | None:
    """The output for q, k, v of one shape [B, H, T, D]; None if there is no flash attention."""
    chosen = _choice(q, k, v, call)
    if chosen is None:
        return None
    out: Tensor = _Fused.apply(q, k, v, key_taps, value_taps, call, chosen)
    return out


def _choice(q: Tensor, k: Tensor, v: Tensor, call: Call) -> int | None:
    """Which flash attention torch would take; None if it would take another form."""
    if not q.is_cuda or q.shape[2] <= call.cut:
        return FLASH
    if q.shape[2] < 64:
        # Only then may the few keys that are left out matter.
        far = slice(None, q.shape[2] - call.cut)
        q, k, v = q[:, :, call.cut :], k[:, :, far], v[:, :, far]
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, call.causal, scale=call.scale)
    return chosen if chosen in (FLASH, CUDNN) else None


def _passes(device: torch.device) -> ModuleType:
    return taps_launch if device.type == "cuda" or INTERPRETED else plain_taps


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_taps: Tensor | None,
        value_taps: Tensor | None, call: Call, chosen: int,
    ) -> Tensor:  # fmt: skip
        passes, cut, length = _passes(q.device), call.cut, q.shape[2]
        wide = accumulator(q.dtype)
        keys, values = (
            None if taps is None else passes.kernels(taps, call, wide)
            for taps in (key_taps, value_taps)
        )
        far, far_lse, bad, rest, kt, vt = None, None, None, (), None, None
        if length > cut:
            kt, vt, bad = passes.convolve(k, v, keys, values, call)
            far, far_lse, rest = flash(
                q[:, :, cut:], kt[:, :, : length - cut], vt[:, :, : length - cut], call, chosen
            )
            # A copy that no kernel made serves as well as what came.
            k, v = kt if keys is None else k, vt if values is None else v
        if cut or bad is not None:
            out, near = passes.merge(q, k, v, keys, values, far, far_lse, bad, call)
        else:
            assert far is not None
            assert far_lse is not None
            out, near = far, Near(far_lse, far_lse, far_lse)
        ctx.call, ctx.rest = call, rest
        ctx.save_for_backward(q, k, v, kt, vt, key_taps, value_taps, keys, values, out, *near)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, kt, vt, key_taps, value_taps, keys, values, out, *kept = ctx.saved_tensors
        call, near = ctx.call, Near(*kept)
        passes, cut = _passes(q.device), call.cut
        if grad.stride() != out.stride():
            grad = torch.empty_like(out).copy_(grad)
        far = None
        if kt is not None:
            length = q.shape[2]
            far = flash_backward(
                grad[:, :, cut:], q[:, :, cut:], kt[:, :, : length - cut], vt[:, :, : length - cut],
                out[:, :, cut:], near.far_lse, ctx.rest, call,
            )  # fmt: skip
        dq, dk, dv, dkeys, dvalues = passes.backward(
            q, k, v, keys, values, grad, out, near, far, call
        )
        pairs = ((dkeys, keys, key_taps), (dvalues, values, value_taps))
        dtaps = (None if d is None else passes.kernels_backward(d, w, u, call) for d, w, u in pairs)
        return dq, dk, dv, *dtaps, None, None


def flash(
    q: Tensor, k: Tensor, v: Tensor, call: Call, chosen: int
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """(out, log_mass, what its backward takes besides)."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, call.causal, scale=call.scale
        )
        return out, lse, ()
    if chosen == CUDNN:
        found = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, call.causal, False, scale=call.scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, call.causal, False, scale=call.scale
        )
    out, lse, *rest = found
    return out, lse, (chosen, *rest)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[Any, ...],
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of the keys that it saw, in rows that saw more."""
    aten = torch.ops.aten
    if not rest:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, call.causal, scale=call.scale
        )
    chosen, in_q, in_k, most_q, most_k, seed, offset, _ = rest
    if chosen == CUDNN:
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, offset, None, in_q, in_k, most_q, most_k, 0.0,
            call.causal, scale=call.scale,
        )  # fmt: skip
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, in_q, in_k, most_q, most_k, 0.0, call.causal, seed, offset,
        scale=call.scale,
    )  # fmt: skip


def gather(table: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """table[ids] for each target, [B, T, H, S]; the gradient is the same bits each time."""
    found: tuple[Tensor, ...] = _Gather.apply(table, ids)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        ids = ids.long()
        ctx.save_for_backward(table, ids)
        return table[ids].unbind(2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        table, ids = ctx.saved_tensors
        single = table.dtype != torch.float64 and not torch.compiler.is_compiling()
        if single and ids.numel() and INSTALLED and (table.is_cuda or INTERPRETED):
            return taps_launch.sum_by_id(list(grads), ids, table), None
        rows = torch.stack(grads, 2).flatten(0, 1)
        return sum_by_id(rows, ids.flatten(), table.shape[0]), None
