"""Positive numbers that a kernel learns: kept as logarithms, one, or one per head or dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# The most numbers that a kernel learns for its heads.
MOST = 2**20
Positive = float | Sequence[float] | Sequence[Sequence[float]] | Tensor


def log_of(name: str, given: Positive, heads: int | None, dim: int | None = None) -> Tensor:
    """The logarithms, checked: [] or [H], and with `dim`, [D] or [H, D]."""
    check_size("heads", heads or 1, MOST if dim is None else MOST // dim)
    own = () if dim is None else (dim,)
    each = "one number or one per head"
    if dim is not None:
        each = f"one number, {dim} of them or [H, {dim}]"
    try:
        x: Any = torch.as_tensor(given).detach()
    except (TypeError, ValueError, RuntimeError):
        x = None
    real = x is not None and not x.is_complex() and x.numel() > 0 and x.dim() <= 1 + len(own)
    if not (real and bool((x.isfinite() & (x > 0)).all())):
        raise ValueError(f"{name} must be positive and finite, {each}, got {given!r}")
    x = x.to(torch.get_default_dtype())
    if heads is None and x.dim() > len(own):
        heads = x.shape[0]
    shape = own if heads is None else (heads, *own)
    if any(a not in (1, b) for a, b in zip(reversed(x.shape), reversed(shape), strict=False)):
        raise ValueError(f"{name} must fit {list(shape)} numbers, got {list(x.shape)}")
    logs: Tensor = x.log().expand(shape).clone()
    return logs


def hold(kernel: nn.Module, name: str, x: Tensor, trainable: bool) -> None:
    """Register a tensor as a parameter, or as a buffer if it does not train."""
    if trainable:
        kernel.register_parameter(name, nn.Parameter(x))
    else:
        kernel.register_buffer(name, x)


def check_size(name: str, size: int, most: int) -> None:
    """Raise ValueError where a number of things is not a whole number from 1 to `most`."""
    if not isinstance(size, int) or isinstance(size, bool):
        raise ValueError(f"{name} must be a whole number, got {size!r}")
    if not 1 <= size <= most:
        bound = "at least 1" if size < 1 else f"at most {most}"
        raise ValueError(f"{name} must be {bound}, got {size}")


def check_heads(what: str, given: Tensor, heads: int) -> None:
    """Raise ValueError where numbers per head, in the first dimension, are not for these heads."""
    if given.dim() and given.shape[0] not in (1, heads):
        raise ValueError(
            f"the kernel has {what} for {given.shape[0]} heads, but the queries have {heads}"
        )
