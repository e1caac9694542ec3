"""The weights of attention as a tensor, [B, H, Q, K].

The output is linear in the values: out = P v. So P is what the layer's smoother gives for the
identity as values, for any kernel, filter and backend. Token kernels on values are a part of P.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..filters import Filter
from ..smoother import smooth
from ..term.features import Features
from ..tokenwise.vicinity import vicinity
from .attention import KernelAttention
from .cache import Cache, SegmentMemory
from .checks import check_ids
from .gaussian import GaussianAttention

# The most weights of one layer: 1 GiB in float32.
MOST = 2**28


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a layer's call gives to its smoother."""

    q: Features
    k: Features
    v: Tensor  # [B, h, K, V]
    filter: Filter
    smooth: Callable[[Tensor], Tensor]  # from values [B, h, K, C] to [B, H, Q, C]

    def columns(self, start: int, end: int) -> Tensor:
        """The weights of these keys, [B, H, Q, end - start]."""
        batch, heads, length = self.v.shape[:3]
        one = torch.zeros(length, end - start, dtype=self.v.dtype, device=self.v.device)
        one[start:end].fill_diagonal_(1)
        return self.smooth(one.expand(batch, heads, -1, -1))


def attention_weights(
    layer: KernelAttention | GaussianAttention,
    x: Tensor,
    context: Tensor | None = None,
    *,
    filter: Filter | None = None,
    cache: Cache | SegmentMemory | None = None,
    token_ids: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """P, [B, H, Q, K]: the layer's output before its projection is P v. Nothing is dropped.

    The arguments are those of the layer's `forward`. A cache or a memory is read and stays as it
    is.
    """
    call = read_call(
        layer, x, context, filter=filter, cache=cache, token_ids=token_ids, offset=offset
    )
    shape = (call.v.shape[0], layer.num_heads, x.shape[1], call.v.shape[2])
    count = shape[0] * shape[1] * shape[2] * shape[3]
    if count > MOST:
        raise ValueError(
            f"the weights of a layer would be {' x '.join(map(str, shape))} numbers, more than "
            f"{MOST:,}: give fewer or shorter sequences"
        )
    return call.columns(0, shape[3])


def read_call(
    layer: KernelAttention | GaussianAttention,
    x: Tensor,
    context: Tensor | None = None,
    *,
    filter: Filter | None = None,
    cache: Cache | SegmentMemory | None = None,
    token_ids: Tensor | None = None,
    offset: Tensor | None = None,
) -> Call:
    """The call of the smoother, on a copy of the cache."""
    cache = cache.copy() if isinstance(cache, Cache) else copy.copy(cache)
    kernel, backend = layer.joined_kernel, layer.backend
    mixed = isinstance(layer, KernelAttention) and layer.has_token_kernels
    tokens = layer.tokens if isinstance(layer, KernelAttention) and mixed else None
    if tokens is not None or layer.value_embedding is not None:
        keys = x if context is None else context
        token_ids = check_ids(token_ids, keys, tokens, layer.value_embedding)
        if isinstance(cache, SegmentMemory) and context is None:
            token_ids = cache.extend_ids(token_ids, getattr(layer, "reach", 0))
    if isinstance(layer, GaussianAttention):
        q, k, v, seen = layer.parts(x, filter=filter, cache=cache, token_ids=token_ids)
    else:
        q, k, v, seen = layer.parts(
            x, context, filter=filter, cache=cache, token_ids=token_ids, offset=offset
        )
    if tokens is None or token_ids is None:

        def run(values: Tensor) -> Tensor:
            return smooth(kernel, q, k, values, filter=seen, backend=backend)
    else:
        assert isinstance(layer, KernelAttention)
        if isinstance(cache, Cache) and context is None:
            token_ids = cache.extend_ids(token_ids)
        taps = tokens.taps(token_ids, layer.layer)

        def run(values: Tensor) -> Tensor:
            return vicinity(
                q, k, values, key_taps=taps.keys, value_taps=taps.values,
                normalize=tokens.temperature, boundary=tokens.boundary, kernel=kernel, filter=seen,
                backend=backend,
            )  # fmt: skip

    return Call(q=q, k=k, v=v, filter=seen, smooth=run)
