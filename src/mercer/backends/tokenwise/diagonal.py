"""Causal attention in which a query sees another value at its own place, and perhaps another key.

That is what token kernels of three taps make of it: a query sees what is at its own place without
the right neighbour. Short sequences are faster by our own kernels, which take that in on the way,
than by flash attention and passes around it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.launch import INTERPRETED
from ..triton.plan import (
    Bias,
    Inputs,
    Numbers,
    Plan,
    Rows,
    Slot,
    Static,
    aligned_copy,
    by_tokens,
    copies,
    copying,
    counters,
    empty,
    plan,
)
from ..triton.run import Own, backward_of, forward_of, prepare
from .plain import Call

# Faster on an H200 at 1024 places of 64 features; more is not measured.
LONGEST, WIDEST = 1024, 64


class Seen(NamedTuple):
    """What attention reads beside queries; no own keys where a query sees those of the others."""

    k: Tensor
    v: Tensor
    own_k: Tensor | None
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
    out, _, lse = forward_of(x, p, ready, own=_own(seen, (bad,)))
    return out, lse


def backward(
    grad: Tensor, q: Tensor, seen: Seen, out: Tensor, lse: Tensor, call: Call
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Gradients of queries, and of keys and values that others see; what the others' follow from.

    The latter are the weight of each query's own pair and the gradient of its score, [B, H, T, 1].
    Without own keys, the gradient of keys is whole.
    """
    x, p, ready = _planned(q, seen, call)
    static, none = p.static, ready.col0
    grad, out = (aligned_copy(y, static.tokens) for y in (grad, out))
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    near = (lse.new_empty(*static.shape, 1), lse.new_empty(*static.shape, 1))
    dq, dk, dv = (empty(y, *static.shape, y.shape[-1], static.tokens) for y in (q, seen.k, seen.v))
    backward_of(
        x, p, ready, Rows(grad, lse2, delta, lse, counters(lse)), ([dk], dv, [none], [none]),
        ([dq], [none], [none], delta, delta), (out, none, lse), own=_own(seen, near),
    )  # fmt: skip
    return (dq, dk, dv), near


def _planned(q: Tensor, seen: Seen, call: Call) -> tuple[Inputs, Plan, Numbers]:
    """Causal attention, as the fused kernels take it."""
    none = seen.v.new_empty(0, dtype=torch.float32)
    slot = Slot(0, 0.0, 0, call.scale, norm=False, wants=False, saves=False)
    causal = ((1, -1, -1, -1, 0, 0, 0, 0, 0, 0),)
    static = Static(
        (slot,), causal, simple=True, dropout_p=0.0, trains=True, first=0, tokens=by_tokens(q),
        clip=-1, shape=(q.shape[0], q.shape[1], q.shape[2]),
    )  # fmt: skip
    q, k, v = (_read(y) for y in (q, seen.k, seen.v))
    x = Inputs([q], [k], v, [none], [none], [none], Bias(), None, None, None)
    ready = prepare(x, static, none)
    return x, plan(x, static, ready), ready


def _own(seen: Seen, also: tuple[Tensor, ...]) -> Own:
    return Own(None if seen.own_k is None else _read(seen.own_k), _read(seen.own_v), also)


def _read(x: Tensor) -> Tensor:
    """x, or a copy that the copy engine may read, if there can be one."""
    return x if x.stride(-1) == 1 and copies(x) else aligned_copy(x)
