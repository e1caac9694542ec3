"""A layer of attention over a split sequence."""

from __future__ import annotations

from torch import Tensor

from ..filters import Filter
from ..nn import GaussianAttention, KernelAttention
from ..nn.checks import check_ids
from .smoother import smooth
from .split import Split
from .vicinity import vicinity


def attend(
    layer: KernelAttention | GaussianAttention,
    x: Tensor,
    split: Split,
    *,
    filter: Filter | None = None,
    token_ids: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """The part of this process of `layer(whole)`; collective.

    Args:
        x: the part of this process, [B, length / size, d_model].
        filter, token_ids, offset: as in the layer, of the whole sequence.
    """
    if not isinstance(layer, KernelAttention | GaussianAttention):
        raise ValueError(
            "a layer over a split sequence is a KernelAttention or a GaussianAttention, got "
            f"{type(layer).__name__}"
        )
    split.check(x, 1)
    tokens = None
    if isinstance(layer, KernelAttention) and layer.has_token_kernels:
        tokens = layer.tokens
    own = None if token_ids is None else split.cut(token_ids)
    if tokens is not None or layer.value_embedding is not None:
        own = check_ids(own, x, tokens, layer.value_embedding)
    places = split.places(x.device)
    if isinstance(layer, KernelAttention):
        parts = layer.parts(x, filter=filter, token_ids=own, offset=offset, places=places)
    else:
        parts = layer.parts(x, filter=filter, token_ids=own, places=places)
    q, k, v, seen = parts
    dropout_p = layer.dropout if layer.training else 0.0
    if tokens is None:
        out = smooth(
            layer.joined_kernel, q, k, v, split=split, filter=seen, backend=layer.backend,
            dropout_p=dropout_p,
        )  # fmt: skip
    else:
        assert token_ids is not None
        assert isinstance(layer, KernelAttention)
        taps = tokens.taps(token_ids, layer.layer)
        out = vicinity(
            q, k, v, split=split, key_taps=taps.keys, value_taps=taps.values,
            normalize=tokens.temperature, boundary=tokens.boundary, kernel=layer.joined_kernel,
            filter=seen, backend=layer.backend, dropout_p=dropout_p,
        )  # fmt: skip
    projected: Tensor = layer.out(out.transpose(1, 2).flatten(2))
    return projected
