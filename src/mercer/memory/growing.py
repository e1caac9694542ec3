"""A tensor that grows at its end, so that a step of decoding does not copy the whole cache."""

from __future__ import annotations

import torch
from torch import Tensor

# A new buffer has this share of its length in reserve, and at least LEAST places.
SPARE, LEAST = 0.25, 64


class _Buffer:
    """Memory that several `Growing` may share; places from `used` on are free."""

    def __init__(self, whole: Tensor, used: int) -> None:
        self.whole, self.used = whole, used


class Growing:
    """The first places of a buffer along one dimension.

    Written places never change. An append goes to free places of the buffer, or to a new buffer if
    another `Growing` has used them. So copies and cropped caches can continue independently. With
    gradients, and in compiled graphs, an append is a plain concatenation.
    """

    def __init__(self, x: Tensor, dim: int) -> None:
        self.dim, self.length = dim, x.shape[dim]
        self._buffer = _Buffer(x, self.length)

    @property
    def tensor(self) -> Tensor:
        whole = self._buffer.whole
        return whole if whole.shape[self.dim] == self.length else self._first(self.length)

    def append(self, x: Tensor) -> None:
        """Append x; other dimensions of size 1 are expanded."""
        before, dim = self.tensor, self.dim
        shape = [max(a, b) for a, b in zip(before.shape, x.shape, strict=True)]
        shape[dim] = before.shape[dim] + x.shape[dim]
        tracked = torch.is_grad_enabled() and (before.requires_grad or x.requires_grad)
        if tracked or before.dtype != x.dtype or torch.compiler.is_compiling():
            self._buffer = _Buffer(_joined(before, x, dim, shape), shape[dim])
        else:
            if not self._has_room(shape):
                self._move(shape)
            new = self._buffer.whole.narrow(dim, self.length, x.shape[dim])
            new.copy_(x.detach())
            self._buffer.used = shape[dim]
        self.length = shape[dim]

    def crop(self, length: int) -> None:
        """Keep the first places only."""
        self.length = min(self.length, length)

    def reorder(self, index: Tensor) -> None:
        """Keep these of the first dimension, in this order."""
        x = self.tensor[index]
        self._buffer = _Buffer(x, self.length)

    def _first(self, length: int) -> Tensor:
        return self._buffer.whole.narrow(self.dim, 0, length)

    def _has_room(self, shape: list[int]) -> bool:
        buffer, whole, dim = self._buffer, self._buffer.whole, self.dim
        # Tensors made in inference mode may be written in that mode only.
        mine = torch.is_inference_mode_enabled() or not whole.is_inference()
        same = [a == b for a, b in zip(whole.shape, shape, strict=True)]
        del same[dim]
        return (
            mine
            and all(same)
            and not whole.requires_grad
            and buffer.used == self.length
            and whole.shape[dim] >= shape[dim]
        )

    def _move(self, shape: list[int]) -> None:
        """Copy to a new buffer with room for this shape and a reserve."""
        before = self.tensor.detach()
        roomy = list(shape)
        roomy[self.dim] += max(LEAST, int(SPARE * shape[self.dim]))
        first = list(shape)
        first[self.dim] = self.length
        whole = before.new_empty(roomy)
        self._buffer = _Buffer(whole, self.length)
        self._first(self.length).copy_(before.expand(first))


def _joined(before: Tensor, x: Tensor, dim: int, shape: list[int]) -> Tensor:
    sizes = [-1 if n == dim else size for n, size in enumerate(shape)]
    return torch.cat([before.expand(sizes), x.expand(sizes)], dim)
