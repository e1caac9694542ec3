"""Attention in which each query has a key and a value for itself, beside all that come before it.

That is what token kernels of three taps make of causal attention: a query sees its own key without
the right neighbour. Short sequences are faster by our own kernels, which take that in on the way,
than by flash attention and passes around it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import hopper
from .plain_taps import Call
from .triton_launch import backward_keys, prepare, tensors_of
from .triton_plan import (
    INTERPRETED,
    Bias,
    Inputs,
    Numbers,
    Plan,
    Slot,
    Static,
    aligned_copy,
    by_tokens,
    copies,
    copying,
    empty,
    launch_of,
    plan,
)

# Faster on an H200 at 1024 places of 64 features; more is not measured.
LONGEST, WIDEST = 1024, 64


class Seen(NamedTuple):
    """What attention reads beside queries."""

    k: Tensor
    v: Tensor
    own_k: Tensor
    own_v: Tensor


def takes(q: Tensor, v: Tensor, call: Call) -> bool:
    """Whether this is the faster way, by shapes and devices alone."""
    if not (call.causal and call.cut == 1 and call.scale > 0):
        return False
    fits = q.shape[2] <= LONGEST and max(q.shape[3], v.shape[3]) <= WIDEST
    return fits and (INTERPRETED or (q.is_cuda and copying(q.device)))


def forward(q: Tensor, seen: Seen, bad: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """(out, log_mass); `bad` says of blocks of places where the first is that is not finite."""
    x, p, ready = _planned(q, seen, call)
    static, v = p.static, seen.v
    out = empty(v, *static.shape, v.shape[-1], static.tokens)
    lse = v.new_empty(static.shape, dtype=torch.float32)
    blocks = bad.shape[1]
    launch = launch_of(p, "forward", own=1 << (blocks - 1).bit_length(), places=_places(seen))
    tensors = (*tensors_of(x, ready, p, launch, "forward"), out, ready.col0, lse)
    launch((*tensors, seen.own_k, seen.own_v, bad), (*p.numbers(None), *_strides(seen), blocks))
    return out, lse


def backward(
    grad: Tensor, q: Tensor, seen: Seen, out: Tensor, lse: Tensor, call: Call, same: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor], bool]:
    """Gradients of queries, and of keys and values that others see; what the others' follow from.

    The latter are the weight of each query's own key and the gradient of its score, [B, H, T, 1].
    `same`: own keys are those that others see, so that one gradient may do; last: whether it did.
    """
    x, p, ready = _planned(q, seen, call)
    static, none = p.static, ready.col0
    batch, heads, length = static.shape
    tokens = static.tokens
    grad, out = aligned_copy(grad, tokens), aligned_copy(out, tokens)
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    shares, pulls = (lse.new_empty(*static.shape, 1) for _ in range(2))
    dq = empty(q, batch, heads, length, q.shape[-1], tokens)
    dk = empty(q, batch, heads, length, q.shape[-1], tokens)
    dv = empty(q, batch, heads, length, seen.v.shape[-1], tokens)
    rows = (grad, lse2, delta, lse)
    launch = launch_of(p, "queries", own=1, places=_places(seen))
    made = (out, none, lse, dq, dq, none, none, none, none, delta, delta)
    tensors = (*tensors_of(x, ready, p, launch, "queries"), *rows, *made)
    own = (seen.own_k, seen.own_v, shares, pulls)
    launch((*tensors, *own), (*p.numbers(None), *_strides(seen)))
    of_keys = ([dk], dv, [none], [none])
    finished = same and hopper.takes(p, grad)
    if finished:
        hopper.keys(x, p, ready, rows, of_keys, pulls=pulls)
    else:
        backward_keys(x, p, ready, rows, of_keys)
    return (dq, dk, dv), (shares, pulls), finished


def _planned(q: Tensor, seen: Seen, call: Call) -> tuple[Inputs, Plan, Numbers]:
    """Strictly earlier keys, as the fused kernels take them."""
    q = q if q.stride(-1) == 1 and copies(q) else aligned_copy(q)
    none = seen.v.new_empty(0, dtype=torch.float32)
    slot = Slot(0, 0.0, 0, call.scale, norm=False, wants=False, saves=False)
    earlier = ((1, -1, -1, -1, 0, 0, 0, 0, 0, 1),)
    static = Static(
        (slot,), earlier, simple=True, dropout_p=0.0, trains=True, first=0, tokens=by_tokens(q),
        clip=-1, shape=(q.shape[0], q.shape[1], q.shape[2]),
    )  # fmt: skip
    x = Inputs([q], [seen.k], seen.v, [none], [none], [none], Bias(), None, None, None)
    ready = prepare(x, static, none)
    return x, plan(x, static, ready), ready


def _strides(seen: Seen) -> tuple[int, ...]:
    return *seen.own_k.stride()[:3], *seen.own_v.stride()[:3]


def _places(seen: Seen) -> tuple[int, ...]:
    """Where own keys and values begin, and how far apart they are."""
    return seen.own_k.data_ptr() % 16, seen.own_v.data_ptr() % 16, *_strides(seen)
