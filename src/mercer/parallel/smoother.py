"""`smooth` for queries, keys and values that are split among processes."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ..filters import Filter, Full
from ..kernels import Kernel
from ..smoother import smooth as smooth_here
from ..term.features import Features, Input
from .filters import part
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
    q, k = Features.of(q), Features.of(k)
    for x in (*q.tensors(), *k.tensors(), v):
        split.check(x, 2)
    names = list(k)
    *parts, v = split.join_all([*k.tensors(), v], 2)
    k = Features(**dict(zip(names, parts, strict=True)))
    whole = Chunk(0, split.length)
    filter.check(v.shape[0], split.length, split.length)
    found = [
        smooth_here(
            kernel, q.rows(n * split.step, (n + 1) * split.step), k, v, backend=backend,
            filter=part(filter, chunk, whole, split.length), dropout_p=dropout_p,
            return_log_mass=True, places=(chunk.first, 0),
        )
        for n, chunk in enumerate(split.own)
    ]  # fmt: skip
    out, log_mass = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    return (out, log_mass) if return_log_mass else out
