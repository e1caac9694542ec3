"""Checks of the arguments of attention layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..filters import Filter
from ..filters.base import can_read
from ..kernels import Kernel
from .cache import Cache, SegmentMemory
from .tokens import TokenKernels


def check_sizes(
    d_model: int, num_heads: int, num_kv_heads: int, head_dim: int | None, context_dim: int
) -> None:
    """Raise ValueError for sizes that do not fit together."""
    sizes = {"d_model": d_model, "num_heads": num_heads, "context_dim": context_dim}
    sizes |= {} if head_dim is None else {"head_dim": head_dim}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if head_dim is None and d_model % num_heads:
        raise ValueError(f"d_model {d_model} does not divide into {num_heads} heads")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}")


def check_parts(value: object, kernel: object) -> None:
    """Raise ValueError for an unknown value function, or a kernel that is not a Kernel."""
    if value not in ("content", "content+position"):
        raise ValueError(f"value must be 'content' or 'content+position', got {value!r}")
    if kernel is not None and not isinstance(kernel, Kernel):
        raise ValueError(f"kernel must be a Kernel, got {type(kernel).__name__}")


# What a layer makes of its arguments, and what to do instead of assigning it.
FIXED = {
    "position": "its parameters have the sizes of the layer; make a new layer with position=...",
    "joined_kernel": "it follows from the kernel and the position; assign kernel",
}


def check_assigned(layer: nn.Module, name: str, value: object) -> None:
    """Raise ValueError for an attribute of a layer that cannot be replaced by this value."""
    if name == "kernel" and not isinstance(value, Kernel):
        raise ValueError(f"kernel must be a Kernel, got {type(value).__name__}")
    if name in FIXED and hasattr(layer, name):
        raise ValueError(f"{name} cannot be assigned: {FIXED[name]}")


def check_symmetric(num_heads: int, num_kv_heads: int, d_model: int, context_dim: int) -> None:
    """Raise ValueError where queries and keys cannot share one projection."""
    if num_kv_heads != num_heads or context_dim != d_model:
        raise ValueError(
            "symmetric=True has one projection for queries and keys, so num_kv_heads must be "
            f"{num_heads} and context_dim {d_model}, got {num_kv_heads} and {context_dim}"
        )


def check_tokens(tokens: object, num_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError for token kernels that do not fit the heads."""
    if tokens is None:
        return
    if not isinstance(tokens, TokenKernels):
        raise ValueError(f"tokens must be TokenKernels, got {type(tokens).__name__}")
    if tokens.heads not in (None, 1, num_kv_heads, num_heads):
        raise ValueError(
            f"tokens has kernels for {tokens.heads} heads, but the layer has {num_heads}, "
            f"and {num_kv_heads} for keys and values"
        )


def check_ids(
    token_ids: Tensor | None,
    x: Tensor,
    tokens: TokenKernels | None,
    embedding: nn.Embedding | None,
) -> Tensor:
    """The ids of the tokens of x, or ValueError."""
    if token_ids is None:
        what = "token kernels" if tokens is not None else "value embeddings"
        raise ValueError(f"this layer has {what} and needs token_ids [B, T], got None")
    if tokens is not None:
        tokens.check(token_ids)
    if x.dim() == 3 and token_ids.shape != x.shape[:2]:
        raise ValueError(
            f"token_ids must be {list(x.shape[:2])}, as the keys are, got {list(token_ids.shape)}"
        )
    if embedding is not None:
        _check_embedded(token_ids, embedding.num_embeddings)
    return token_ids


def _check_embedded(token_ids: Tensor, count: int) -> None:
    if token_ids.is_floating_point() or token_ids.dtype == torch.bool:
        raise ValueError(f"token_ids must be whole numbers, got {token_ids.dtype}")
    # Reading the ids would synchronise with a GPU.
    if token_ids.is_cpu and can_read(token_ids) and token_ids.numel():
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= count:
            raise ValueError(
                f"token_ids must be from 0 to {count - 1} for the value embeddings, "
                f"but reach from {low} to {high}"
            )


def check_inputs(
    x: Tensor, context: Tensor | None, cache: object, d_model: int, context_dim: int
) -> None:
    """Raise ValueError for inputs of the wrong shape or type."""
    if x.dim() != 3 or x.shape[-1] != d_model:
        raise ValueError(f"x must be [B, T, {d_model}], got {list(x.shape)}")
    if context is not None and (context.dim() != 3 or context.shape[-1] != context_dim):
        raise ValueError(f"context must be [B, T, {context_dim}], got {list(context.shape)}")
    if context is None and context_dim != d_model:
        raise ValueError(f"this module attends to a context of width {context_dim}; none was given")
    if cache is not None and not isinstance(cache, Cache | SegmentMemory):
        raise ValueError(f"cache must be a Cache or a SegmentMemory, got {type(cache).__name__}")


def check_steps(kernel: Kernel, filter: Filter) -> None:
    """Raise ValueError where cross-attention cannot be decoded step by step.

    The last query is aligned with the last key, so i - j would change with every step.
    """
    if kernel.relative:
        raise ValueError(
            "this kernel depends on i - j, which cross-attention cannot decode step by step; "
            "use NoPosition, DirectSum or ProductKernel, and a kernel of the features alone"
        )
    if not filter.same_for_all:
        raise ValueError(
            "cross-attention with a cache needs a filter that is the same for all queries, "
            f"such as Full() or Padding(lengths), got {filter}"
        )
