"""The function of function.py as one opaque operator each way, for compiled graphs."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from ...opaque.operators import fake, learns, operator
from ...term.layout import accumulator
from ..triton.layout import empty
from . import function
from .flash import FLASH, choice
from .plain import Call
from .taps import Boundary


@operator
def smooth_taps(
    q: Tensor, k: Tensor, v: Tensor, key_taps: Tensor | None, value_taps: Tensor | None,
    boundary: str, causal: bool, cut: int, temperature: float | None, scale: float, tokens: bool,
) -> list[Tensor]:  # fmt: skip
    """The forward: the fields of `Kept`, with empty tensors for None.

    `tokens`: whether the output and the gradients are [B, T, H, D] in memory.
    """
    call = Call(cast(Boundary, boundary), causal, cut, temperature, scale)
    chosen = choice(q, k, v, call) or FLASH
    out, kt, vt, keys, values, lse, far_lse, scores = function.forward(
        q, k, v, key_taps, value_taps, call, chosen
    )
    # An operator must not return its inputs.
    kt, vt = kt.clone() if kt is k else kt, vt.clone() if vt is v else vt
    near = (lse, far_lse, scores) if cut else (None, far_lse, None)
    wide = accumulator(q.dtype)
    return [
        _laid(out, tokens),
        *(q.new_empty(0) if x is None else x.contiguous() for x in (kt, vt)),
        *(
            q.new_empty(0, dtype=wide) if x is None else x.contiguous()
            for x in (keys, values, *near)
        ),
    ]


@fake(smooth_taps)
def _(
    q: Tensor, k: Tensor, v: Tensor, key_taps: Tensor | None, value_taps: Tensor | None,
    boundary: str, causal: bool, cut: int, temperature: float | None, scale: float, tokens: bool,
) -> list[Tensor]:  # fmt: skip
    wide, (batch, heads, length, _), far = accumulator(q.dtype), q.shape, q.shape[2] > cut
    kernels = (
        (0,) if x is None else (*x.shape[:3], 1 + cut, x.shape[-1]) for x in (key_taps, value_taps)
    )
    near = ((batch, heads, length), (batch, heads, length - cut), (batch, heads, length, cut))
    shapes = (s if there else (0,) for s, there in zip(near, (cut, far, cut), strict=True))
    return [
        _empty(q, tokens),
        *(x.new_empty(x.shape if far else (0,)) for x in (k, v)),
        *(q.new_empty(s, dtype=wide) for s in (*kernels, *shapes)),
    ]


def _laid(x: Tensor, tokens: bool) -> Tensor:
    """x as `_empty` lays it out."""
    if (x.transpose(1, 2) if tokens else x).is_contiguous():
        return x
    return _empty(x, tokens).copy_(x)


def _empty(x: Tensor, tokens: bool) -> Tensor:
    batch, heads, length, width = x.shape
    return empty(x, batch, heads, length, width, tokens)


@operator
def smooth_taps_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, key_taps: Tensor | None,
    value_taps: Tensor | None, made: list[Tensor], boundary: str, causal: bool, cut: int,
    temperature: float | None, scale: float, tokens: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k, v and of the given taps."""
    call = Call(cast(Boundary, boundary), causal, cut, temperature, scale)
    out, *others = made
    kept = function.Kept(out, *(x if x.numel() else None for x in others))
    # Any flash attention will do: all take the log_mass of whole rows.
    chosen = choice(q, k, v, call) or FLASH
    found = function.backward(grad, q, k, v, key_taps, value_taps, kept, call, chosen)
    grads = [x for x in found if x is not None]
    return [*(_laid(x, tokens) for x in grads[:3]), *(x.contiguous() for x in grads[3:])]


@fake(smooth_taps_backward)
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, key_taps: Tensor | None,
    value_taps: Tensor | None, made: list[Tensor], boundary: str, causal: bool, cut: int,
    temperature: float | None, scale: float, tokens: bool,
) -> list[Tensor]:  # fmt: skip
    taps = [x for x in (key_taps, value_taps) if x is not None]
    return [*(_empty(x, tokens) for x in (q, k, v)), *(x.new_empty(x.shape) for x in taps)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, key_taps, value_taps, *ctx.options = inputs
    ctx.taps = key_taps is not None, value_taps is not None
    if q.shape[2] > ctx.options[2]:
        # As in `Kept.raw`.
        k, v = (x if t else y for x, t, y in zip((k, v), ctx.taps, output[1:3], strict=True))
    ctx.save_for_backward(q, k, v, key_taps, value_taps, *output)
    ctx.set_materialize_grads(False)


def _grads(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    q, k, v, key_taps, value_taps, *made = ctx.saved_tensors
    options = (None,) * len(ctx.options)
    if grads[0] is None:
        return (None,) * 5 + options
    dq, dk, dv, *rest = smooth_taps_backward(
        grads[0], q, k, v, key_taps, value_taps, made, *ctx.options
    )
    dtaps = (rest.pop(0) if there else None for there in ctx.taps)
    return dq, dk, dv, *dtaps, *options


learns(smooth_taps, _grads, _save)
