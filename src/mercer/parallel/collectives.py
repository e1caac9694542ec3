"""Collectives of torch.distributed that autograd goes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 has renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Each tensor of all processes, [size, …]; the backward sums the gradients for each process.

    All tensors are one node of the graph, so that all processes have one order of collectives.
    """
    found: tuple[Tensor, ...] = _Gather.apply(group, *tensors)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        size = dist.get_world_size(group)
        outs = tuple(x.new_empty((size, *x.shape)) for x in tensors)
        for out, x in zip(outs, tensors, strict=True):
            _all_gather(out.flatten(0, 1), x.contiguous(), group=group)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = []
        for n, grad in enumerate(grads):
            if not ctx.needs_input_grad[n + 1]:
                found.append(None)
                continue
            own = grad.new_empty(grad.shape[1:])
            _reduce_scatter(own, grad.contiguous().flatten(0, 1), group=ctx.group)
            found.append(own)
        return (None, *found)


def pass_on(group: ProcessGroup, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Send tensors to the next process; what it gives waits for those of the process before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    after, before = (dist.get_global_rank(group, (rank + n) % size) for n in (1, -1))
    sent = [x.contiguous() for x in tensors]
    coming = [torch.empty_like(x) for x in sent]
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, after, group) for x in sent]
        + [dist.P2POp(dist.irecv, x, before, group) for x in coming]
    )

    def wait() -> list[Tensor]:
        for each in work:
            each.wait()
        # `sent` must live until here.
        sent.clear()
        return coming

    return wait
