"""How tensors lie in memory, and what TMA can read of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..runtime.device import INTERPRETED, has_tma
from .codes import SPLIT_QUERIES


def next_power_of_two(width: int) -> int:
    """The features of a block: a power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def strides_of(x: Tensor, batch: int) -> tuple[int, int, int]:
    """The strides of batch, head and place. A batch of 1 has stride 0."""
    if x.dim() < 3:
        return 0, 0, 0
    b = 0 if x.shape[0] == 1 and batch > 1 else x.stride(0)
    return b, x.stride(1), x.stride(2)


def expanded(x: Tensor, *shape: int) -> Tensor:
    """x expanded to a shape. x itself if it fits, since a view would add a backward."""
    return x if x.shape == shape else x.expand(shape)


def readable_rows(x: Tensor) -> Tensor:
    """x with features side by side in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned_copy(x: Tensor, tokens: bool = False) -> Tensor:
    """x contiguous, head by head or token by token, from an address divisible by 16 on."""
    if tokens:
        return aligned_copy(x.transpose(1, 2)).transpose(1, 2)
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def empty(like: Tensor, batch: int, heads: int, length: int, width: int, tokens: bool) -> Tensor:
    """[B, H, T, width], head by head or token by token in memory."""
    if tokens:
        return like.new_empty(batch, length, heads, width).transpose(1, 2)
    return like.new_empty(batch, heads, length, width)


def by_tokens(x: Tensor) -> bool:
    """Whether [B, H, T, D] lies token by token in memory. For few queries it does not matter."""
    if x.shape[1] == 1 or x.shape[2] <= SPLIT_QUERIES:
        return False
    # Dynamo does not compare strides that depend on a length.
    compiling = torch.compiler.is_compiling()
    return not x.is_contiguous() if compiling else x.stride(1) < x.stride(2)


def tma_readable(x: Tensor) -> bool:
    """Whether TMA can read x: the address and all strides are divisible by 16 bytes."""
    if not (INTERPRETED or has_tma(x.device)) or x.data_ptr() % 16 or x.dim() != 4:
        return False
    size = x.dtype.itemsize
    strides = zip(x.stride()[:3], x.shape[:3], strict=True)
    return all(d == 1 or (s > 0 and s * size % 16 == 0) for s, d in strides)


def tma_descriptor(x: Tensor, rows: int, width: int) -> Any:
    """A TMA descriptor of x in blocks of [rows, width]. `tma_readable` holds for x."""
    return described(_descriptor(), x, rows, width)


def described(cls: Any, x: Tensor, rows: int, width: int) -> Any:
    """A descriptor of a class of Triton's; one of Gluon needs a layout, too."""
    shape, (b, h, t, _) = list(x.shape), x.stride()
    found = object.__new__(cls)
    # The constructor only checks, and takes longer than all this. `tma_readable` has checked.
    found.base, found.shape, found.block_shape = x, shape, [1, 1, rows, width]
    # The stride of a dimension of 1 is never used, but must be divisible by 16 bytes.
    found.strides = [
        b if shape[0] > 1 else 16, h if shape[1] > 1 else 16, t if shape[2] > 1 else 16, 1
    ]  # fmt: skip
    return found


@lru_cache(maxsize=1)
def _descriptor() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor
