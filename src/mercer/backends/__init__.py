"""Backends: each runs a term, or says why it does not.

A backend is a module with `name`, `refuses(task)`, `memory(task)` and `run(task)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..filters import Filter
from ..term import Term


@dataclass(frozen=True, kw_only=True)
class Task:
    """One term to run: what every backend is given."""

    term: Term
    v: Tensor  # [B, H, K, V]
    filter: Filter
    batch: int
    heads: int
    num_queries: int
    dropout_p: float = 0.0
    seed: Tensor | None = None
    log_mass: bool = False

    @property
    def num_keys(self) -> int:
        return self.v.shape[2]

    @property
    def device(self) -> torch.device:
        return self.v.device


def broken(x: Tensor) -> Tensor:
    """Which places hold a NaN or an infinity, [..., T] of [..., T, D]."""
    return ~x.isfinite().all(-1)
