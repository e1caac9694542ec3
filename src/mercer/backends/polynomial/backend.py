"""Polynomial kernels of degree 2 in time linear in T: <q, k>^2 has finite features.

    out_i = N_i / n_i        [N_i, n_i] = sum_j <q_i, k_j>^2 [v_j, 1]

The sums are one opaque operator; chunked_sums.py has their loops. The ratio and the log are plain
PyTorch, and so are their gradients. A padded key becomes zero and has no weight.

Sums are in float32 or better. No row depends on keys that it does not see, not even by a common
scale: only queries are normalised, each by its own number.

A state sums products of squares, so its rounding is relative to |q|^2 |k|^2, not to <q, k>^2. A
query that is almost orthogonal to many keys loses precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...filters import And, Causal, Filter, Full, Padding
from ...opaque.operators import fake, learns, operator
from ...term.layout import accumulator, repeat
from ...term.links import Power
from ...term.mix import Smoothed
from .. import Task, one_kind
from . import plan
from .chunked_sums import Walk, absorb, features, slices, workspace
from .fused import smooth_squares

name = "linear"
dense_mask = False
kernels = one_kind


def refuses(task: Task) -> str | None:
    """Why the weights are not the square of one dot product, or None."""
    if task.term.biases:
        return "a table of distances has no finite features"
    if len(task.term.factors) != 1:
        return f"it takes one factor, but the term has {len(task.term.factors)}"
    (factor,) = task.term.factors
    if factor.link != Power(2):
        formula = "exp(s)" if factor.link is None else factor.link.formula
        return f"the link {formula} is not s^2: no small finite features"
    if factor.keyed or factor.has_row:
        return "it does not support a number per key or query inside the square"
    if factor.width == 0:
        return "there are no features"
    if task.dropout_p:
        return "it does not form the weights that dropout acts on"
    if _parts(task) is None:
        return f"one state cannot serve {task.filter!r}: only Full, Causal and Padding"
    return None


def memory(task: Task) -> int:
    """Bytes beyond the inputs and the output: copies, and the features and states at once."""
    (factor,) = task.term.factors
    if fused(task):
        q = factor.q.expand(task.batch, task.heads, -1, -1)
        causal, _ = _rule(task)
        blind = _blind(task, causal)
        return plan.plan_of(q[:, :, blind:], factor.k, task.v, causal).workspace()
    dim, values, heads = factor.width, task.v.shape[-1] + 1, task.v.shape[1]
    copies = task.num_queries * task.heads * (2 * dim + values)
    copies += task.num_keys * heads * (dim + values)
    pairs = task.batch * task.heads * task.num_queries * task.num_keys
    at_once, _ = workspace(dim, values, task.heads // heads, task.device)
    return accumulator(task.v.dtype).itemsize * (task.batch * copies + min(at_once, 3 * pairs))


def fused(task: Task) -> bool:
    """Whether the fused kernels run it; they keep NaN to the rows that see it by themselves."""
    sizes = (task.batch, task.num_queries, task.num_keys)
    dim = task.term.factors[0].width
    return min(sizes) > 0 and plan.runs(task.device, task.v.dtype, dim, task.v.shape[-1])


def keeps_nan(tasks: Sequence[Task]) -> bool:
    """The fused kernels keep NaN to the rows that see it; the loops do not."""
    return all(map(fused, tasks))


def run(tasks: Sequence[Task]) -> list[Smoothed]:
    return [_run(task) for task in tasks]


def _run(task: Task) -> Smoothed:
    if fused(task):
        return _run_fused(task)
    wide = accumulator(task.v.dtype)
    (lifted,) = task.term.lift(wide)
    heads = math.lcm(lifted.k.shape[1], task.v.shape[1])
    q = repeat(lifted.q, task.batch, task.heads)
    k, v = (repeat(x.to(wide), task.batch, heads) for x in (lifted.k, task.v))
    causal, lengths = _rule(task)
    seen: Tensor | None = None
    if lengths is not None:
        seen = torch.arange(task.num_keys, device=task.device) < lengths[:, None, None]
        k = torch.where(seen[..., None], k, 0.0)
    blind = _blind(task, causal)
    size = _size(q)
    sums = sum_squares((q / size)[:, :, blind:], k, F.pad(v, (0, 1), value=1.0), causal)
    out, log_mass = _ratio(F.pad(sums, (0, 0, blind, 0)), size)
    out = out.to(task.v.dtype)
    if task.bad_queries is not None and task.bad_keys is not None:
        bad = task.bad_keys if seen is None else task.bad_keys & seen
        if causal:
            start = max(task.num_keys - task.num_queries, 0)
            bad = F.pad(bad.cumsum(-1) > 0, (blind, 0))[..., start:]
        else:
            bad = bad.any(-1, keepdim=True)
        spoiled = task.bad_queries | bad  # [B or 1, H, Q]
        out = out.masked_fill(spoiled[..., None], math.nan)
        log_mass = log_mass.masked_fill(spoiled, math.nan)
    return Smoothed(out, log_mass)


def _run_fused(task: Task) -> Smoothed:
    """The same by the fused kernels. The scale of a query changes only its mass."""
    (factor,) = task.term.factors
    causal, lengths = _rule(task)
    dtype, blind = task.v.dtype, _blind(task, causal)
    q = repeat(factor.q.to(dtype), factor.q.shape[0], task.heads)
    out, log_mass, _ = smooth_squares(q[:, :, blind:], factor.k.to(dtype), task.v, lengths, causal)
    if blind:
        bad = ~q[:, :, :blind].detach().isfinite().all(-1)
        out = F.pad(out, (0, 0, blind, 0))
        out = out.masked_fill(F.pad(bad, (0, out.shape[2] - blind))[..., None], math.nan)
        log_mass = F.pad(log_mass, (blind, 0), value=-math.inf)
        log_mass = log_mass.masked_fill(F.pad(bad, (0, out.shape[2] - blind)), math.nan)
    return Smoothed(*_rescaled(out, log_mass, factor.scale))


def _rescaled(out: Tensor, log_mass: Tensor, scale: Tensor | float) -> tuple[Tensor, Tensor]:
    """(out, log_mass) for queries that are multiplied by the scale."""
    if isinstance(scale, float | int) and scale == 1.0:
        return out, log_mass
    scale = scale[..., 0] if isinstance(scale, Tensor) else log_mass.new_full((1,), scale)
    nothing = scale == 0
    log_mass = log_mass + 2 * torch.where(nothing, 1.0, scale.abs()).to(log_mass.dtype).log()
    out = torch.where((nothing & ~log_mass.isnan())[..., None], 0.0, out)
    return out, torch.where(nothing & ~log_mass.isnan(), -math.inf, log_mass)


def _parts(task: Task) -> tuple[Filter, ...] | None:
    """The filter as Full, Causal and Padding joined by &, or None."""
    for simplify in (False, True):
        filter = task.filter
        if simplify:
            filter = filter.simplify(task.num_queries, task.num_keys)
        parts = filter.filters if isinstance(filter, And) else (filter,)
        if all(type(part) in (Full, Causal, Padding) for part in parts):
            return parts
    return None


def _blind(task: Task, causal: bool) -> int:
    """How many queries come before the first key and see nothing."""
    return max(task.num_queries - task.num_keys, 0) if causal else 0


def _rule(task: Task) -> tuple[bool, Tensor | None]:
    """Whether the filter is causal, and the number of valid keys, [B]."""
    parts = _parts(task)
    assert parts is not None
    lengths: Tensor | None = None
    for part in parts:
        if isinstance(part, Padding):
            less = part.lengths
            lengths = less if lengths is None else torch.minimum(lengths, less)
    return any(isinstance(part, Causal) for part in parts), lengths


def _size(q: Tensor) -> Tensor:
    """A number per query, [B, H, Q, 1], that cancels in the ratio and keeps squares in range."""
    size = q.detach().abs().amax(-1, keepdim=True)
    return torch.where(size == 0, 1.0, size)


def _ratio(sums: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """(out, log_mass) from the sums of w v and of w, for queries divided by `size`."""
    mass = sums[..., -1:]
    # A sum of squares below zero is rounding error.
    empty = mass <= 0
    safe = torch.where(empty, 1.0, mass)
    out = torch.where(empty, 0.0, sums[..., :-1] / safe)
    return out, torch.where(empty, -math.inf, safe.log() + 2 * size.log())[..., 0]


def _few(heads: int, causal: bool, *tensors: Tensor) -> Iterator[tuple[Walk, tuple[Tensor, ...]]]:
    """The walks of q, k and v, [B, H, T, E], a few key heads at a time, and the other tensors."""
    q, k, v, *others = (
        x.reshape(x.shape[0] * heads, x.shape[1] // heads, *x.shape[2:]) for x in tensors
    )
    most, chunk = workspace(q.shape[-1], v.shape[-1], q.shape[1], q.device)
    for few in slices(0, len(k), most // chunk):
        yield Walk(q[few], k[few], v[few], causal), tuple(x[few] for x in others)


@operator
def sum_squares(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """sum_j <q_i, k_j>^2 v_j, over j <= i if causal, for no more queries than keys then."""
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        for walk, (part,) in _few(k.shape[1], causal, q, k, v, out):
            walk.forward(part)
    return out


@fake(sum_squares)
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


@operator
def sum_squares_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> list[Tensor]:
    """The gradients of q, k and v."""
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    with torch.autocast(q.device.type, enabled=False):
        for walk, parts in _few(k.shape[1], causal, q, k, v, grad, *grads):
            walk.backward(*parts)
    return grads


@fake(sum_squares_backward)
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *sum_squares_backward(grad, *ctx.saved_tensors, ctx.causal), None


learns(sum_squares, _backward, _save)


class PolynomialState:
    """S = sum_j phi(k_j) [v_j, 1]: the state of decoding with <q, k>^2, of constant size.

    After `update` with the keys and values up to a place, `read` with its query equals the row of
    the causal pass:

        state = PolynomialState()
        for t in range(T):
            state.update(k[:, :, t : t + 1], v[:, :, t : t + 1])
            out, log_mass, _ = state.read(q[:, :, t : t + 1])

    A head holds F (V + 1) numbers in float32 (float64 for float64); F is a little more than
    D (D + 1) / 2. With few keys, a query almost orthogonal to all of them loses precision.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # [B, H, F, V + 1]
        self.length = 0

    def update(self, k: Tensor, v: Tensor) -> None:
        """Add keys [B, H, T, D] and values [B, H, T, V]."""
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"k and v must be [B, H, T, D] and [B, H, T, V], got {list(k.shape)} and "
                f"{list(v.shape)}"
            )
        wide = accumulator(v.dtype)
        # A key that is not finite makes the mass NaN, and so all rows that see it.
        ones = torch.where(v.isfinite().all(-1, keepdim=True), 1.0, math.nan)
        more = absorb(k.to(wide), torch.cat([v, ones.to(v.dtype)], -1).to(wide))
        if self.sums is not None and self.sums.shape != more.shape:
            raise ValueError(
                f"the state has shape {list(self.sums.shape)}, but these keys and values make one "
                f"of {list(more.shape)}"
            )
        self.sums = more if self.sums is None else self.sums + more
        self.length += k.shape[2]

    def read(self, q: Tensor) -> Smoothed:
        """The result of queries [B, H, T, D] that see all keys so far; H is a multiple of key heads."""
        if self.sums is None:
            raise ValueError("the state is empty: update it with keys and values first")
        heads = self.sums.shape[1]
        if q.dim() != 4 or q.shape[1] % heads:
            raise ValueError(
                f"q must be [B, H, T, D] with a multiple of {heads} heads, got {list(q.shape)}"
            )
        x = q.to(self.sums.dtype)
        size = _size(x)
        phi = features(x / size).unflatten(1, (heads, -1))  # [B, h, G, T, F]
        sums = (phi @ self.sums[:, :, None]).flatten(1, 2)
        out, log_mass = _ratio(torch.where(sums[..., -1:].isfinite(), sums, math.nan), size)
        return Smoothed(out.to(q.dtype), log_mass)
