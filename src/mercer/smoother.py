"""Read this first: attention is a kernel smoother.

    out_i = sum_{j in M(i)} w(q_i, k_j) v_j / sum_{j in M(i)} w(q_i, k_j)
    log_mass_i = log of the denominator

w is a kernel, M a filter. `reference` is this formula, dense: the specification of all backends.
`smooth` gives the same numbers from the fastest backend that takes the kernel. A row that sees
nothing gives 0 and log_mass = -inf. NaN or infinity in an input gives NaN in the rows that see it,
and nowhere else. The last query is aligned with the last key, unless places are said.

Letters, everywhere: B batch, H heads, Q queries, K keys, D features of a head, V values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import choose as dispatch
from .dispatch.problem import Problem, prepare
from .filters import Filter, Full
from .filters.places import Where
from .kernels import Kernel
from .term.features import Input
from .term.layout import accumulator, repeat
from .term.mix import Smoothed


@overload
def smooth(
    kernel: Kernel, q: Input, k: Input, v: Tensor, *, filter: Filter = ..., backend: str = ...,
    dropout_p: float = ..., return_log_mass: Literal[False] = ..., places: Where | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def smooth(
    kernel: Kernel, q: Input, k: Input, v: Tensor, *, filter: Filter = ..., backend: str = ...,
    dropout_p: float = ..., return_log_mass: Literal[True], places: Where | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def smooth(
    kernel: Kernel,
    q: Input,
    k: Input,
    v: Tensor,
    *,
    filter: Filter = Full(),
    backend: str = "auto",
    dropout_p: float = 0.0,
    return_log_mass: bool = False,
    places: Where | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """out_i = sum_j w(q_i, k_j) v_j / sum_j w(q_i, k_j) over the keys j that the filter lets i see.

    Args:
        kernel: the weight w.
        q, k: [B, H, Q, D] and [B, H, K, D], or Features with named parts. Keys may have fewer heads
            that divide H (grouped queries).
        v: [B, H, K, V].
        filter: which keys a query sees.
        backend: "auto", or a name; a named backend runs, or raises with its reason.
        dropout_p: the share of weights that is dropped; the others are scaled by 1 / (1 - p).
        return_log_mass: also return the log of the denominator, [B, H, Q], in float32 or float64;
            for a signed kernel, of its absolute value.
        places: where the queries and the keys stand, for filters and kernels that read i and j: a
            pair of whole numbers, the places of the first ones, or of tensors [B, Q] and [B, K]. By
            default the first key is at 0 and the last query beside the last key.
    """
    problem = prepare(kernel, q, k, v, filter, dropout_p, return_log_mass, backend, places)
    return finish(problem, lambda: solve(problem, backend))


def finish(problem: Problem, run: Callable[[], Smoothed]) -> Tensor | tuple[Tensor, Tensor]:
    """The user's result from that of `run`: the output, and log_mass if wanted."""
    if not torch.is_autocast_enabled(problem.v.device.type):
        result = run()
    else:
        # The inputs are already cast; sums and numbers per key stay in float32.
        with torch.autocast(problem.v.device.type, enabled=False):
            result = run()
    if not problem.log_mass:
        return result.out
    assert result.log_mass is not None
    return result.out, result.log_mass


def reference(problem: Problem) -> Smoothed:
    """The formula, dense: any dtype, differentiable twice."""
    heads, num_queries, num_keys = problem.q.heads, problem.q.length, problem.k.length
    q, k = problem.q.repeat_heads(heads), problem.k.repeat_heads(heads)
    v = repeat(problem.v, problem.batch, heads)
    visible = problem.filter.mask(num_queries, num_keys, v.device)  # [B or 1, 1, Q, K]

    log, factor = problem.kernel.factored(q, k)  # [B, H, Q, K]
    log = log.to(accumulator(v.dtype)).masked_fill(~visible, -math.inf)
    size = log if factor is None else log + factor.abs().log()
    peak = F.pad(size.detach(), (0, 1), value=-math.inf).amax(-1, keepdim=True)
    peak = torch.where(peak.isneginf(), 0.0, peak)
    weight = (log - peak).exp() if factor is None else (log - peak).exp() * factor
    mass = weight.sum(-1)

    empty = mass == 0
    safe = torch.where(empty, 1.0, mass)
    share = F.dropout(weight / safe[..., None], problem.dropout_p)
    out = torch.where(empty[..., None], 0.0, share.to(v.dtype) @ v)
    log_mass = torch.where(empty, -math.inf, safe.abs().log() + peak[..., 0]).expand(out.shape[:3])
    if problem.bad_queries is not None and problem.bad_keys is not None:
        spoiled = problem.bad_queries | (problem.bad_keys[:, :, None] & visible).any(-1)
        out = out.masked_fill(spoiled[..., None], math.nan)
        log_mass = log_mass.masked_fill(spoiled, math.nan)
    return Smoothed(out, log_mass)


def solve(problem: Problem, backend: str) -> Smoothed:
    """Run a checked call on the named backend, or on the one the rules choose."""
    if backend != "reference":
        # One seed for all terms, so that dropout acts on the weights of their sum.
        seed = torch.randint(2**62, ()) if problem.dropout_p else None
        tasks = problem.tasks(seed)
        choice = dispatch.choose(tasks, backend)
        if choice.name != "reference":
            if not dispatch.BACKENDS[choice.name].keeps_nan(tasks):
                cleaned = problem.cleaned()
                tasks = tasks if cleaned is problem else cleaned.tasks(seed)
            return dispatch.run(tasks, choice.name)
    return reference(problem.cleaned())
