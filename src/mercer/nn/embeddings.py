"""Embeddings t of positions: sinusoids, or learned vectors; and those that are added to values."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..term.sinusoids import sinusoid


class Sinusoid(nn.Module):
    """t_i: sines and cosines of i at P/2 frequencies, interleaved."""

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        check_base(base)
        self.base = base
        self.dim = 0

    def setup(self, dim: int) -> None:
        self.dim = dim

    def forward(self, places: Tensor) -> Tensor:
        if self.dim % 2:
            raise ValueError(f"a sinusoid needs an even width, got {self.dim}")
        return sinusoid(places, self.dim, self.base, torch.float64)  # [T or B, T, dim]


class Learned(nn.Module):
    """t_i: one learned vector for each place."""

    def __init__(self, max_length: int = 1024) -> None:
        super().__init__()
        check_whole(max_length=max_length)
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.max_length = max_length

    def setup(self, dim: int) -> None:
        self.weight = nn.Parameter(torch.randn(self.max_length, dim) * 0.02)

    def forward(self, places: Tensor) -> Tensor:
        last = last_place(places)
        if last is not None and last >= self.max_length:
            raise ValueError(
                f"Learned has {self.max_length} places, got place {last}; raise max_length"
            )
        return self.weight[places]


def embedder(given: Sinusoid | Learned | None) -> Sinusoid | Learned:
    """The embedding itself, or a sinusoid where none is given."""
    if given is not None and not isinstance(given, Sinusoid | Learned):
        raise ValueError(f"embedding must be Sinusoid or Learned, got {type(given).__name__}")
    return Sinusoid() if given is None else given


def embed_values(count: int | None, width: int) -> nn.Embedding | None:
    """A learned vector for each token, to be added to its value; None without a number of them."""
    if count is not None and count < 1:
        raise ValueError(f"value_vocab must be at least 1, got {count}")
    return None if count is None else nn.Embedding(count, width)


def check_base(base: float) -> None:
    """Raise ValueError for a base of frequencies that is not a positive finite number."""
    if not (isinstance(base, int | float) and math.isfinite(base) and base > 0):
        raise ValueError(f"base must be a positive finite number, got {base!r}")


def check_whole(**sizes: object) -> None:
    """Raise ValueError for a size that is not a whole number."""
    for name, size in sizes.items():
        if not isinstance(size, int):
            raise ValueError(f"{name} must be a whole number, got {size!r}")


def in_heads(t: Tensor, projection: nn.Linear, heads: int, dtype: torch.dtype) -> Tensor:
    """t W in heads, [B, H, T, D]; B is 1 if the positions are the same for the whole batch."""
    t = projection(t.to(projection.weight.dtype)).to(dtype)
    t = t.unflatten(-1, (heads, -1)).transpose(-3, -2)
    return t if t.dim() == 4 else t[None]


def last_place(places: Tensor) -> int | None:
    """The largest place; None where data cannot be read: in a graph or on the meta device."""
    known = places.numel() and not torch.compiler.is_compiling() and places.device.type != "meta"
    if not known:
        return None
    return int(places[-1] if places.dim() == 1 else places.max())
