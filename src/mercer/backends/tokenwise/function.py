"""Attention to convolved keys and values as one function with its own gradient.

Of T keys, those a query sees whole, all but its nearest P, are flash attention's: query i and key
j <= i - P is causal again for the queries from P on and the first T - P keys. What the nearest add
is merged by log_mass. Its backward needs no second pass over the keys: flash attention's backward
is given the output and the log_mass of the whole rows, from which it forms their own weights.

Before and after flash attention there are small passes, in Triton (taps_launch.py) or, on a CPU,
in plain PyTorch (plain_taps.py). Outside of compiled graphs an autograd function runs all of it,
inside them one opaque operator each way.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...opaque.operators import fake, learns, operator
from ...term.layout import accumulator
from ..runtime.launch import INTERPRETED
from ..triton.backend import INSTALLED
from ..triton.plan import by_tokens, empty
from . import launch as taps_launch
from . import plain as plain_taps
from .plain import Call
from .taps import Boundary, sum_by_id

MAX_WIDTH = 256
# Of torch.nn.attention.SDPBackend.
FLASH, CUDNN = 1, 3


def refuses(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why this function cannot run, or None; q, k and v are [B, H, T, D]."""
    device = q.device.type
    if device not in ("cpu", "cuda"):
        return f"it runs on CPU and CUDA, not on {device}"
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        return "there is nothing to smooth: an empty batch or sequence"
    if q.shape[2] != k.shape[2]:
        return "it needs as many queries as keys"
    if device == "cpu" and not INTERPRETED:
        return None
    if not INSTALLED:
        return "Triton is not installed"
    halves = (torch.bfloat16, torch.float16)
    if q.dtype not in ((torch.float32,) if INTERPRETED else halves):
        return f"flash attention takes half precision, and came with {q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > MAX_WIDTH or q.shape[0] * q.shape[1] > 65535:
        return "there are too many features or heads"
    if torch.compiler.is_compiling() and not _has_flash(q.device):
        return "flash attention is switched off, or this GPU has none"
    return None


def run(
    call: Call, q: Tensor, k: Tensor, v: Tensor, key_taps: Tensor | None, value_taps: Tensor | None
) -> Tensor | None:
    """The output for q, k, v of one shape [B, H, T, D]; None if there is no flash attention."""
    if torch.compiler.is_compiling():
        tokens = (q.is_cuda or INTERPRETED) and by_tokens(q)
        return smooth_taps(q, k, v, key_taps, value_taps, *call, tokens)[0]
    chosen = _choice(q, k, v, call)
    if chosen is None:
        return None
    out: Tensor = _Fused.apply(q, k, v, key_taps, value_taps, call, chosen)
    return out


def _choice(q: Tensor, k: Tensor, v: Tensor, call: Call) -> int | None:
    """Which flash attention torch would take; None if it would take another form."""
    if not q.is_cuda or q.shape[2] <= call.cut:
        return FLASH
    if q.shape[2] < 64:
        # Only then may the few keys that are left out matter.
        far = slice(None, q.shape[2] - call.cut)
        q, k, v = q[:, :, call.cut :], k[:, :, far], v[:, :, far]
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, call.causal, scale=call.scale)
    return chosen if chosen in (FLASH, CUDNN) else None


@torch.compiler.assume_constant_result
def _has_flash(device: torch.device) -> bool:
    """Whether a compiled graph, which cannot ask `_choice`, may count on flash attention."""
    if device.type == "cpu":
        return True
    on = torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.cudnn_sdp_enabled()
    return on and torch.cuda.get_device_capability(device) >= (8, 0)


def _passes(device: torch.device) -> ModuleType:
    return taps_launch if device.type == "cuda" or INTERPRETED else plain_taps


class Kept(NamedTuple):
    """What the forward gives, all of it for the backward; None where there is no such thing."""

    out: Tensor
    kt: Tensor | None  # keys and values as attention saw them, [B, H, T, D], if not as they came
    vt: Tensor | None
    keys: Tensor | None  # the kernels, [B, T, H or 1, 1 + P, S]
    values: Tensor | None
    lse: Tensor | None  # see Near
    far_lse: Tensor | None
    scores: Tensor | None

    def raw(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they came; a copy that no kernel made serves as well."""
        k = k if self.kt is None or self.keys is not None else self.kt
        return k, v if self.vt is None or self.values is not None else self.vt


KEPT = len(Kept._fields)


def forward(
    q: Tensor, k: Tensor, v: Tensor, key_taps: Tensor | None, value_taps: Tensor | None,
    call: Call, chosen: int,
) -> tuple[Kept, tuple[Any, ...]]:  # fmt: skip
    """The output with what the backward needs, and what flash attention's backward takes."""
    passes, cut, length = _passes(q.device), call.cut, q.shape[2]
    keys, values = passes.kernels((key_taps, value_taps), call, accumulator(q.dtype))
    if length <= cut:
        out, near = passes.merge(q, k, v, keys, values, None, None, None, call)
        return Kept(out, None, None, keys, values, near.lse, None, near.scores), ()
    kt, vt, bad = passes.convolve(k, v, keys, values, call)
    far, far_lse, rest = flash(
        q[:, :, cut:], kt[:, :, : length - cut], vt[:, :, : length - cut], call, chosen
    )
    kept = Kept(far, kt, vt, keys, values, None, far_lse, None)
    if cut or bad is not None:
        out, near = passes.merge(q, *kept.raw(k, v), keys, values, far, far_lse, bad, call)
        kept = Kept(out, kt, vt, keys, values, *near)
    return kept, rest


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, key_taps: Tensor | None,
    value_taps: Tensor | None, kept: Kept, rest: tuple[Any, ...], call: Call,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv and those of the taps."""
    out, kt, vt, keys, values, lse, far_lse, scores = kept
    passes, cut, length, far = _passes(q.device), call.cut, q.shape[2], None
    if grad.stride() != out.stride():
        grad = torch.empty_like(out).copy_(grad)
    if kt is not None and vt is not None and far_lse is not None:
        far = flash_backward(
            grad[:, :, cut:], q[:, :, cut:], kt[:, :, : length - cut], vt[:, :, : length - cut],
            out[:, :, cut:], far_lse, rest, call,
        )  # fmt: skip
    dq, dk, dv, *dkernels = passes.backward(
        q, *kept.raw(k, v), keys, values, grad, out, lse, scores, far, call
    )
    dtaps = passes.kernels_backward(dkernels, (keys, values), (key_taps, value_taps), call)
    return dq, dk, dv, *dtaps


class _Fused(torch.autograd.Function):
    """The function as it runs outside of a compiled graph, with less to pay for each call."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_taps: Tensor | None,
        value_taps: Tensor | None, call: Call, chosen: int,
    ) -> Tensor:  # fmt: skip
        given = (q, k, v, key_taps, value_taps)
        kept, rest = forward(*given, call, chosen)
        ctx.call, ctx.rest = call, tuple(None if isinstance(x, Tensor) else x for x in rest)
        tensors = (x if isinstance(x, Tensor) else None for x in rest)
        ctx.save_for_backward(q, *kept.raw(k, v), key_taps, value_taps, *kept, *tensors)
        return kept.out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_taps, value_taps, *saved = ctx.saved_tensors
        kept, tensors = Kept(*saved[:KEPT]), saved[KEPT:]
        rest = tuple(x if y is None else y for x, y in zip(ctx.rest, tensors, strict=True))
        return *backward(grad, q, k, v, key_taps, value_taps, kept, rest, ctx.call), None, None


@operator
def smooth_taps(
    q: Tensor, k: Tensor, v: Tensor, key_taps: Tensor | None, value_taps: Tensor | None,
    boundary: str, causal: bool, cut: int, temperature: float | None, scale: float, tokens: bool,
) -> list[Tensor]:  # fmt: skip
    """The forward for compiled graphs: `Kept`, where what is None is empty.

    `tokens`: whether the output and the gradients lie token by token in memory.
    """
    call = Call(cast(Boundary, boundary), causal, cut, temperature, scale)
    chosen = _choice(q, k, v, call) or FLASH
    kept, _ = forward(q, k, v, key_taps, value_taps, call, chosen)
    out, kt, vt, keys, values, lse, far_lse, scores = kept
    # An operator does not give back what came.
    kt, vt = kt.clone() if kt is k else kt, vt.clone() if vt is v else vt
    far_lse = None if far_lse is None else far_lse.reshape(far_lse.shape[:3])
    wide = accumulator(q.dtype)
    near = (lse, far_lse, scores) if call.cut else (None, far_lse, None)
    numbers = (keys, values, *near)
    return [
        _laid(out, tokens),
        *(q.new_empty(0) if x is None else x.contiguous() for x in (kt, vt)),
        *(q.new_empty(0, dtype=wide) if x is None else x.contiguous() for x in numbers),
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
    given = (cut, far, cut)
    shapes = (s if there else (0,) for s, there in zip(near, given, strict=True))
    return [
        _empty(q, tokens),
        k.new_empty(k.shape if far else (0,)),
        v.new_empty(v.shape if far else (0,)),
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
    """The backward for compiled graphs: of q, k, v and of the taps that there are."""
    call = Call(cast(Boundary, boundary), causal, cut, temperature, scale)
    chosen = _choice(q, k, v, call) or FLASH
    out, *others = made
    kept = Kept(out, *(x if x.numel() else None for x in others))
    rest: tuple[Any, ...] = ()
    if kept.far_lse is not None and q.is_cuda:
        # Which of them ran does not matter: both take the mass of the whole rows.
        count = q.shape[2] - call.cut
        rest = (chosen, None, None, count, count, *_unused(q, chosen), None)
        if chosen == CUDNN:
            kept = kept._replace(far_lse=kept.far_lse[..., None])
    found = backward(grad, q, k, v, key_taps, value_taps, kept, rest, call)
    grads = [x for x in found if x is not None]
    return [*(_laid(x, tokens) for x in grads[:3]), *(x.contiguous() for x in grads[3:])]


def _unused(q: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """Seed and offset as flash attention gives them; without dropout it does not read them."""
    if chosen == CUDNN:
        return q.new_empty((), dtype=torch.long), q.new_empty((), dtype=torch.long)
    return q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)


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
        # Copies that no kernel made serve as well as what came, where there are any.
        k, v = (
            x if t or y.dim() == 1 else y
            for x, t, y in zip((k, v), ctx.taps, output[1:3], strict=True)
        )
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


def flash(
    q: Tensor, k: Tensor, v: Tensor, call: Call, chosen: int
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """(out, log_mass, what its backward takes besides)."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, call.causal, scale=call.scale
        )
        return out, lse, ()
    if chosen == CUDNN:
        found = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, call.causal, False, scale=call.scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, call.causal, False, scale=call.scale
        )
    out, lse, *rest = found
    return out, lse, (chosen, *rest)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[Any, ...],
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of the keys that it saw, in rows that saw more."""
    aten = torch.ops.aten
    if not rest:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, call.causal, scale=call.scale
        )
    chosen, in_q, in_k, most_q, most_k, seed, offset, _ = rest
    if chosen == CUDNN:
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, offset, None, in_q, in_k, most_q, most_k, 0.0,
            call.causal, scale=call.scale,
        )  # fmt: skip
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, in_q, in_k, most_q, most_k, 0.0, call.causal, seed, offset,
        scale=call.scale,
    )  # fmt: skip


def gather(table: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """table[ids] for each target, [B, T, H, S]; the gradient is the same bits each time."""
    if torch.compiler.is_compiling():
        return tuple(gather_taps(table, ids))
    found: tuple[Tensor, ...] = _Gather.apply(table, ids)
    return found


def _take(table: Tensor, ids: Tensor) -> list[Tensor]:
    if INSTALLED and ids.numel() and (ids.is_cuda or INTERPRETED):
        return taps_launch.take(table, ids)
    # Faster than table[ids], which takes any number of indices.
    found = table.index_select(0, ids.reshape(-1)).view(*ids.shape, *table.shape[1:])
    return list(found.unbind(2))


def _sum(grads: list[Tensor], ids: Tensor, count: int) -> Tensor:
    """The gradient of a table of so many rows."""
    single = grads[0].dtype != torch.float64
    if single and ids.numel() and INSTALLED and (ids.is_cuda or INTERPRETED):
        return taps_launch.sum_by_id(grads, ids, count)
    return sum_by_id(torch.stack(grads, 2).flatten(0, 1), ids.flatten(), count)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        ids = ids.long()
        ctx.save_for_backward(ids)
        ctx.count = table.shape[0]
        return tuple(_take(table, ids))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return _sum(list(grads), ids, ctx.count), None


@operator
def gather_taps(table: Tensor, ids: Tensor) -> list[Tensor]:
    """The same for compiled graphs."""
    return [x.contiguous() for x in _take(table, ids.long())]


@fake(gather_taps)
def _(table: Tensor, ids: Tensor) -> list[Tensor]:
    return [table.new_empty(*ids.shape, *table.shape[2:]) for _ in range(table.shape[1])]


@operator
def sum_taps(grads: list[Tensor], ids: Tensor, count: int) -> Tensor:
    """Its gradient."""
    return _sum(grads, ids.long(), count)


@fake(sum_taps)
def _(grads: list[Tensor], ids: Tensor, count: int) -> Tensor:
    return grads[0].new_empty(count, len(grads), *grads[0].shape[2:])


def _keep_ids(ctx: Any, inputs: tuple[Tensor, Tensor], output: list[Tensor]) -> None:
    table, ids = inputs
    ctx.save_for_backward(ids)
    ctx.count = table.shape[0]


def _sum_grads(ctx: Any, grads: list[Tensor]) -> tuple[Tensor, None]:
    (ids,) = ctx.saved_tensors
    return sum_taps(grads, ids, ctx.count), None


learns(gather_taps, _sum_grads, _keep_ids)
