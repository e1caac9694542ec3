"""Attention in which each query has a key and a value for itself, beside all that come before it.

That is what token kernels of three taps make of causal attention: a query sees its own key without
the right neighbour. Short sequences are faster by our own kernels, which take that in on the way,
than by flash attention and passes around it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

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
    describe,
    empty,
    launch_of,
    plan,
)

# Measured on an H200, where flash attention is as fast from here on.
LONGEST, WIDEST = 2048, 128


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
    fits = q.shape[2] <= LONGEST and max(q.shape[3], v.shape[3]) <= WIDEST and q.shape[3] % 8 == 0
    return fits and (INTERPRETED or (q.is_cuda and _copies(q.device)))


@lru_cache(maxsize=16)
def _copies(device: torch.device) -> bool:
    """Whether there is a copy engine."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def forward(q: Tensor, seen: Seen, bad: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """(out, log_mass); `bad` says of blocks of places where the first is that is not finite."""
    x, p, ready = _planned(q, seen, call)
    static, v = p.static, seen.v
    out = empty(v, *static.shape, v.shape[-1], static.tokens)
    lse = v.new_empty(static.shape, dtype=torch.float32)
    launch = launch_of(p, "forward", own=bad.shape[1])
    own = _described(seen, launch.constants)
    tensors = tensors_of(x, ready, p, launch, "forward")
    launch((*tensors, out, ready.col0, lse, *own, bad), p.numbers(None))
    return out, lse


def backward(
    grad: Tensor, q: Tensor, seen: Seen, out: Tensor, lse: Tensor, call: Call
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Gradients of queries, and of keys and values that others see; what the others' follow from.

    The last two are the weight of each query's own key and the gradient of its score, [B, H, T, 1].
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
    launch = launch_of(p, "queries", own=1)
    own = _described(seen, launch.constants)
    made = (out, none, lse, dq, dq, none, none, none, none, delta, delta)
    tensors = tensors_of(x, ready, p, launch, "queries")
    launch((*tensors, *rows, *made, *own, shares, pulls), p.numbers(None))
    backward_keys(x, p, ready, rows, ([dk], dv, [none], [none]))
    return (dq, dk, dv), (shares, pulls)


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


def _described(seen: Seen, constants: dict[str, int]) -> tuple[object, object]:
    rows = constants["BM"]
    return describe(seen.own_k, rows, constants["E0"]), describe(seen.own_v, rows, constants["V"])
