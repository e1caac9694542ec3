"""What attention remembers: keys and values for decoding, hidden states for Transformer-XL."""

from __future__ import annotations

import torch
from torch import Tensor

from ..features import Features


class Cache:
    """Keys and values of everything seen so far, for one layer.

    With it, step by step decoding equals the full pass. A segment (see `Memory`) starts where the
    cache starts, or at the last call of `new_segment`.
    """

    def __init__(self) -> None:
        self._keys: dict[str, Tensor] = {}
        self._values: Tensor | None = None
        self.start = 0

    @property
    def length(self) -> int:
        return 0 if self._values is None else self._values.shape[2]

    @property
    def keys(self) -> Features:
        return Features(**self._keys)

    @property
    def values(self) -> Tensor:
        if self._values is None:
            raise ValueError("the cache is empty")
        return self._values

    def append(self, keys: Features, values: Tensor) -> None:
        if self._values is None:
            self._keys, self._values = dict(keys.items()), values
            return
        if values.shape[0] != self._values.shape[0]:
            raise ValueError(
                f"the cache holds {self._values.shape[0]} sequences, but {values.shape[0]} came"
            )
        self._keys = {n: torch.cat([self._keys[n], x], 2) for n, x in keys.items()}
        self._values = torch.cat([self._values, values], 2)

    def new_segment(self) -> None:
        """What comes next is a new segment; all before it is memory."""
        self.start = self.length

    def crop(self, length: int) -> None:
        """Forget all but the first places, as after rejected guesses."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be from 0 to {self.length}, but came as {length}")
        if self._values is not None:
            self._keys = {n: x[:, :, :length] for n, x in self._keys.items()}
            self._values = self._values[:, :, :length]

    def reorder(self, index: Tensor) -> None:
        """Keep these sequences in this order, as beam search asks."""
        if self._values is not None:
            self._keys = {n: x[index] if x.shape[0] > 1 else x for n, x in self._keys.items()}
            self._values = self._values[index]


class SegmentMemory:
    """The hidden states of the last `length` places, without gradient (Transformer-XL)."""

    def __init__(self, length: int) -> None:
        if length < 0:
            raise ValueError(f"length must be at least 0, but came as {length}")
        self.capacity = length
        self.seen = 0
        self._states: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self._states is None else self._states.shape[1]

    def extend(self, x: Tensor) -> Tensor:
        """The memory and then x, [B, M + T, C]; x joins the memory for the next segment."""
        if self._states is not None and self._states.shape[0] != x.shape[0]:
            raise ValueError(
                f"the memory holds {self._states.shape[0]} sequences, but {x.shape[0]} came"
            )
        whole = x if self._states is None else torch.cat([self._states, x], 1)
        self._states = whole[:, max(whole.shape[1] - self.capacity, 0) :].detach()
        self.seen += x.shape[1]
        return whole
