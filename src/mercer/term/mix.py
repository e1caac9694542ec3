"""The result of a backend, and the mix of several results."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Smoothed(NamedTuple):
    """The result of a backend for one term; `mix` joins terms, parts of the keys and caches."""

    out: Tensor  # [B, H, Q, V]
    log_mass: Tensor | None  # [B, H, Q], the log of the absolute denominator
    sign: Tensor | None = None  # [B, H, Q], its sign where weights may be negative


def mix(parts: list[Smoothed]) -> Smoothed:
    """The smoother of the union: outputs weighted by their masses."""
    if len(parts) == 1:
        return parts[0]
    logs = torch.stack([_require(p.log_mass) for p in parts])  # [terms, B, H, Q]
    peak = logs.amax(0).detach()
    peak = torch.where(peak.isneginf(), torch.zeros_like(peak), peak)
    mass = (logs - peak).exp()
    signed = any(p.sign is not None for p in parts)
    if signed:
        ones = torch.ones_like(mass[0])
        mass = mass * torch.stack([ones if p.sign is None else p.sign for p in parts])
    total = mass.sum(0)
    seen = total != 0
    share = torch.where(seen, mass / torch.where(seen, total, torch.ones_like(total)), 0.0)
    out = sum(
        (share[n, ..., None] * p.out for n, p in enumerate(parts)), torch.zeros_like(parts[0].out)
    )
    safe = torch.where(seen, total.abs(), torch.ones_like(total))
    log_mass = torch.where(seen, safe.log() + peak, -math.inf)
    return Smoothed(out.to(parts[0].out.dtype), log_mass, total.sign() if signed else None)


def weighed(part: Smoothed, log_weight: Tensor | None) -> Smoothed:
    """A term's result with the term's weight, which is in its mass alone."""
    mass = part.log_mass
    if log_weight is None or mass is None:
        return part
    # Rows that see nothing or are not finite give the weight no gradient.
    return part._replace(
        log_mass=torch.where(mass.isfinite(), mass + log_weight[:, None].to(mass.dtype), mass)
    )


def _require(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
