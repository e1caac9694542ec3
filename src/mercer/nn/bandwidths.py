"""A report on every head with a bandwidth: any kernel with a `log_bandwidth`, in any model.

The weights of a row are a product of its whole kernel, so neighbourhood and weight on self are the
head's. The bandwidths are those of each kernel in it. Weights are formed for some keys at a time,
so memory is linear in the length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..filters import Filter
from ..kernels import AdaptiveRBF, Kernel
from ..kernels.distance import Distance
from ..term.features import Features
from ..term.layout import accumulator
from .attention import KernelAttention
from .cache import Cache, SegmentMemory
from .gaussian import GaussianAttention
from .report import Head, Report, mean_of_rows, sees_itself, visible_keys
from .weights import read_call

# How many keys' weights are formed at a time.
COLUMNS = 256


def bandwidth_report(model: nn.Module, *args: object, **kwargs: object) -> Report:
    """The report of every head with a bandwidth in a model, from one call model(*args, **kwargs).

    A head of a kernel with several bandwidths, such as `RBF() * Laplace(on="position")`, has a row
    for each. Where every query or every dimension has its own, it is their geometric mean.
    """
    layers = [(name, m) for name, m in model.named_modules() if _has_bandwidths(m)]
    if not layers:
        raise ValueError(f"there is no kernel with a bandwidth in {type(model).__name__}")
    found: list[Report] = []
    looks = [(layer, _looking(name or type(layer).__name__, found)) for name, layer in layers]
    hooks = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer, look in looks]
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return Report(tuple(head for report in found for head in report))


def gaussian_report(model: nn.Module, *args: object, **kwargs: object) -> Report:
    """The earlier name of `bandwidth_report`."""
    return bandwidth_report(model, *args, **kwargs)


def kernels_with_bandwidth(kernel: Kernel) -> list[Kernel]:
    """The kernels in a sum or a product that have a `log_bandwidth`."""
    every = [m for m in kernel.modules() if isinstance(m, Kernel)]
    return [k for k in every if isinstance(getattr(k, "log_bandwidth", None), Tensor)]


def _has_bandwidths(layer: nn.Module) -> bool:
    if isinstance(layer, KernelAttention):
        return bool(kernels_with_bandwidth(layer.joined_kernel))
    return isinstance(layer, GaussianAttention)


def _looking(name: str, found: list[Report]) -> Callable[..., None]:
    """A hook that adds the report of a layer, before its forward."""

    def hook(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, object]) -> None:
        given = dict(zip(("x", "context"), args, strict=False)) | kwargs
        cache = given.pop("cache", None)
        if isinstance(cache, Cache | SegmentMemory) and cache.length:
            raise ValueError("the report needs whole sequences: call the model without a cache")
        if isinstance(layer, GaussianAttention):
            x, filter = given["x"], given.get("filter")
            assert isinstance(x, Tensor)
            assert filter is None or isinstance(filter, Filter)
            found.append(layer.report(x, filter=filter).named(name))
        else:
            assert isinstance(layer, KernelAttention)
            found.append(_report(layer, **given).named(name))  # type: ignore[arg-type]

    return hook


def _report(
    layer: KernelAttention, x: Tensor, context: Tensor | None = None, **given: object
) -> Report:
    """A row for each head and each of its bandwidths."""
    call = read_call(layer, x, context, **given)  # type: ignore[arg-type]
    batch, length, num_keys = x.shape[0], x.shape[1], call.v.shape[2]
    visible = visible_keys(call.filter, batch, length, num_keys, x.device)  # [B, H or 1, Q]
    own = context is None
    counted = sees_itself(call.filter, batch, length, x.device) if own else visible > 0
    if not bool(counted.any()):
        raise ValueError(f"no place sees a key, so there is nothing to report: {call.filter}")

    shape = (batch, layer.num_heads, length)
    wide = accumulator(call.v.dtype)
    entropy, alone = (torch.zeros(shape, dtype=wide, device=x.device) for _ in range(2))
    for start in range(0, num_keys, COLUMNS):
        end = min(start + COLUMNS, num_keys)
        p = call.columns(start, end).to(wide)  # [B, H, Q, C]
        entropy += torch.special.entr(p.clamp(min=0)).sum(-1)
        if own:
            alone[..., start:end] = p[:, :, start:end].diagonal(dim1=-2, dim2=-1)
    neighbours = mean_of_rows(entropy.exp(), counted).tolist()
    seen = mean_of_rows(visible.to(wide), counted).expand(layer.num_heads).tolist()
    # A query of cross-attention is none of its keys.
    selves = mean_of_rows(alone, counted).tolist() if own else [None] * layer.num_heads

    kernels = kernels_with_bandwidth(layer.joined_kernel)
    sizes = [bandwidths_of(kernel, call.q, counted).tolist() for kernel in kernels]
    heads = []
    for h in range(layer.num_heads):
        same: dict[str, Any] = {"layer": "", "head": h, "visible": seen[h], "at_bound": False}
        same |= {"neighbours": neighbours[h], "self_weight": selves[h]}
        for name, s in zip(_names(kernels), sizes, strict=True):
            heads.append(Head(kernel=name, bandwidth=s[h], **same))
    return Report(tuple(heads))


def bandwidths_of(kernel: Kernel, q: Features, counted: Tensor) -> Tensor:
    """s of every head, [H]."""
    heads = q.heads
    if isinstance(kernel, AdaptiveRBF):
        each = -0.5 * kernel.precision(q.part(kernel.on))[..., 0].log()  # [B, H, Q]
        return mean_of_rows(each.expand(counted.shape[0], heads, -1), counted).exp()
    log = kernel.log_bandwidth
    assert isinstance(log, Tensor)
    if isinstance(kernel, Distance):
        log = kernel.bandwidth(q.part(kernel.on).shape[-1]).log()
    if log.dim() > 1:
        log = log.flatten(1).mean(1)
    elif log.numel() not in (1, heads):
        log = log.mean()
    return log.reshape(-1).expand(heads).exp()


def _names(kernels: list[Kernel]) -> list[str]:
    """What tells the kernels of one layer apart; empty if there is one."""
    if len(kernels) == 1:
        return [""]
    plain = [type(k).__name__ + ("" if k.on == "content" else f" on {k.on}") for k in kernels]
    seen: Counter[str] = Counter()
    names = []
    for name in plain:
        seen[name] += 1
        names.append(name if plain.count(name) == 1 else f"{name} {seen[name]}")
    return names
