"""`smooth` for queries, keys and values that are split among processes."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ..dispatch.problem import check_options, prepare
from ..filters import Filter, Full
from ..kernels import Kernel
from ..smoother import solve as solve_here
from ..term.features import Features, Input
from ..term.mix import Smoothed
from .filters import part
from .ring import mix_rows, ring
from .split import Chunk, Split


@overload
def smooth(
    kernel: Kernel, q: Input, k: Input, v: Tensor, *, split: Split, filter: Filter = ...,
    backend: str = ..., dropout_p: float = ..., return_log_mass: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def smooth(
    kernel: Kernel, q: Input, k: Input, v: Tensor, *, split: Split, filter: Filter = ...,
    backend: str = ..., dropout_p: float = ..., return_log_mass: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def smooth(
    kernel: Kernel,
    q: Input,
    k: Input,
    v: Tensor,
    *,
    split: Split,
    filter: Filter = Full(),
    backend: str = "auto",
    dropout_p: float = 0.0,
    return_log_mass: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The rows of this process of `mercer.smooth` over the whole sequence; collective.

    Args:
        q, k, v: the part of this process, as `split.cut` gives it, [B, H, length / size, D].
        split: which tokens that is.
        filter: that of the whole sequence, such as Causal() or Documents with all ids.
        kernel, backend, dropout_p, return_log_mass: as in `mercer.smooth`.
    """
    q, k, v = read(q, k, v, split, filter, backend, dropout_p)
    with torch.autocast(v.device.type, enabled=False):
        found = solve(kernel, q, k, v, split, filter, backend, dropout_p, return_log_mass)
    if not return_log_mass:
        return found.out
    assert found.log_mass is not None
    return found.out, found.log_mass


def read(
    q: Input, k: Input, v: Tensor, split: Split, filter: Filter, backend: str, dropout_p: float
) -> tuple[Features, Features, Tensor]:
    """The inputs of a call, checked, in the dtype of autocast."""
    if not isinstance(split, Split):
        raise ValueError(f"split must be a Split, got {type(split).__name__}")
    check_options(filter, backend, dropout_p)
    q, k = Features.of(q), Features.of(k)
    for x in (*q.tensors(), *k.tensors(), v):
        split.check(x, 2)
    filter.check(v.shape[0], split.length, split.length)
    return lowered(q, k, v)


def lowered(q: Features, k: Features, v: Tensor) -> tuple[Features, Features, Tensor]:
    """In the dtype of autocast, if that is on."""
    device = v.device.type
    if not torch.is_autocast_enabled(device) or v.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def solve(
    kernel: Kernel,
    q: Features,
    k: Features,
    v: Tensor,
    split: Split,
    filter: Filter,
    backend: str,
    dropout_p: float,
    log_mass: bool,
) -> Smoothed:
    """The rows of this process, to mix with others."""
    if split.exchange == "ring":
        if dropout_p:
            raise ValueError(
                f"a ring drops no weights, but dropout_p is {dropout_p}: take exchange='gather'"
            )
        return ring(kernel, q, k, v, split, filter, backend)
    names, whole = list(k), Chunk(0, split.length)
    *parts, v = split.join_all([*k.tensors(), v], 2)
    k, found = Features(**dict(zip(names, parts, strict=True))), []
    for n, chunk in enumerate(split.own):
        rows = q.rows(*split.rows(n))
        seen = part(filter, chunk, whole)
        problem = prepare(kernel, rows, k, v, seen, dropout_p, log_mass, backend, (chunk.first, 0))
        found.append(solve_here(problem, backend))
    if not log_mass:
        return Smoothed(torch.cat([each.out for each in found], 2), None)
    out, mass, sign = mix_rows([[each] for each in found])
    return Smoothed(out, mass, None if kernel.positive else sign)
