"""A block of a transformer: attention, a feed-forward net, their norms and sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .. import parallel
from ..filters import Filter
from ..nn import Cache, KernelAttention, SegmentMemory, attention_weights
from ..parallel import Split
from ..systems import Attention

Norm = Literal["layer", "rms", "rms-plain"]
Activation = Literal["relu", "gelu", "gelu-exact", "relu2", "silu"]
Mlp = Literal["plain", "gated"]
NORMS = ("layer", "rms", "rms-plain")
MLPS = ("plain", "gated")


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def gelu(x: Tensor) -> Tensor:
    """The tanh form, as in GPT-2."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": gelu,
    "gelu-exact": F.gelu,
    "relu2": squared_relu,
    "silu": F.silu,
}


def make_norm(kind: Norm, width: int, bias: bool, eps: float | None = None) -> nn.Module:
    """A layer norm, or an RMS norm with or without weights."""
    if kind == "layer":
        return nn.LayerNorm(width, eps=1e-5 if eps is None else eps, bias=bias)
    eps = 1e-6 if eps is None else eps
    return nn.RMSNorm(width, eps=eps, elementwise_affine=kind == "rms")


class FeedForward(nn.Module):
    """W_2 f(W_1 x); gated, W_2 (f(W_3 x) * W_1 x)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: Activation,
        bias: bool,
        dropout: float,
        *,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=bias) if gated else None
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.dropout(self.activation(self.up(x))))
        return self.down(self.dropout(self.activation(self.gate(x)) * self.up(x)))

    @property
    def kept(self) -> int:
        """Numbers that the backward reads, for each token: what each product and f was given."""
        return self.up.out_features * (2 if self.gate is None else 4)


@dataclass
class Weights:
    """The weights of every layer so far, each [B, H, Q, K]."""

    own: list[Tensor] = field(default_factory=list)
    cross: list[Tensor] = field(default_factory=list)


class Block(GradientCheckpointingLayer):
    """x + attention(norm x), then x + cross-attention(norm x) if any, then x + net(norm x).

    With `pre_norm=False` the norm comes after each sum instead.
    """

    def __init__(
        self,
        attention: Attention,
        *,
        d_ff: int,
        norm: Norm,
        activation: Activation,
        bias: bool,
        dropout: float,
        activation_dropout: float = 0.0,
        pre_norm: bool = True,
        mlp: Mlp = "plain",
        norm_eps: float | None = None,
        cross: KernelAttention | None = None,
    ) -> None:
        super().__init__()
        d_model = attention.d_model
        self.pre_norm = pre_norm
        self.attention, self.cross = attention, cross
        self.attention_norm = make_norm(norm, d_model, bias, norm_eps)
        self.cross_norm = make_norm(norm, d_model, bias, norm_eps) if cross is not None else None
        self.feed_forward = FeedForward(
            d_model, d_ff, activation, bias, activation_dropout, gated=mlp == "gated"
        )
        self.feed_forward_norm = make_norm(norm, d_model, bias, norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        *,
        filter: Filter | None = None,
        cache: Cache | SegmentMemory | None = None,
        token_ids: Tensor | None = None,
        offset: Tensor | None = None,
        context: Tensor | None = None,
        context_filter: Filter | None = None,
        context_cache: Cache | None = None,
        weights: Weights | None = None,
        split: Split | None = None,
    ) -> Tensor:
        """[B, T, d_model] -> the same; the attention's weights are added to `weights`.

        With a `split`, x is the part of this process, and all else is of the whole sequence.
        """
        own: dict[str, Any] = {"filter": filter, "cache": cache, "token_ids": token_ids}
        if isinstance(self.attention, KernelAttention):
            own["offset"] = offset

        def attend(y: Tensor) -> Tensor:
            if weights is not None:
                # Before the layer, whose cache then holds y.
                weights.own.append(attention_weights(self.attention, y, **own))
            if split is not None:
                return parallel.attend(
                    self.attention, y, split, filter=filter, token_ids=token_ids, offset=offset
                )
            out: Tensor = self.attention(y, **own)
            return out

        x = self._sum(x, self.attention_norm, attend)
        if self.cross is not None:
            assert context is not None
            assert self.cross_norm is not None
            cross = self.cross
            towards: dict[str, Any] = {"filter": context_filter, "cache": context_cache}

            def look(y: Tensor) -> Tensor:
                if weights is not None:
                    weights.cross.append(attention_weights(cross, y, context, **towards))
                out: Tensor = cross(y, context, **towards)
                return out

            x = self._sum(x, self.cross_norm, look)
        return self._sum(x, self.feed_forward_norm, self.feed_forward)

    def _sum(self, x: Tensor, norm: nn.Module, inner: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(inner(norm(x)))
        return norm(x + self.dropout(inner(x)))

    @property
    def residual(self) -> list[nn.Linear]:
        """The last projection of each residual branch."""
        last = [self.attention.out, self.feed_forward.down]
        return last if self.cross is None else [*last, self.cross.out]


def check_block(norm: object, activation: object, mlp: object) -> None:
    """Raise ValueError for an unknown name."""
    if mlp not in MLPS:
        raise ValueError(f"mlp must be one of {', '.join(MLPS)}, got {mlp!r}")
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def norm_of(x: Tensor) -> Tensor:
    """x divided by its root mean square."""
    return F.rms_norm(x, x.shape[-1:])


def leading_zeros(mask: Tensor) -> Tensor:
    """The number of padding places on the left of each sequence, [B]."""
    return (mask.cumsum(1) == 0).sum(1)


def is_known(x: Tensor) -> bool:
    """Whether the data can be read: not while compiling, not on the meta device."""
    return not torch.compiler.is_compiling() and x.device.type != "meta"
