"""Bandwidths as a model stores them, for a journal: no text is needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels.distance import default_bandwidth
from ..nn import GaussianAttention, KernelAttention
from ..nn.bandwidths import kernels_with_bandwidth


@torch.no_grad()
def stored_bandwidths(model: nn.Module) -> dict[str, list[float]]:
    """The bandwidth of each head by the name of its layer, of the first kernel that has one.

    Of bandwidths by query it is the base, of bandwidths by dimension the geometric mean. Empty for
    models without bandwidths, or whose parameters are spread over processes.
    """
    found: dict[str, list[float]] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, GaussianAttention | KernelAttention):
            continue
        number = layer.num_heads
        log = layer.bandwidth.log() if isinstance(layer, GaussianAttention) else _of_kernel(layer)
        if log is None or type(log.data) is not Tensor or log.is_meta:
            continue
        log = log.detach().double().cpu()
        if log.dim() > 1:
            log = log.flatten(1).mean(1)
        elif log.numel() not in (1, number):
            log = log.mean()
        # torch.compile wraps a model in a module of this name.
        each = log.reshape(-1).expand(number).exp().tolist()
        found[name.removeprefix("_orig_mod.")] = [float(f"{s:.6g}") for s in each]
    return found


def _of_kernel(layer: KernelAttention) -> Tensor | None:
    kernels = kernels_with_bandwidth(layer.joined_kernel)
    if not kernels:
        return None
    (kernel, *_) = kernels
    log = kernel.log_bandwidth
    assert isinstance(log, Tensor)
    if getattr(kernel, "relative_to_default", False):
        if kernel.on != "content":
            return None
        log = log + torch.tensor(default_bandwidth(layer.head_dim)).log().to(log)
    return log
