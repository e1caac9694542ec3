"""torch's scaled_dot_product_attention for every term that is one plain dot product.

The lift is exact: q' = [scale q, scale], k' = [k, col]. In half precision a number per key and its
scale are each split into three numbers of that precision, so that nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..filters.base import can_read
from ..opaque.operators import fake, learns, operator
from ..term.layout import accumulator, as_column, join, pad_features, repeat
from ..term.mix import Smoothed
from ..term.term import Term
from . import Task, one_kind, spreads_nan

name = "sdpa"
dense_mask = True
kernels, keeps_nan = one_kind, spreads_nan
# Which parts of a and b to multiply for a product of three times the dtype's precision.
PAIRS = ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0))
# float16 ends at LARGEST; shifted by this, squared norms up to 3e7 fit.
FLOAT16_SHIFT = 256.0
LARGEST = 65504.0


def refuses(task: Task) -> str | None:
    """Why SDPA cannot run this term, or None."""
    term, device = task.term, task.device.type
    if term.links:
        return f"the link {term.links[0].formula} is not the identity: no plain dot product"
    if term.biases:
        return "its relative table would need a dense [Q, K] bias"
    if 0 in (task.batch, task.num_queries, task.num_keys):
        return "the batch or the sequence is empty"
    if task.dropout_p and device == "cpu":
        return "on CPU it supports dropout only in a dense form"
    if accumulator(task.v.dtype) != task.v.dtype and _learns_scale(term):
        return "in half precision the gradient of a learned scale would be inaccurate"
    if task.log_mass and device != "cpu":
        return f"it returns no log_mass on {device}"
    if task.mask_elements and _may_overflow(task):
        return "a product may overflow where a key is hidden: a mask is added to it"
    return _too_large(task) if task.v.dtype == torch.float16 else None


def _may_overflow(task: Task) -> bool:
    """Whether a product of a key that some query sees may be infinite."""
    # Reading the data would synchronise with a GPU, and a graph has no branches.
    if task.device.type != "cpu" or not can_read(task.v):
        return False
    limit = torch.finfo(accumulator(task.v.dtype)).max / 4
    if _bound(task, None) <= limit:
        return False
    mask = task.filter.sdpa(task.num_queries, task.num_keys, task.device)["attn_mask"]
    return mask is None or _bound(task, mask) > limit


def _bound(task: Task, mask: Tensor | None) -> float:
    """At least the largest exponent, and the sums that lead to it, among the keys of a mask."""
    bound = 0.0
    for f in task.term.factors:
        seen = None if mask is None else _seen(mask, f.k.shape[1])
        scale = f.scale.detach().abs().max() if isinstance(f.scale, Tensor) else abs(f.scale)
        number = 0.0 if f.col is None else _largest(f.col.detach(), seen)
        features = None if seen is None else seen[..., None]
        product = _largest(f.q.detach(), None) * _largest(f.k.detach(), features) * f.width
        bound += max(1.0, float(scale)) * (product + number)
    return bound


def _largest(x: Tensor, among: Tensor | None) -> float:
    """The largest magnitude; what is NaN or infinite is cleaned before it runs."""
    if not x.numel():
        return 0.0
    x = x if among is None else torch.where(among, x, 0.0)
    low, high = map(float, x.aminmax())
    largest = max(-low, high)
    return largest if math.isfinite(largest) else float(x.abs().nan_to_num(0.0, 0.0).max())


def _too_large(task: Task) -> str | None:
    """Why a number of the lifted features may not fit float16, or None."""
    if _is_plain(task.term):
        return None
    for f in task.term.factors:
        if not f.keyed and not isinstance(f.scale, Tensor) and abs(f.scale) <= 1:
            continue
        # Reading the data would synchronise with a GPU, and a graph has no branches.
        if task.device.type != "cpu" or not can_read(task.v):
            return "a scale or a number per key may not fit float16, and reading them would wait"
        # What is not finite is cleaned before it runs.
        scale, whole = as_column(f.scale, f.q, torch.float32).detach(), f.q.isfinite().all(-1, True)
        if f.width and not _fits(scale * f.q.detach().abs().amax(-1, True), whole, LARGEST):
            return "a query times its scale does not fit float16"
        if f.col is None:
            continue
        if not _fits(scale, whole, LARGEST / FLOAT16_SHIFT):
            return "a scale does not fit float16"
        col, whole = f.col.detach(), f.k.isfinite().all(-1)
        if _fits(col, whole, LARGEST * FLOAT16_SHIFT):
            continue
        mask = task.filter.sdpa(task.num_queries, task.num_keys, task.device)["attn_mask"]
        seen = whole if mask is None else whole & _seen(mask, whole.shape[1])
        if not _fits(col, seen, LARGEST * FLOAT16_SHIFT):
            return "the number of a key does not fit float16"
    return None


def _fits(x: Tensor, among: Tensor, largest: float) -> bool:
    return bool(((x.abs() <= largest) | ~among).all())


def _seen(mask: Tensor, heads: int) -> Tensor:
    """The keys that any query sees, [B or 1, 1 or heads of the keys, K]."""
    seen = mask.any(-2)
    if seen.shape[1] in (1, heads):
        return seen
    return seen.any(1, keepdim=True) if heads == 1 else seen.unflatten(1, (heads, -1)).any(2)


def memory(task: Task) -> int:
    """Bytes beyond the inputs and the output: the lifted features and the mask, if any."""
    size = task.v.dtype.itemsize
    plain = _is_plain(task.term) and task.term.factors[0].width == task.v.shape[-1]
    width = 0 if plain else _width(task.term, task.v)
    lifted = task.batch * task.heads * width * (task.num_queries + 2 * task.num_keys) * size
    return lifted + task.mask_elements * (1 + size)


def run(tasks: Sequence[Task]) -> list[Smoothed]:
    """One call of SDPA for each term."""
    return [_run(task) for task in tasks]


def _run(task: Task) -> Smoothed:
    dtype, device = task.v.dtype, task.device
    q, k, scale = _lift(task.term, dtype)
    v = repeat(task.v, task.batch, task.v.shape[1])
    q, k = repeat(q, task.batch, task.heads), repeat(k, task.batch, k.shape[1])
    arguments = task.filter.sdpa(task.num_queries, task.num_keys, device)
    if arguments["attn_mask"] is not None:
        # A mask is added to the products, and that of a hidden key may be infinite.
        k = torch.where(_seen(arguments["attn_mask"], k.shape[1])[..., None], k, 0.0)
    width = max(q.shape[-1], v.shape[-1])
    if device.type != "cpu":
        width += -width % 8
    q, k, padded = (pad_features(x, width) for x in (q, k, v))
    lse: Tensor | None = None
    if task.log_mass:
        mask = arguments["attn_mask"]
        if mask is not None:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)
        k, padded = (repeat(x, task.batch, task.heads) for x in (k, padded))
        out, lse = flash_with_mass(q, k, padded, mask, arguments["is_causal"], scale)
        if mask is not None:
            blind = mask.isneginf().all(-1).expand(lse.shape)
            lse = lse.masked_fill(blind, -math.inf)
        for f in task.term.factors:
            lse = lse if f.row is None else lse + f.row
    else:
        grouped = k.shape[1] != task.heads or padded.shape[1] != task.heads
        if grouped and k.shape[1] != padded.shape[1]:
            k, padded = (repeat(x, task.batch, task.heads) for x in (k, padded))
        out = F.scaled_dot_product_attention(
            q, k, padded, scale=scale, dropout_p=task.dropout_p, enable_gqa=grouped, **arguments
        )
    out = out[..., : v.shape[-1]]
    spoiled = _spoiled(task, arguments)
    if spoiled is not None:
        out = out.masked_fill(spoiled[..., None], math.nan)
        lse = None if lse is None else lse.masked_fill(spoiled, math.nan)
    return Smoothed(out, lse)


def _is_plain(term: Term) -> bool:
    """Whether the term is plain attention: one factor, a number as scale, nothing per key."""
    if len(term.factors) != 1:
        return False
    factor = term.factors[0]
    return not factor.keyed and not isinstance(factor.scale, Tensor)


def _learns_scale(term: Term) -> bool:
    # Its gradient is a sum of large numbers that cancel, and flash attention rounds them.
    return any(f.learned.scale for f in term.factors if f.keyed)


def _width(term: Term, v: Tensor) -> int:
    half = accumulator(v.dtype) != v.dtype
    width = 0
    for f in term.factors:
        columns = len(PAIRS) if half else 1
        width += f.width + (columns if f.keyed else 0)
    return max(width, v.shape[-1])


def _lift(term: Term, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """(q', k', scale)."""
    if _is_plain(term):
        factor = term.factors[0]
        assert not isinstance(factor.scale, Tensor)
        return factor.q.to(dtype), factor.k.to(dtype), factor.scale
    wide = accumulator(dtype)
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    for f in term.factors:
        # Round once: multiply by the scale in the wider dtype.
        q = f.q.to(wide)
        q = q if not isinstance(f.scale, Tensor) and f.scale == 1.0 else q * f.scale
        queries.append(q.to(dtype))
        keys.append(f.k.to(dtype))
        if f.col is not None:
            scale, col = as_column(f.scale, f.q, wide), f.col.to(wide)[..., None]
            for a, b in _columns(scale, col, dtype):
                queries.append(a)
                keys.append(b)
    return join(queries), join(keys), 1.0


def _columns(scale: Tensor, col: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """scale_i col_j as features of this dtype, without rounding it."""
    if scale.dtype == dtype:
        return [(scale, col)]
    shift = FLOAT16_SHIFT if dtype == torch.float16 else 1.0
    a, b = _split(scale * shift, dtype), _split(col / shift, dtype)
    return [(a[m], b[n]) for m, n in PAIRS]


def _split(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Three numbers of this dtype that add up to x; the first carries the gradient."""
    parts = [x.to(dtype)]
    rest = x.detach()
    for _ in range(2):
        rest = rest - parts[-1].detach().to(x.dtype)
        parts.append(rest.to(dtype))
    return parts


def _spoiled(task: Task, arguments: dict[str, Any]) -> Tensor | None:
    """The queries that are not finite or see a key that is not, [B, H, Q]."""
    if task.bad_queries is None or task.bad_keys is None:
        return None
    mask = arguments["attn_mask"]
    if mask is not None:
        seen = (task.bad_keys[:, :, None] & mask).any(-1)
    elif arguments["is_causal"]:
        seen = task.bad_keys.cumsum(-1) > 0
    else:
        seen = task.bad_keys.any(-1, keepdim=True)
    return task.bad_queries | seen


@operator
def flash_with_mass(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """CPU flash attention that also returns log_mass, with a gradient through it."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    # A compiled graph must know the layout: contiguous for any layout of q.
    return out.contiguous(), lse.contiguous()


@fake(flash_with_mass)
def _(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, mask, *output)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    # dS_ij = P_ij (dP_ij - D_i + dlse_i), and the operator forms D_i = <dO_i, O_i> itself. One
    # more value column, zero in V, 1 in dO and -dlse in O, turns its D into D - dlse.
    q, k, v, mask, out, lse = ctx.saved_tensors
    width = v.shape[-1]
    q, k, v = (F.pad(x, (0, 1)) for x in (q, k, v))
    grad_out = F.pad(grad_out, (0, 1), value=1.0)
    out = torch.cat([out, -grad_lse[..., None].to(out.dtype)], -1)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale
    )
    return *(x[..., :width] for x in grads), None, None, None


learns(flash_with_mass, _backward, _save)
