"""AdamW with a learning rate for each kind of parameter, and their common schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from .settings import Settings


def make_optimizer(
    model: nn.Module, groups: dict[str, list[str]], settings: Settings
) -> torch.optim.Optimizer:
    """Learning rates for bandwidths, token kernels, and the rest; weight decay for matrices."""
    rates = {
        "bandwidth": settings.bandwidth_rate,
        "token_kernels": settings.token_rate,
        "rest": settings.learning_rate,
    }
    named = dict(model.named_parameters())
    chosen = []
    for part, names in groups.items():
        weights = [named[name] for name in names if named[name].requires_grad]
        for decays in (True, False):
            some = [w for w in weights if (part == "rest" and w.ndim > 1) == decays]
            if some:
                decay = settings.weight_decay if decays else 0.0
                chosen.append({"params": some, "lr": rates[part], "weight_decay": decay})
    fused = all(parameter.is_cuda for parameter in named.values()) or None
    return torch.optim.AdamW(chosen, betas=settings.betas, fused=fused)


def rate_after(step: int, seconds: float, settings: Settings, limit: float | None = None) -> float:
    """The factor on the rates: a warm-up, then half a cosine down to the floor.

    With the schedule "inverse-sqrt" it then falls as 1 / sqrt(step), whatever the last step is.
    `limit` is the number of seconds after which no step begins; None for none.
    """
    done = 0.0 if limit is None else seconds / limit
    if settings.steps is not None:
        done = max(done, step / settings.steps)
        warm = settings.warmup if settings.warmup >= 1 else settings.warmup * settings.steps
        if step + 1 < warm:
            return (step + 1) / warm
        if settings.schedule == "inverse-sqrt":
            return math.sqrt(max(warm, 1.0) / (step + 1))
        start = warm / settings.steps
    else:
        start = settings.warmup
        if done < start:
            # No time has passed at the first step, but its rate should not be zero.
            return max(done / start, 0.01)
    after = min(max((done - start) / max(1 - start, 1e-9), 0.0), 1.0)
    return settings.floor + (1 - settings.floor) * 0.5 * (1 + math.cos(math.pi * after))
