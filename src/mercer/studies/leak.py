"""The published code's boundary, rebuilt as a control: it shows a query its future neighbours.

The published layer multiplies the logits of hidden taps by 0 before the softmax, where they should
be removed. With a causal filter and the rule "shrink", that concerns the key at the query's own
place: all its neighbours are hidden, and get the weight 1 / (e^c + S - 1) each, where c is the
logit of the central tap over the temperature. Half of these neighbours are the future. Nearer keys
of a size above 3 have the same fault for some of their taps.

This is for a study of what the leak did. The library's own layers are strictly causal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mercer.filters import Causal, Filter
from mercer.kernels import Kernel
from mercer.nn import KernelAttention, TokenKernels
from mercer.smoother import smooth
from mercer.term.features import Features


class LeakyAttention(KernelAttention):
    """KernelAttention with token kernels on values, and the leak of the published code."""

    def _vicinity(
        self,
        tokens: TokenKernels,
        token_ids: Tensor,
        q: Features,
        k: Features,
        v: Tensor,
        filter: Filter,
        cache: Any,
    ) -> Tensor:
        if tokens.on != "v" or tokens.temperature is None or q.length < k.length:
            raise ValueError("the leak is rebuilt for values with a softmax, and for whole texts")
        taps = tokens.taps(token_ids, self.layer).values
        assert taps is not None
        return leak(
            self.joined_kernel, q, k, v, taps / tokens.temperature,
            dropout_p=self.dropout if self.training else 0.0, backend=self.backend,
        )  # fmt: skip


def leak(
    kernel: Kernel,
    q: Features,
    k: Features,
    v: Tensor,
    logits: Tensor,
    *,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Attention to values that are convolved as in the published code; logits [B, T, H or 1, S].

    A value that query i reads at key j is  sum_d softmax_d(logits_j [tap d visible]) v_{j+d}.
    Keys further back than p places see all taps, so only p + 1 diagonals are corrected.
    """
    p = logits.shape[-1] // 2
    taps = logits.movedim(2, 1)  # [B, H or 1, T, S]
    whole = _convolve(v, taps.softmax(-1))
    out, log_mass = smooth(
        kernel, q, k, whole, filter=Causal(), dropout_p=dropout_p, backend=backend,
        return_log_mass=True,
    )  # fmt: skip
    length = v.shape[2]
    offsets = torch.arange(-p, p + 1, device=v.device)
    for near in range(min(p, length)):
        # Key i - near, for which the taps |d| <= near are visible.
        hidden = taps * (offsets.abs() <= near)
        change = _convolve(v, hidden.softmax(-1)) - whole
        weight = (_pair(kernel, q, k, near) - log_mass[..., near:]).exp()
        out = out + F.pad(weight[..., None] * change[:, :, : length - near], (0, 0, near, 0))
    return out


def _pair(kernel: Kernel, q: Features, k: Features, near: int) -> Tensor:
    """log w of query i and key i - near, [B, H, T - near]: calls of one query and one key each."""
    length = q.length - near

    def cut(x: Features, start: int) -> Features:
        parts = {name: part[:, :, start : start + length] for name, part in x.items()}
        return Features(
            **{name: y.transpose(1, 2).flatten(0, 1)[:, :, None] for name, y in parts.items()}
        )

    log = kernel.log_weight(cut(q, near), cut(k, 0))  # [B (T - near), H, 1, 1]
    return log[..., 0, 0].unflatten(0, (-1, length)).transpose(1, 2)


def _convolve(v: Tensor, taps: Tensor) -> Tensor:
    """sum_d taps[..., d] v_{j+d}, zero beyond the ends."""
    size = taps.shape[-1]
    p = size // 2
    padded = F.pad(v, (0, 0, p, p))
    parts = [taps[..., d, None] * padded[:, :, d : d + v.shape[2]] for d in range(size)]
    return torch.stack(parts).sum(0)


def published_boundary(model: Any) -> None:
    """Give a language model's layers with token kernels the leak of the published code."""
    for layer in model.modules():
        if isinstance(layer, KernelAttention) and layer.has_token_kernels:
            layer.__class__ = LeakyAttention
