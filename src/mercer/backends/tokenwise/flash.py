"""Torch's flash attention, forward and backward, with log_mass.

The backward is given rows that saw more keys than flash attention did. It forms its weights from
the log_mass of the whole rows, so no second pass over the keys is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...opaque.constant import is_constant
from .plain import Call

# Of torch.nn.attention.SDPBackend.
FLASH, CUDNN = 1, 3


def choice(q: Tensor, k: Tensor, v: Tensor, call: Call) -> int | None:
    """Which flash attention torch would choose; None if it would choose another backend."""
    if not q.is_cuda or q.shape[2] <= call.cut:
        return FLASH
    if q.shape[2] < 64:
        # Only then may the few keys that are left out matter.
        far = slice(None, q.shape[2] - call.cut)
        q, k, v = q[:, :, call.cut :], k[:, :, far], v[:, :, far]
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, call.causal, scale=call.scale)
    return chosen if chosen in (FLASH, CUDNN) else None


@is_constant
def is_on(device: torch.device) -> bool:
    """Whether flash attention is certain to run in a compiled graph, where `choice` cannot be used."""
    if device.type == "cpu":
        return True
    on = torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.cudnn_sdp_enabled()
    return on and torch.cuda.get_device_capability(device) >= (8, 0)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, chosen: int) -> tuple[Tensor, Tensor]:
    """(out, log_mass [B, H, N])."""
    aten, causal, scale = torch.ops.aten, call.causal, call.scale
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if chosen == CUDNN:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out, lse.reshape(lse.shape[:3])
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, chosen: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv of the keys that it saw, from the output and the log_mass of whole rows."""
    aten, causal, scale, count = torch.ops.aten, call.causal, call.scale, q.shape[2]
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    # Without dropout, seed and offset are not read.
    if chosen == CUDNN:
        seed, offset = (q.new_empty((), dtype=torch.long) for _ in range(2))
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse[..., None], seed, offset, None, None, None, count, count, 0.0,
            causal, scale=scale,
        )  # fmt: skip
    seed, offset = (q.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, count, count, 0.0, causal, seed, offset, scale=scale
    )
