"""Initial values of kernels and positions, for models that are initialised later."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..nn import TokenKernels
from ..systems import Attention

# Larger parameters are drawn again instead of stored.
KEPT = 1024


def remember_start(layer: Attention) -> None:
    """Record the initial values of kernels and positions, for a model on the meta device."""
    for module in layer.modules():
        if isinstance(module, nn.Linear | nn.Embedding | TokenKernels):
            continue
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if own:
            module.starts = {name: _start(x.detach()) for name, x in own}  # type: ignore[assignment]


def _start(x: Tensor) -> Tensor | float:
    """The values, one of them if all are equal, or their standard deviation."""
    if x.numel() <= KEPT:
        return x.cpu().clone()
    first = x.flatten()[:1]
    return first.cpu().clone() if bool((x == first).all()) else float(x.std())


@torch.no_grad()
def restart(module: nn.Module) -> None:
    """Set the parameters of a kernel or a position to their initial values."""
    starts: dict[str, Tensor | float] = module.starts  # type: ignore[assignment]
    for name, start in starts.items():
        x = getattr(module, name)
        if isinstance(start, float):
            init.normal_(x, std=start)
        else:
            init.copy_(x, start.to(x.device, x.dtype))
