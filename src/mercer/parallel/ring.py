"""Keys and values go round a ring of processes; the parts are mixed by their masses.

    out_i = sum_p share_ip out_ip,  share_ip = m_ip / sum_p m_ip

for parts p of the keys with masses m_ip. A process holds its own keys, those that it reads, and
those that arrive. The backward sends the keys round again with their gradients, and computes each
part anew. With g the gradient of out and h that of log_mass, part p gets

    d out_ip = share_ip g_i,  d log m_ip = share_ip (<g_i, out_ip - out_i> + h_i)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..dispatch.problem import prepare
from ..filters import Filter, Heads
from ..filters.base import And, Or, Span
from ..filters.data import Tabled
from ..kernels import Kernel
from ..smoother import solve
from ..term.features import Features
from ..term.layout import accumulator
from ..term.mix import Smoothed, mix
from .collectives import pass_on
from .filters import part
from .split import Chunk, Split


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """What both directions of a ring need besides tensors."""

    kernel: Kernel
    split: Split
    filter: Filter
    backend: str
    query_parts: tuple[str, ...]
    key_parts: tuple[str, ...]
    # The batch and the heads of the output.
    sizes: tuple[int, int]

    def sorted(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The parts of queries; those of keys, and the values; what the kernel learns."""
        a = len(self.query_parts)
        b = a + len(self.key_parts) + 1
        return list(tensors[:a]), list(tensors[a:b]), list(tensors[b:])

    def owner(self, step: int) -> int:
        """Whose keys are here at this step."""
        return (self.split.rank - step) % self.split.size

    def pairs(self, owner: int) -> list[tuple[int, int]]:
        """The numbers of an own chunk and of a chunk of the owner's keys that it sees."""
        return [
            (m, n)
            for m, q in enumerate(self.split.own)
            for n, k in enumerate(self.split.chunks(owner))
            # A chunk that sees nothing at all still has an output.
            if q == k or not hides(self.filter, q, k)
        ]

    def rows(self, n: int) -> slice:
        return slice(*self.split.rows(n))

    def attend(
        self, m: int, n: int, owner: int, q: Sequence[Tensor], kv: Sequence[Tensor]
    ) -> Smoothed:
        """Queries of the own chunk m, and keys and values of the owner's chunk n."""
        rows, keys = self.split.own[m], self.split.chunks(owner)[n]
        *k, v = kv
        problem = prepare(
            self.kernel,
            Features(**dict(zip(self.query_parts, q, strict=True))),
            Features(**dict(zip(self.key_parts, k, strict=True))),
            v,
            part(self.filter, rows, keys),
            dropout_p=0.0,
            log_mass=True,
            backend=self.backend,
            places=(rows.first, keys.first),
        )
        found = solve(problem, self.backend)
        if found.sign is None and not self.kernel.positive:
            raise ValueError(
                f"{self.kernel!r} may have negative weights, and backend 'reference' gives no sign "
                "of their sum, which a ring needs: take exchange='gather'"
            )
        wide = accumulator(v.dtype)
        assert found.log_mass is not None
        sizes = (*self.sizes, self.split.step)
        return Smoothed(
            found.out.to(wide).expand(*sizes, -1), found.log_mass.to(wide).expand(sizes), found.sign
        )


def hides(filter: Filter, q: Chunk, k: Chunk) -> bool:
    """Whether no query sees any key, as far as it is known without waiting for a GPU."""
    if isinstance(filter, And):
        return any(hides(each, q, k) for each in filter.filters)
    if isinstance(filter, Or | Heads):
        return all(hides(each, q, k) for each in filter.filters)
    if isinstance(filter, Tabled) and not filter.table.is_cpu:
        return False
    return filter.covers(Span(q.first, q.stop - 1), Span(k.first, k.stop - 1), 0) is False


def ring(
    kernel: Kernel, q: Features, k: Features, v: Tensor, split: Split, filter: Filter, backend: str
) -> Smoothed:
    """The rows of this process; collective."""
    tensors = (*q.tensors(), *k.tensors(), v)
    call = Call(
        kernel=kernel,
        split=split,
        filter=filter,
        backend=backend,
        query_parts=tuple(q),
        key_parts=tuple(k),
        sizes=(max(x.shape[0] for x in tensors), q.heads),
    )
    out, log_mass, sign = _Ring.apply(call, *tensors, *learned_by(kernel, q, k))
    return Smoothed(out, log_mass, None if kernel.positive else sign)


def learned_by(kernel: Kernel, q: Features, k: Features) -> list[Tensor]:
    """What a kernel learns: the leaves of the graph of one weight."""
    if not torch.is_grad_enabled():
        return []
    one = [x.repeat_heads(q.heads).each(lambda x: x[:1, :, :1].detach()).at(0) for x in (q, k)]
    todo, seen, leaves = [kernel.log_weight(*one).sum().grad_fn], set(), []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        todo.extend(following for following, _ in node.next_functions)
    return leaves


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        split = call.split
        q, held, _ = call.sorted(tensors)
        parts: list[list[Smoothed]] = [[] for _ in split.own]
        for step in range(split.size):
            owner, last = call.owner(step), step == split.size - 1
            coming = None if last else pass_on(split.group, held)
            try:
                for m, n in call.pairs(owner):
                    rows, keys = call.rows(m), call.rows(n)
                    here = [x[:, :, rows] for x in q], [x[:, :, keys] for x in held]
                    parts[m] = [mix([*parts[m], call.attend(m, n, owner, *here)])]
            finally:
                # After an error, too: what is on its way must arrive before others can be told.
                held = held if coming is None else coming()
        done = mix_rows(parts)
        ctx.call = call
        ctx.save_for_backward(*tensors, *done)
        ctx.mark_non_differentiable(done[2])
        return done[0].to(tensors[0].dtype), *done[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        *tensors, out, log_mass, sign = ctx.saved_tensors
        split, (q, held, learned) = call.split, call.sorted(tensors)
        g, h = grads[0].to(out.dtype), grads[1]
        h = h - (g * out).sum(-1)
        wide = [torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in tensors]
        dq, dkv, dlearned = call.sorted(wide)
        coming_grads = None
        for step in range(split.size):
            owner, last = call.owner(step), step == split.size - 1
            coming = None if last else pass_on(split.group, held)
            own = [torch.zeros_like(x) for x in dkv]
            for m, n in call.pairs(owner):
                rows, keys = call.rows(m), call.rows(n)
                here = [x[:, :, rows] for x in q], [x[:, :, keys] for x in held]
                of_rows = (x[:, :, rows] for x in (g, h, log_mass, sign))
                found = _gradients(call, (m, n, owner), *here, learned, *of_rows)
                sums = [x[:, :, rows] for x in dq] + [x[:, :, keys] for x in own] + dlearned
                for total, grad in zip(sums, found, strict=True):
                    if grad is not None:
                        total += grad
            if coming_grads is not None:
                for total, grad in zip(own, coming_grads(), strict=True):
                    total += grad
            dkv = own
            if split.size > 1:
                coming_grads = pass_on(split.group, own)
            held = held if coming is None else coming()
        if coming_grads is not None:
            dkv = coming_grads()
        found = [x.to(y.dtype) for x, y in zip([*dq, *dkv, *dlearned], tensors, strict=True)]
        return None, *found


def mix_rows(parts: list[list[Smoothed]]) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log_mass and sign of all chunks, one after the other."""
    done = [mix(each) for each in parts]
    masses = [x.log_mass for x in done if x.log_mass is not None]
    signs = [
        torch.ones_like(y) if x.sign is None else x.sign for x, y in zip(done, masses, strict=True)
    ]
    return torch.cat([x.out for x in done], 2), torch.cat(masses, 2), torch.cat(signs, 2)


def _gradients(
    call: Call,
    numbers: tuple[int, int, int],
    q: list[Tensor],
    kv: list[Tensor],
    learned: list[Tensor],
    g: Tensor,
    h: Tensor,
    log_mass: Tensor,
    sign: Tensor,
) -> Sequence[Tensor | None]:
    """Those of one part; h is the gradient of log_mass less <g, out>."""
    with torch.enable_grad(), torch.autocast(g.device.type, enabled=False):
        q, kv = ([x.detach().requires_grad_() for x in xs] for xs in (q, kv))
        found = call.attend(*numbers, q, kv)
    assert found.log_mass is not None
    share = (found.log_mass.detach() - log_mass).exp()
    share = share * sign if found.sign is None else share * sign * found.sign
    share = torch.where(log_mass.isneginf(), 0.0, share)
    wanted = (found.log_mass, share * ((g * found.out.detach()).sum(-1) + h))
    pairs = [(found.out, share[..., None] * g), wanted]
    outputs, grads = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
    return torch.autograd.grad(outputs, [*q, *kv, *learned], grads, allow_unused=True)
