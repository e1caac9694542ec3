"""Sinusoids of i - j for the fused kernels: as features, or as a table of distances.

Features are coefficients of the queries, rotated by the angles of their places. In half precision
one kernel rotates them in a single pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...opaque.constant import is_constant
from ...term.learned import derives, needs_gradient
from ...term.sinusoids import SinusoidFactor, turned, waves_of_queries
from ...term.term import Term
from .. import Task
from .numbers import turn

# A table has a score for each pair. It is used up to this many keys and scores.
MAX_KEYS, MAX_SCORES = 8192, 2**32


def with_table(task: Task, max_width: int) -> Task:
    """The task, with sinusoids of more than `max_width` features as tables of distances."""
    wide = [f for f in task.term.factors if isinstance(f, SinusoidFactor) and f.width > max_width]
    scores = task.batch * task.heads * task.num_queries * task.num_keys
    if not wide or task.num_keys > MAX_KEYS or scores > _max_scores(task.device):
        return task
    tables = [(f, table) for f in wide if (table := f.as_table()) is not None]
    taken = [f for f, _ in tables]
    term = Term(
        factors=tuple(f for f in task.term.factors if f not in taken),
        biases=(*task.term.biases, *(table for _, table in tables)),
    )
    term = term.resolve(task.num_queries, task.num_keys, causal=task.filter.causal)
    return replace(task, term=term)


@is_constant
def _max_scores(device: torch.device) -> int:
    """Scores and their gradients, two bytes each, may take a quarter of the device's memory."""
    if device.type != "cuda":
        return MAX_SCORES
    return min(MAX_SCORES, torch.cuda.get_device_properties(device).total_memory // 16)


def queries(f: SinusoidFactor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """`f.q` times a scale, in a dtype."""
    c = f.c
    if c.dtype.itemsize != 2 or torch.compiler.is_compiling():
        return turned(c, f.base, scale).to(dtype)
    waves = waves_of_queries(c, f.base, scale)
    if derives(needs_gradient(c)):
        return _Turn.apply(c, waves).to(dtype)
    return turn(c, waves, 1.0).to(dtype)


class _Turn(torch.autograd.Function):
    """Coefficients of sinusoids rotated by their places, in one pass each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, waves: Tensor) -> Tensor:
        ctx.save_for_backward(waves)
        return turn(x, waves, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (waves,) = ctx.saved_tensors
        return turn(grad, waves, -1.0), None
