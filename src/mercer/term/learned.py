"""What needs a gradient, asked without forming a tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad


class Learned(NamedTuple):
    """Which parts of a factor need a gradient. To ask forms no tensor."""

    q: bool
    k: bool
    scale: bool
    row: bool
    col: bool


def needs_gradient(*parts: object) -> bool:
    """Whether one of them is a tensor that needs a gradient, and gradients are on."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in parts)


def derives(trains: bool) -> bool:
    """Whether a call may have a derivative: as it trains, or one that only autograd can refuse."""
    other = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    return trains or other
