"""What needs a gradient, asked without forming a tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
