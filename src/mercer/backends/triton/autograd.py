"""The fused kernels with their derivatives: an autograd.Function, and operators for compiled graphs.

The function has less host overhead per call. A compiled graph needs opaque operators, whose arguments
are tensors, strings and numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...opaque.operators import fake, learns, operator
from ...term.learned import derives
from . import run, tables
from .layout import empty
from .plan import Bias, Inputs, Numbers
from .static import Static, parse


def call(static: Static, *given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log_mass; without autograd's overhead if nothing needs a gradient."""
    if derives(static.trains):
        return _Fused.apply(static, *given)
    out, lse, *_ = _start(static, *given)
    return out, lse


class _Fused(torch.autograd.Function):
    """The kernels outside of compiled graphs, with less overhead per call."""

    @staticmethod
    def forward(
        ctx: Any, static: Static, lengths: Tensor | None, ids: Tensor | None, seed: Tensor | None,
        table: Tensor | None, asking: Tensor | None, by: Tensor | None, *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        given = (lengths, ids, seed, table, asking, by, *tensors)
        out, lse, low, *ready = _start(static, *given)
        ctx.static, ctx.count = static, len(tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, low, *ready, *given)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        grad_out = torch.zeros_like(saved[0]) if grad_out is None else grad_out
        grads = _back(ctx.static, grad_out, grad_lse, *saved)
        return None, None, None, None, *_slots_of(grads[ctx.count :]), *grads[: ctx.count]


def _start(
    static: Static, lengths: Tensor | None, ids: Tensor | None, seed: Tensor | None, *rest: Any
) -> list[Tensor]:
    """Output, log_mass, the output's rounding error, and `Numbers`; `rest` is a bias and the tensors."""
    inputs = Inputs.of(rest[3:], Bias(*rest[:3]), lengths, ids, seed)
    out, lse, low, ready = run.forward(inputs, static)
    *numbers, band = ready
    return [out, lse, low, *numbers, tables.kept(band)]


def _back(
    static: Static, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor,
    low: Tensor, *rest: Any,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of tensors and bias; `rest` has the forward's results and inputs."""
    count = len(Numbers._fields)
    ready, rest = Numbers(*rest[:count]), rest[count:]
    (lengths, ids, seed), bias = rest[:3], Bias(*rest[3:6])
    inputs = Inputs.of(rest[6:], bias, lengths, ids, seed)
    band = tables.again(ready.band, bias, static, inputs.v)
    if band is not ready.band:
        ready = ready._replace(band=band)
    return run.backward(grad_out, grad_lse, out, lse, low, inputs, static, band, ready)


def _slots_of(grads: list[Any]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a bias in its order: a table's, or those of queries and rows."""
    if len(grads) == 2:
        return None, grads[0], grads[1]
    return (grads[0] if grads else None), None, None


@operator
def fused(
    tensors: list[Tensor], table: Tensor | None, asking: Tensor | None, rows: Tensor | None,
    lengths: Tensor | None, ids: Tensor | None, seed: Tensor | None, static: str, sizes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The forward for compiled graphs: (out, log_mass, rounding error of out, the band)."""
    known = parse(static, sizes)
    out, lse, low, *_, band = _start(known, lengths, ids, seed, table, asking, rows, *tensors)
    return out, lse, low, band


@fake(fused)
def _(tensors: list[Tensor], table: Tensor | None, asking: Tensor | None, rows: Tensor | None,
      lengths: Any, ids: Any, seed: Any, static: str, sizes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    known = parse(static, sizes)
    v = tensors[2 * len(known.slots)]
    out = empty(v, *known.shape, v.shape[-1], known.tokens)
    lse = v.new_empty(known.shape, dtype=torch.float32)
    low = run.empty_low(out, run.keeps_low(known, v))
    band = v.new_empty(0)
    if known.clip >= 0:
        shape = tables.shape_of(Bias(table, asking, rows), known, v.shape[2])
        band = tables.kept(v.new_empty(shape, dtype=tables.dtype_of(v.dtype)))
    return out, lse, low, band


@operator
def fused_backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, low: Tensor, band: Tensor,
    tensors: list[Tensor], table: Tensor | None, asking: Tensor | None, rows: Tensor | None,
    lengths: Tensor | None, ids: Tensor | None, seed: Tensor | None, static: str, sizes: list[int],
) -> list[Tensor]:  # fmt: skip
    """The backward for compiled graphs."""
    known, bias = parse(static, sizes), Bias(table, asking, rows)
    inputs = Inputs.of(tuple(tensors), bias, lengths, ids, seed)
    # Of `Numbers` only the band was kept.
    band = tables.again(band, bias, known, inputs.v)
    grads = run.backward(grad_out, grad_lse, out, lse, low, inputs, known, band)
    given = [x for x in (*tensors, table, asking, rows) if x is not None]
    # An operator returns tensors.
    return [torch.zeros_like(x) if y is None else y for x, y in zip(given, grads, strict=True)]


@fake(fused_backward)
def _(grad_out: Any, grad_lse: Any, out: Any, lse: Any, low: Any, band: Any, tensors: list[Tensor],
      table: Tensor | None, asking: Tensor | None, rows: Tensor | None, lengths: Any, ids: Any,
      seed: Any, static: str, sizes: list[int]) -> list[Tensor]:  # fmt: skip
    known = parse(static, sizes)
    grads = []
    for n, x in enumerate(tensors):
        features = n <= 2 * len(known.slots) and x.shape[:2] == known.shape[:2]
        # Sums over heads or sequences that share a tensor are contiguous.
        grad = x.new_empty(x.shape)
        if features and known.tokens:
            batch, heads, length, width = x.shape
            grad = empty(x, batch, heads, length, width, True)
        grads.append(grad)
    return grads + [x.new_empty(x.shape) for x in (table, asking, rows) if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, table, asking, rows, lengths, ids, seed, ctx.static, ctx.sizes = inputs
    ctx.save_for_backward(*output, table, asking, rows, lengths, ids, seed, *tensors)


def _backward(
    ctx: Any, grad_out: Tensor, grad_lse: Tensor, _low: Any, _band: Any
) -> tuple[Any, ...]:
    out, lse, low, band, *rest = ctx.saved_tensors
    options, tensors = rest[:6], rest[6:]
    grads = fused_backward(
        grad_out, grad_lse, out, lse, low, band, tensors, *options, ctx.static, ctx.sizes
    )
    of_bias = _slots_of(grads[len(tensors) :])
    return grads[: len(tensors)], *of_bias, None, None, None, None, None


learns(fused, _backward, _save)
