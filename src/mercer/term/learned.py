"""Which parts need a gradient, found without forming a tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad


class Learned(NamedTuple):
    """Which parts of a factor need a gradient. Forms no tensor."""

    q: bool
    k: bool
    scale: bool
    row: bool
    col: bool


UNLEARNED = Learned(q=False, k=False, scale=False, row=False, col=False)


def needs_gradient(*parts: object) -> bool:
    """Whether gradients are on and one of them is a tensor that needs a gradient."""
    if torch.is_grad_enabled():
        for x in parts:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def derives(trains: bool) -> bool:
    """Whether a call may be differentiated: it trains, or forward AD or functorch is active."""
    other = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    return trains or other
