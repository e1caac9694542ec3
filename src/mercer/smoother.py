"""Read this first: attention is a kernel smoother.

    out_i = sum_{j in M(i)} w(q_i, k_j) v_j / sum_{j in M(i)} w(q_i, k_j)
    log_mass_i = log of the denominator

w is a kernel, M a filter. `reference` is this formula, dense, and the specification of everything
else; `smooth` gives the same numbers from the fastest backend that takes the kernel. A row that
sees nothing gives 0 and log_mass = -inf. NaN or infinity in an input gives NaN in the rows that
see it, and nowhere else. The last query stands beside the last key.

Letters, everywhere: B batch, H heads, Q queries, K keys, D features of a head, V values.
"""

from __future__ import annotations

import math
from functools import reduce
from operator import or_
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .backends import broken
from .features import Features, Input
from .filters import Filter, Full
from .kernels import Kernel
from .problem import Problem, prepare
from .term import Smoothed, accumulator, repeat


@overload
def smooth(
    kernel: Kernel, q: Input, k: Input, v: Tensor, *, filter: Filter = ..., backend: str = ...,
    dropout_p: float = ..., return_log_mass: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def smooth(
    kernel: Kernel, q: Input, k: Input, v: Tensor, *, filter: Filter = ..., backend: str = ...,
    dropout_p: float = ..., return_log_mass: Literal[True],
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
) -> Tensor | tuple[Tensor, Tensor]:
    """out_i = sum_j w(q_i, k_j) v_j / sum_j w(q_i, k_j) over the keys j that the filter lets i see.

    Args:
        kernel: the weight w.
        q, k: [B, H, Q, D] and [B, H, K, D], or Features with named parts. Keys may have fewer heads
            that divide H (grouped queries).
        v: [B, H, K, V].
        filter: which keys a query sees.
        backend: "auto", or a name; a named backend runs or raises with its reason.
        dropout_p: the share of weights that is dropped, the others growing to make up for it.
        return_log_mass: also return the log of the denominator, [B, H, Q], in float32 or float64;
            for a signed kernel, of its absolute value.
    """
    problem = prepare(kernel, q, k, v, filter, dropout_p, return_log_mass, backend)
    if not torch.is_autocast_enabled(problem.v.device.type):
        result = _solve(problem, backend)
    else:
        # The inputs are already cast; sums and numbers per key stay in float32.
        with torch.autocast(problem.v.device.type, enabled=False):
            result = _solve(problem, backend)
    if not return_log_mass:
        return result.out
    assert result.log_mass is not None
    return result.out, result.log_mass


def reference(
    kernel: Kernel, q: Features, k: Features, v: Tensor, filter: Filter, dropout_p: float = 0.0
) -> Smoothed:
    """The formula, dense: any dtype, differentiable twice."""
    heads, num_queries, num_keys = q.heads, q.length, k.length
    q, bad_queries = _cleaned(q.repeat_heads(heads))
    k, bad_keys = _cleaned(k.repeat_heads(heads))
    v = repeat(v, v.shape[0], heads)
    bad_keys = bad_keys | broken(v)
    v = torch.where(v.isfinite(), v, 0.0)

    visible = filter.mask(num_queries, num_keys, v.device)  # [B or 1, 1, Q, K]
    log, factor = kernel.factored(q, k)  # [B, H, Q, K]
    log = log.to(accumulator(v.dtype)).masked_fill(~visible, -math.inf)
    size = log if factor is None else log + factor.abs().log()
    peak = F.pad(size.detach(), (0, 1), value=-math.inf).amax(-1, keepdim=True)
    peak = torch.where(peak.isneginf(), 0.0, peak)
    weight = (log - peak).exp() if factor is None else (log - peak).exp() * factor
    mass = weight.sum(-1)

    empty = mass == 0
    safe = torch.where(empty, 1.0, mass)
    share = F.dropout(weight / safe[..., None], dropout_p)
    out = torch.where(empty[..., None], 0.0, share.to(v.dtype) @ v)
    log_mass = torch.where(empty, -math.inf, safe.abs().log() + peak[..., 0])
    spoiled = bad_queries | (bad_keys[:, :, None] & visible).any(-1)
    out = out.masked_fill(spoiled[..., None], math.nan)
    return Smoothed(out, log_mass.expand(out.shape[:3]).masked_fill(spoiled, math.nan))


def _cleaned(x: Features) -> tuple[Features, Tensor]:
    """Finite features, and the places that were not, [B or 1, H, T]."""
    bad = reduce(or_, (broken(part) for part in x.tensors()))
    parts = {name: torch.where(part.isfinite(), part, 0.0) for name, part in x.items()}
    return Features(**parts), bad


def _solve(problem: Problem, backend: str) -> Smoothed:
    if backend != "reference":
        # All terms drop the same weights, so that dropout acts on their sum.
        seed = torch.randint(2**62, ()) if problem.dropout_p else None
        tasks = problem.tasks(seed)
        choice = dispatch.choose(tasks, backend)
        if choice.name != "reference":
            return dispatch.run(tasks, choice.name)
    p = problem
    return reference(p.kernel, p.q, p.k, p.v, p.filter, p.dropout_p)
