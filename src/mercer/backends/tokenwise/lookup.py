"""The lookup of taps by token, with a deterministic gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...opaque.operators import fake, learns, operator
from ..runtime.device import INSTALLED, INTERPRETED
from ..runtime.launch import start
from .launch import readable
from .taps import sum_by_id

# How many programs look for the largest gradient.
PROGRAMS = 64


def gather(table: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """table[ids] for each target, [B, T, H, S] each, of a table [vocab, targets, H, S]."""
    if torch.compiler.is_compiling():
        return tuple(gather_taps(table, ids))
    found: tuple[Tensor, ...] = _Gather.apply(table, ids)
    return found


def _take(table: Tensor, ids: Tensor) -> list[Tensor]:
    # Faster than table[ids], which takes any number of indices.
    found = table.index_select(0, ids.reshape(-1)).view(*ids.shape, *table.shape[1:])
    return list(found.unbind(2))


def _sum(grads: list[Tensor], ids: Tensor, count: int) -> Tensor:
    """The gradient of a table of so many rows."""
    single = grads[0].dtype != torch.float64
    if single and ids.numel() and INSTALLED and (ids.is_cuda or INTERPRETED):
        return sum_exactly(grads, ids, count)
    return sum_by_id(torch.stack(grads, 2).flatten(0, 1), ids.flatten(), count)


class _Gather(torch.autograd.Function):
    """The lookup outside of compiled graphs."""

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
    """The lookup for compiled graphs."""
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


def sum_exactly(grads: list[Tensor], ids: Tensor, vocab: int) -> Tensor:
    """The gradient of a table [vocab, targets, H, S] from those of its rows, [B, T, H, S] each.

    Sums are of integers (fixed point), so they do not depend on the order and need no sorting.
    """
    from .kernels import lookup

    first, last, ids = (readable(x.contiguous()) for x in (grads[0], grads[-1], ids))
    count, rows, targets = first.numel(), ids.numel(), len(grads)
    out = first.new_empty(vocab, targets, *first.shape[2:])
    cells = out.numel()
    sums = ids.new_empty(cells, dtype=torch.int64)
    peaks = first.new_empty(PROGRAMS, dtype=torch.float32)
    # All rows may add to one sum, which must stay below 2^62.
    bits = 62 - (rows - 1).bit_length()
    start(
        lookup.clear, (PROGRAMS, 1, 1), {"TARGETS": targets, "BM": 1024}, (first, last, peaks, sums),
        (count, cells),
    )  # fmt: skip
    start(
        lookup.scatter, (-(-count // 256), 1, 1), {"TARGETS": targets, "PROGRAMS": PROGRAMS, "BM": 256},
        (first, last, ids, peaks, sums), (count, count // rows, bits),
    )  # fmt: skip
    start(
        lookup.gathered, (-(-cells // 1024), 1, 1), {"PROGRAMS": PROGRAMS, "BM": 1024}, (peaks, sums, out),
        (cells, bits),
    )  # fmt: skip
    return out
