"""Backends: each runs a term, or says why it does not.

A backend is a module with `name`, `refuses(task)`, `memory(task)` and `run(task)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..filters import Filter
from ..term.learned import needs_gradient
from ..term.term import Term
from .triton import filters as _clauses


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
    # What was not finite, now zero; both are None where nothing had to be looked for.
    bad_queries: Tensor | None = None  # [B or 1, H, Q]
    bad_keys: Tensor | None = None  # [B or 1, H, K]

    @property
    def num_keys(self) -> int:
        return self.v.shape[2]

    @property
    def learns(self) -> bool:
        """Whether the call has a gradient to pass on. To ask forms no tensor."""
        return needs_gradient(self.v) or self.term.learned

    @property
    def device(self) -> torch.device:
        return self.v.device

    @property
    def clauses(self) -> _clauses.Clauses | str:
        """The filter as an or of ands, or why it has no such form."""
        return _clauses.read(self.filter, self.num_queries, self.num_keys)
