"""A tensor that grows at its end: a step of decoding must not copy all that a cache has seen."""

from __future__ import annotations

import torch
from torch import Tensor

# What a new buffer has in reserve: this part of its length, and at least so many places.
SPARE, LEAST = 0.25, 64


class _Buffer:
    """Memory that several `Growing` may begin in; beyond `used` it is nobody's yet."""

    def __init__(self, whole: Tensor, used: int) -> None:
        self.whole, self.used = whole, used


class Growing:
    """The first places of a buffer along one dimension.

    What is there never changes: what is appended is written behind it where nobody has written yet,
    else to a new buffer. So copies, and what was cropped, may go on in different ways. Gradients,
    and graphs that are compiled, go through a plain concatenation.
    """

    def __init__(self, x: Tensor, dim: int) -> None:
        self.dim, self.length = dim, x.shape[dim]
        self._buffer = _Buffer(x, self.length)

    @property
    def tensor(self) -> Tensor:
        whole = self._buffer.whole
        return whole if whole.shape[self.dim] == self.length else self._first(self.length)

    def append(self, x: Tensor) -> None:
        """x after what is there; a dimension of 1 on one side is that of the other."""
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
        """Forget all but the first places."""
        self.length = min(self.length, length)

    def reorder(self, index: Tensor) -> None:
        """Keep these of the first dimension, in this order."""
        x = self.tensor[index]
        self._buffer = _Buffer(x, self.length)

    def _first(self, length: int) -> Tensor:
        return self._buffer.whole.narrow(self.dim, 0, length)

    def _has_room(self, shape: list[int]) -> bool:
        buffer, whole, dim = self._buffer, self._buffer.whole, self.dim
        # What inference mode made may only be written there, and what has a gradient nowhere.
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
        """To a buffer with room for this shape and to spare."""
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
