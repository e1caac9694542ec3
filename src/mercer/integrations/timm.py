"""Mercer in timm's vision transformers.

    from mercer.integrations import timm as mercer_timm

    model = timm.create_model(name, attn_layer=mercer_timm.attention("RBF(heads=3)"))
    mercer_timm.patch(model, "RBF(heads=3)")                       # or a model that exists

Weights of timm load strictly, and with `Exponential()` the model is as it came. The numbers of the
kernels are new parameters, in the submodule `mercer` of each attention layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..filters import Causal, Filter, Full, Mask
from ..filters.base import can_read
from ..kernels import Kernel
from ..own import Trust
from .host import KernelHost, own_kernel

M = TypeVar("M", bound=nn.Module)


def attention(kernel: str | Kernel, *, trust_kernels: Trust = None) -> type[nn.Module]:
    """A class for `attn_layer`: timm's Attention with this kernel. Each layer gets a copy of it."""
    base = _attention()

    class KernelAttention(base):  # type: ignore[misc, valid-type]
        """timm's Attention, whose weights are those of a kernel."""

        def __init__(self, dim: int, num_heads: int = 8, *rest: Any, **options: Any) -> None:
            super().__init__(dim, num_heads, *rest, **options)
            own = own_kernel(kernel, self.num_heads, self.head_dim, "the layer", trust_kernels)
            self.mercer = KernelHost(own).to(self.qkv.weight.device)

        forward = _forward

    # Checked here, before a model is built.
    own_kernel(kernel, None, None, "the layer", trust_kernels)
    return KernelAttention


def patch(
    model: M,
    kernel: str | Kernel,
    *,
    layers: Literal["all"] | int | Sequence[int] = "all",
    trust_kernels: Trust = None,
) -> M:
    """Give the attention layers of a model of timm another kernel, in place; returns the model.

    Args:
        layers: which of them, counted from 0 in the order of the model.
        trust_kernels: files or modules that a kernel in text may be imported from.
    """
    base, made = _attention(), attention(kernel, trust_kernels=trust_kernels)
    found = [m for m in model.modules() if type(m) is base or _is_ours(m, base)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer of the class timm.layers.Attention; models with "
            "attention of another class, such as EVA and Swin, cannot be patched"
        )
    chosen: object = range(len(found)) if layers == "all" else layers
    numbers: list[Any] = list(chosen) if isinstance(chosen, Iterable) else [chosen]
    if not numbers:
        raise ValueError('layers must be "all", a number, or a list of numbers, got []')
    for n in numbers:
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < len(found):
            raise ValueError(
                f"there is no layer {n!r}: the model has {len(found)} attention layers, "
                f"0 to {len(found) - 1}"
            )
    each: list[Any] = [found[n] for n in numbers]
    kernels = [
        own_kernel(kernel, layer.num_heads, layer.head_dim, f"layer {n}", trust_kernels)
        for n, layer in zip(numbers, each, strict=True)
    ]
    # Everything is checked by now.
    for layer, own in zip(each, kernels, strict=True):
        layer.mercer = KernelHost(own).to(layer.qkv.weight.device)
        layer.__class__ = made
    return model


def _attention() -> Any:
    try:
        from timm.layers import Attention
    except ImportError as error:
        raise ImportError("this needs timm: pip install 'mercer[timm]'") from error
    return Attention


def _is_ours(module: nn.Module, base: type) -> bool:
    return isinstance(module, base) and type(module).forward is _forward


def _forward(
    self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """[B, N, dim] -> [B, N, dim]."""
    qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))  # [B, N, 3, H, D]
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D]
    out = self.mercer(
        self.q_norm(q), self.k_norm(k), v, filter=_filter(attn_mask, is_causal),
        dropout_p=self.attn_drop.p if self.training else 0.0,
    )  # fmt: skip
    return self.proj_drop(self.proj(self.norm(out.transpose(1, 2).flatten(2))))


def _filter(mask: Tensor | None, causal: bool) -> Filter:
    if mask is None:
        return Causal() if causal else Full()
    if causal:
        raise ValueError("attn_mask and is_causal exclude each other, as in timm")
    if mask.dtype == torch.bool:
        return Mask(mask)
    # timm hides by the least number of a dtype.
    least = torch.finfo(mask.dtype).min
    if not can_read(mask) or not bool(((mask == 0) | (mask <= least)).all()):
        raise ValueError(
            "attn_mask has numbers that are added to scores, which only softmax attention has; "
            "give a boolean mask, True where a key is visible"
        )
    return Mask(mask == 0)
