"""Where the parameters of kernels and positions start, for models that are filled later."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..nn import TokenKernels
from ..systems import Attention

# Parameters of more numbers are drawn anew rather than kept beside the model.
KEPT = 1024


def remember_start(layer: Attention) -> None:
    """Where parameters of kernels and positions start, for a model whose memory is filled later."""
    for module in layer.modules():
        if isinstance(module, nn.Linear | nn.Embedding | TokenKernels):
            continue
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if own:
            module.starts = {  # type: ignore[assignment]
                name: x.detach().cpu().clone() if x.numel() <= KEPT else float(x.detach().std())
                for name, x in own
            }


@torch.no_grad()
def restart(module: nn.Module) -> None:
    """The parameters of a kernel or a position back to their start."""
    starts: dict[str, Tensor | float] = module.starts  # type: ignore[assignment]
    for name, start in starts.items():
        x = getattr(module, name)
        if isinstance(start, float):
            init.normal_(x, std=start)
        else:
            init.copy_(x, start.to(x.device, x.dtype))
