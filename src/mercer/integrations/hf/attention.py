"""The attention function that transformers calls in a patched model, and its registration.

One name stands for two functions: `attend`, and `see` for the masks. Without the second,
transformers would give no mask at all, and padding and packing would be ignored in silence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .layers import ADDED
from .masks import read, see
from .weights import are_wanted

# Transformers searches names for "flash", "sdpa", "flex_attention" and "/".
NAME = "mercer"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """[B, H, T, D] -> [B, T, H, D], with the weights where `output_attentions` asks for them."""
    host = getattr(module, "mercer", None)
    if host is None:
        raise ValueError(
            f"{type(module).__name__} was not patched: the name {NAME!r} of attention is set by "
            "mercer.integrations.hf.patch(model)"
        )
    for name, what in ADDED.items():
        if options.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} cannot be patched: it {what} ({name}), which a kernel of "
                "queries and keys does not have"
            )
    if options.get("cache") is not None:
        raise ValueError(
            "a patched model has no continuous batching: its keys come in pages of many requests, "
            "which Mercer does not read; use generate"
        )
    seen = read(attention_mask, module, is_causal, query.shape[2], key.shape[2])
    if seen.length is not None:
        key, value = key[:, :, : seen.length], value[:, :, : seen.length]
    out, weights = host(
        query, key, value, seen=seen, scaling=scaling, dropout_p=dropout,
        token_ids=options.get("token_ids"), weights=are_wanted(options),
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, see)
