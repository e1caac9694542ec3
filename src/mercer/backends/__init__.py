"""Backends: each runs the terms of a call, or says why it cannot.

A backend is a module that offers what `Backend` lists; dispatch/choose.py has one line for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..filters import Filter
from ..term.learned import needs_gradient
from ..term.mix import Smoothed
from ..term.term import Term
from .triton import filters as _clauses


class Backend(Protocol):
    """The protocol of a backend module."""

    name: str
    dense_mask: bool  # whether it forms the filter as a dense mask, where that hides a key

    def refuses(self, task: Task) -> str | None:
        """Why it cannot run this term, or None."""

    def memory(self, task: Task) -> int:
        """Bytes beyond the inputs and the output."""

    def kernels(self, device: torch.device) -> str:
        """Which of its kernels run on this device; "" where there is one kind."""

    def keeps_nan(self, tasks: Sequence[Task]) -> bool:
        """Whether NaN stays in the rows that see it; if not, it gets cleaned inputs."""

    def run(self, tasks: Sequence[Task]) -> list[Smoothed]:
        """Results to mix: one for each term, or one for several terms."""


def one_kind(device: torch.device) -> str:
    """The `kernels` of a backend that has one kind of them."""
    return ""


def spreads_nan(tasks: Sequence[Task]) -> bool:
    """The `keeps_nan` of a backend that spreads NaN."""
    return False


@dataclass(kw_only=True, eq=False)
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
    # Places that were not finite and are now zero; None if inputs were not checked.
    bad_queries: Tensor | None = None  # [B or 1, H, Q]
    bad_keys: Tensor | None = None  # [B or 1, H, K]

    @property
    def num_keys(self) -> int:
        return self.v.shape[2]

    @property
    def learns(self) -> bool:
        """Whether the call has a backward. Forms no tensor."""
        return needs_gradient(self.v) or self.term.learned

    @property
    def device(self) -> torch.device:
        return self.v.device

    @property
    def mask_elements(self) -> int:
        """Elements of the filter's dense mask for SDPA; 0 if SDPA needs none."""
        return self.filter.mask_elements(self.num_queries, self.num_keys)

    @property
    def clauses(self) -> _clauses.Clauses | str:
        """The filter as an or of ands, or why it has no such form."""
        return _clauses.read(self.filter, self.num_queries, self.num_keys)
