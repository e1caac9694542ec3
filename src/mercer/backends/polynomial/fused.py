"""Polynomial kernels of degree 2 on the GPU, in linear time: how the kernels are called.

    out_i = sum_j <q_i, k_j>^2 v_j / m_i        m_i = sum_j <q_i, k_j>^2

The sequence is cut into chunks. The weights inside a chunk are formed. All chunks before it come
from a state; for gradients of keys, all chunks after it.

Memory is linear in T: at most WORKSPACE bytes of states are held at a time, or one head's. The
backward builds the states again. Each way is one opaque operator. The kernels are in kernels/.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...opaque.operators import fake, learns, operator
from ..triton.layout import readable_rows
from ..triton.reductions import reduced
from .plan import Plan, plan_of, round_up


def _strides(x: Tensor) -> tuple[int, int, int]:
    """The strides of batch, head and place; a batch of 1 has stride 0."""
    return 0 if x.shape[0] == 1 else x.stride(0), x.stride(1), x.stride(2)


class _Copies:
    """Padded copies of the inputs, and the first places that are not finite."""

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> None:
        self.plan = plan
        offset = plan.start - plan.origin
        tq, tk = plan.padded_queries, plan.padded_keys
        self.size = q.new_empty(plan.batch, plan.heads, tq, dtype=torch.float32)
        self.q, _ = self._copy(q, tq, offset, plan.dim, None, queries=True)
        self.k, self.bad_k = self._copy(k, tk, 0, plan.dim, lengths)
        self.v, self.bad_v = self._copy(v, tk, 0, plan.wide, lengths)

    def _copy(
        self, x: Tensor, padded: int, offset: int, width: int, lengths: Tensor | None, *,
        queries: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        from .kernels import states

        x = readable_rows(x)
        rows = self.plan.batch * x.shape[1]
        size = min(64, self.plan.chunk)
        copy = x.new_empty(rows, width, padded)
        bad = x.new_empty(rows, padded // size, dtype=torch.int32)
        states.prepare[(padded // size, rows)](
            x, copy, self.size, bad, bad if lengths is None else lengths, *_strides(x), x.shape[1],
            x.shape[2], offset, x.shape[3], padded, W=width, BT=size, QUERIES=queries,
            LIMITED=lengths is not None,
        )  # fmt: skip
        return copy, bad if queries else bad.amin(-1)


class _States:
    """The states of a few heads, beginning with `first`."""

    def __init__(self, plan: Plan, first: int, count: int, device: torch.device) -> None:
        self.plan, self.first, self.count, self.device = plan, first, count, device
        chunks = max(plan.chunks(plan.padded_keys), plan.chunks(plan.padded_queries))
        many = count * chunks * plan.far

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(many, *shape, device=device, dtype=dtype)

        square = (plan.dim, plan.dim)
        self.sums, self.masses = room(*square, plan.wide), room(*square)
        self.means, self.traces = room(plan.wide), room()
        self.states = room(*square, plan.wide, dtype=plan.operand)
        self.z, self.mu = room(*square), room(plan.wide)

    def of_keys(self, copies: _Copies) -> tuple[Tensor, Tensor, Tensor]:
        """The sums over the keys before each chunk, or over all."""
        plan = self.plan
        chunks = plan.chunks(plan.padded_keys)
        if plan.far:
            # No chunk reads the state after the last one.
            high = chunks - 1 if plan.causal else chunks
            self._build(
                copies.k, copies.v, None, None, plan.k_heads, plan.v_heads, 1, plan.padded_keys,
                0, high, chunks, 0,
            )  # fmt: skip
            keep = (plan.origin // plan.chunk, chunks)
            self._scan(chunks, (0, high), keep, reverse=False, centred=True)
        return self.states, self.z, self.mu

    def of_queries(
        self, copies: _Copies, share: Tensor, rate: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The sums over the queries after each chunk, or over all, with dO / m as values."""
        plan = self.plan
        chunks = plan.chunks(plan.padded_keys if plan.causal else plan.padded_queries)
        if plan.far:
            low = max(plan.origin // plan.chunk, 1) if plan.causal else 0
            self._build(
                copies.q, share, rate, shift, plan.heads, plan.heads, plan.group,
                plan.padded_queries, low, chunks, chunks, plan.origin,
            )  # fmt: skip
            keep = (0, chunks - 1)
            self._scan(chunks, (low, chunks), keep, reverse=plan.causal, centred=False)
        return self.states, self.z

    def _build(
        self, x: Tensor, y: Tensor, rate: Tensor | None, shift: Tensor | None, x_heads: int,
        y_heads: int, group: int, length: int, low: int, high: int, chunks: int, origin: int,
    ) -> None:  # fmt: skip
        from .kernels import states

        plan, sizes = self.plan, self.plan.sizes("build")
        grid = (-(-plan.width // sizes["G"]) + 1, high - low, self.count)
        states.build[grid](
            x, y, self.sums if rate is None else rate, self.sums if shift is None else shift,
            self.sums, self.masses, self.means, self.traces, self.first, plan.joint, x_heads,
            y_heads, group, length, plan.chunk, low, chunks, origin, plan.width, **plan.shape(),
            RATED=rate is not None, **sizes,
        )  # fmt: skip

    def _scan(
        self, chunks: int, there: tuple[int, int], keep: tuple[int, int], *, reverse: bool, centred: bool
    ) -> None:  # fmt: skip
        from .kernels import states

        plan = self.plan
        size = min(plan.dim, 1024 // plan.wide)
        states.scan[(round_up(plan.width, 2), plan.dim // size, self.count)](
            self.sums, self.masses, self.means, self.traces, self.states, self.z, self.mu, chunks,
            *there, *keep, plan.width, **plan.shape(), REVERSE=reverse, TOTAL=not plan.causal,
            CENTRED=centred, BB=size, num_warps=4,
        )  # fmt: skip


def _few(plan: Plan, device: torch.device) -> Iterator[_States]:
    """All heads, as many at a time as WORKSPACE has room for."""
    many, count = plan.batch * plan.joint, plan.at_once()
    states: _States | None = None
    for first in range(0, many, count):
        now = min(count, many - first)
        if states is None or states.count != now:
            states = None
            states = _States(plan, first, now, device)
        states.first = first
        yield states


def _geometry(plan: Plan) -> tuple[int, ...]:
    return (
        plan.joint, plan.k_heads, plan.v_heads, plan.group, plan.padded_queries, plan.padded_keys,
        plan.chunk, plan.origin,
    )  # fmt: skip


@operator
def smooth_squares(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """out, log_mass, and the mass for the backward; if causal, for Q <= K."""
    from .kernels import readers

    plan = plan_of(q, k, v, causal)
    copies = _Copies(plan, q, k, v, lengths)
    shape = (plan.batch, plan.heads, plan.num_queries)
    out = v.new_empty(*shape, plan.values)
    log, mass = (v.new_empty(shape, dtype=torch.float32) for _ in range(2))
    sizes = plan.sizes("forward")
    for few in _few(plan, v.device):
        before = few.of_keys(copies)
        readers.forward[(plan.padded_queries // sizes["BM"], few.count * plan.group)](
            copies.q, copies.size, copies.k, copies.v, *before, copies.bad_k, copies.bad_v, out,
            log, mass, few.first, *_geometry(plan), plan.chunks(plan.padded_keys),
            plan.start - plan.origin, plan.num_queries, plan.width, plan.values, **plan.shape(),
            **plan.parts(), **sizes,
        )  # fmt: skip
    return out, log, mass


@fake(smooth_squares)
def _(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (max(q.shape[0], k.shape[0], v.shape[0]), q.shape[1], q.shape[2])
    number = v.new_empty(shape, dtype=torch.float32)
    return v.new_empty(*shape, v.shape[3]), number, torch.empty_like(number)


@operator
def smooth_squares_backward(
    grad: Tensor, grad_log: Tensor, out: Tensor, mass: Tensor, q: Tensor, k: Tensor, v: Tensor,
    lengths: Tensor | None, causal: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    from .kernels import readers, states

    plan = plan_of(q, k, v, causal)
    copies = _Copies(plan, q, k, v, lengths)
    grad = readable_rows(grad)
    grad_log, out, mass = grad_log.contiguous(), out.contiguous(), mass.contiguous()
    tq, offset, size = plan.padded_queries, plan.start - plan.origin, min(64, plan.chunk)
    rows = (plan.batch * plan.heads, tq)
    # dO / m may overflow float16.
    g = v.new_empty(rows[0], plan.wide, tq)
    share = torch.empty_like(g, dtype=plan.operand)
    shift, rate, exact = (v.new_empty(rows, dtype=torch.float32) for _ in range(3))
    states.prepare_backward[(tq // size, rows[0])](
        grad, out, grad_log, mass, g, share, shift, rate, *_strides(grad), plan.heads,
        plan.num_queries, offset, plan.values, tq, W=plan.wide, BT=size,
    )  # fmt: skip
    dq = q.new_empty(plan.batch, plan.heads, plan.num_queries, plan.width)
    dk = _room(k, plan)
    dv = _room(v, plan)
    for few in _few(plan, v.device):
        before = few.of_keys(copies)
        sizes = plan.sizes("queries")
        readers.backward_queries[(tq // sizes["BM"], few.count * plan.group)](
            copies.q, copies.size, copies.k, copies.v, *before, g, grad_log, shift, rate, exact, dq,
            few.first, *_geometry(plan), plan.chunks(plan.padded_keys), offset, plan.num_queries,
            plan.width, plan.values, **plan.shape(), **plan.parts(), **sizes,
        )  # fmt: skip
        after = few.of_queries(copies, share, rate, exact)
        sizes = plan.sizes("keys")
        chunks = plan.chunks(plan.padded_keys if causal else plan.padded_queries)
        readers.backward_keys[(plan.padded_keys // sizes["BM"], few.count)](
            copies.q, copies.k, copies.v, *after, g, exact, rate, dk, dv, few.first,
            *_geometry(plan), chunks, plan.num_keys, plan.width, plan.values, **plan.shape(),
            **plan.parts(), **sizes,
        )  # fmt: skip
    return [reduced(x, given) for x, given in ((dq, q), (dk, k), (dv, v))]


def _room(given: Tensor, plan: Plan) -> Tensor:
    """Memory for a gradient: float32 if it is summed later."""
    shape = (plan.batch, plan.joint, *given.shape[2:])
    whole = given.shape[:2] == shape[:2]
    return given.new_empty(shape, dtype=given.dtype if whole else torch.float32)


@fake(smooth_squares_backward)
def _(
    grad: Tensor, grad_log: Tensor, out: Tensor, mass: Tensor, q: Tensor, k: Tensor, v: Tensor,
    lengths: Tensor | None, causal: bool,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape) for x in (q, k, v)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, lengths, ctx.causal = inputs
    out, _, mass = output
    ctx.save_for_backward(out, mass, q, k, v, lengths)


def _backward(ctx: Any, grad: Tensor, grad_log: Tensor, _: Tensor) -> tuple[Any, ...]:
    grads = smooth_squares_backward(grad, grad_log, *ctx.saved_tensors, ctx.causal)
    return *grads, None, None


learns(smooth_squares, _backward, _save)
