"""Check results: a wrong result gets no time.

The error budget is that of `mercer.testing`: on a short sequence, the error against float64 may be
twice that of the dense formula in the same dtype, plus rounding. It covers the output and, unless
only the forward is timed, the gradients of q, k, v and of the kernel's parameters. On a GPU we also
check a longer sequence, since some kernels run only with many keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..filters import Filter
from ..testing.cases import Case, Shape, double, rounding_of
from .catalogue import build_kernel, is_text
from .contenders import Contender, Ours
from .workload import Inputs, Workload

LENGTH, HEADS, SEEDS = 256, 2, 3
# With the filter as it is. Several cases: a single gradient of a single bandwidth is too noisy to
# judge.
LONG = 2048
# With one query we can afford more keys, so that backends which split keys do so.
DECODE_LENGTH = 4096


@dataclass
class Error:
    """Root mean squares over all seeds: of an error, of the dense formula's, and of the result."""

    got: float = 0.0
    dense: float = 0.0
    size: float = 0.0
    count: int = 0

    def add(self, got: Tensor, dense: Tensor, want: Tensor) -> None:
        self.got += (got.double() - want).square().sum().item()
        self.dense += (dense.double() - want).square().sum().item()
        self.size += want.square().sum().item()
        self.count += want.numel()

    def budget(self, rounding: float) -> tuple[float, float]:
        """(error, budget)."""
        got, dense, size = ((x / self.count) ** 0.5 for x in (self.got, self.dense, self.size))
        return got, 2 * dense + rounding * size


def check(contender: Contender, workload: Workload, *, forward_only: bool) -> str | None:
    """The error of the contender in words, or None."""
    length = min(workload.length, DECODE_LENGTH if workload.decode else LENGTH)
    # At least one group of heads that share keys.
    # A kernel given as text may have a number for each head.
    most = workload.heads if is_text(contender.kernel) else HEADS
    kv_heads = min(workload.kv_heads, max(1, most // workload.group))
    heads = kv_heads * workload.group
    filter = workload.build_filter(length)
    shape = Shape(1, heads, kv_heads, 1 if workload.decode else length, length, workload.dim)
    said = _check(contender, workload, forward_only, shape, SEEDS, filter, contender.exact)
    if said is None and _has_more(contender, workload):
        shape = Shape(1, heads, kv_heads, LONG, LONG, workload.dim)
        filter = workload.build_filter()
        said = _check(contender, workload, forward_only, shape, SEEDS, filter, contender.precise)
    return said


def _has_more(contender: Contender, workload: Workload) -> bool:
    """Whether other kernels may run with more keys."""
    long = workload.length >= LONG and not workload.decode
    return long and isinstance(contender, Ours) and workload.device.type == "cuda"


def _check(
    contender: Contender, workload: Workload, forward_only: bool, shape: Shape, seeds: int,
    filter: Filter, precise: Callable[[Inputs], Tensor],
) -> str | None:  # fmt: skip
    """The error over several cases, in words, or None; `precise` is the float64 result."""
    kernel = build_kernel(contender.kernel, shape.heads, workload.dim).to(workload.device)
    device = str(workload.device)
    sums: dict[str, Error] = {}
    rounding = 0.0
    for seed in range(seeds):
        case = Case(kernel, filter, shape, workload.dim, seed, workload.dtype, device)
        narrow = Inputs(kernel, *case.inputs(), filter)
        # The same inputs in float64: rounding of the inputs is not an error.
        wide = Inputs(double(kernel), *case.inputs(wide=True), filter)
        rounding = max(rounding, rounding_of(case))
        gather = partial(_results, _steer(case), forward_only, contender.trains)
        got, dense = gather(contender.smooth, narrow), gather(contender.exact, narrow)
        for name, want in gather(precise, wide).items():
            sums.setdefault(name, Error()).add(got[name], dense[name], want)
    return _worst(sums, rounding)


def _steer(case: Case) -> Tensor:
    """The gradient of the output, [B, H, Q, V]."""
    shape = (case.shape.batch, case.shape.heads, case.shape.queries, case.shape.values)
    generator = torch.Generator().manual_seed(case.seed + 1)
    return torch.randn(shape, generator=generator).to(case.dtype).to(case.device)


def _results(
    steer: Tensor,
    forward_only: bool,
    parameters: bool,
    run: Callable[[Inputs], Tensor],
    given: Inputs,
) -> dict[str, Tensor]:
    """The output and all gradients."""
    if forward_only:
        with torch.no_grad():
            return {"the output": run(given)}
    named = given.named(parameters=parameters)
    for x in named.values():
        x.requires_grad_()
    out = run(given)
    grads = torch.autograd.grad(out, list(named.values()), steer.to(out), allow_unused=True)
    result = {"the output": out.detach()}
    for (name, x), grad in zip(named.items(), grads, strict=True):
        result[f"the gradient of {name}"] = torch.zeros_like(x) if grad is None else grad
    return result


def _worst(sums: dict[str, Error], rounding: float) -> str | None:
    """The largest excess over its budget, in words."""
    worst, said = 1.0, None
    for name, error in sums.items():
        got, budget = error.budget(rounding)
        over = got / budget if budget else math.inf if got else 0.0
        if math.isnan(over) or over > worst:
            said = f"wrong by {got:.1e} in {name}, where {budget:.1e} is allowed"
            if math.isnan(over):
                break
            worst = over
    return said
