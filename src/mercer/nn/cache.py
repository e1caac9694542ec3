"""State between calls: keys and values for decoding, hidden states for Transformer-XL."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..filters import Causal, Filter, Memory
from ..filters.placed import place
from ..filters.places import Places
from ..memory.growing import Growing
from ..term.features import Features
from ..tokenwise.decoding import Convolved


class Cache:
    """Keys and values of all tokens so far, for one layer.

    Step by step decoding with it equals the full pass. A segment (see `Memory`) starts where the
    cache starts, or at the last call of `new_segment`. In cross-attention the keys and values are
    those of the context and do not grow; the cache counts the queries.
    """

    def __init__(self) -> None:
        self._keys: dict[str, Growing] = {}
        self._values: Growing | None = None
        # Token kernels mix a key with later ones. So the cache holds the unmixed keys and their
        # ids, and the mixed keys that later keys cannot change.
        self._token_ids: Growing | None = None  # [B, K]
        self.convolved = Convolved()
        self.start = 0
        self.asked: int | None = None

    @property
    def length(self) -> int:
        """How many keys there are."""
        return 0 if self._values is None else self._values.length

    @property
    def places(self) -> int:
        """The place of the next query."""
        return self.length if self.asked is None else self.asked

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        held = [x.tensor for x in (*self._keys.values(), self._values) if x is not None]
        held += [x for x in (self.convolved.keys, self.convolved.values) if x is not None]
        return sum(x.numel() for x in held)

    @property
    def keys(self) -> Features:
        shared = self._values is not None and not self._keys
        if shared:
            return Features(content=self.values)
        return Features(**{name: x.tensor for name, x in self._keys.items()})

    @property
    def values(self) -> Tensor:
        if self._values is None:
            raise ValueError("the cache is empty")
        return self._values.tensor

    def append(self, keys: Features | None, values: Tensor) -> None:
        """Append keys and values; None: the values are the keys."""
        parts = {} if keys is None else dict(keys.items())
        if self._values is None:
            self._keep(parts, values)
            return
        if values.shape[0] != self.values.shape[0]:
            raise ValueError(
                f"the cache holds {self.values.shape[0]} sequences, got {values.shape[0]}"
            )
        for name, x in parts.items():
            self._keys[name].append(x)
        self._values.append(values)

    def _keep(self, keys: dict[str, Tensor], values: Tensor) -> None:
        self._keys = {name: Growing(x, 2) for name, x in keys.items()}
        self._values = Growing(values, 2)

    def extend_ids(self, token_ids: Tensor) -> Tensor:
        """Append these ids and return those of all tokens so far, [B, K]."""
        if self._token_ids is None:
            self._token_ids = Growing(token_ids, 1)
        else:
            self._token_ids.append(token_ids)
        if self._token_ids.length != self.length:
            raise ValueError(
                f"the cache holds {self.length} keys, but the ids of {self._token_ids.length} "
                "tokens: token kernels need the ids of all keys"
            )
        return self._token_ids.tensor

    def copy(self) -> Cache:
        """The same keys and values in a cache that continues independently."""
        other = copy.copy(self)
        other._keys = {name: Growing(x.tensor, x.dim) for name, x in self._keys.items()}
        for name in ("_values", "_token_ids"):
            held: Growing | None = getattr(self, name)
            setattr(other, name, None if held is None else Growing(held.tensor, held.dim))
        # Computed again from the keys.
        other.convolved = Convolved()
        return other

    def hold(self, keys: Features, values: Tensor) -> None:
        """Set the keys and values of a context, which do not grow."""
        self._keep(dict(keys.items()), values)
        self.asked = 0

    def new_segment(self) -> None:
        """Start a new segment; all before it is memory."""
        self.start = self.places

    def crop(self, length: int) -> None:
        """Keep only the first `length` places, as after rejected guesses of assisted decoding."""
        if not 0 <= length <= self.places:
            raise ValueError(f"length must be from 0 to {self.places}, got {length}")
        self.start = min(self.start, length)
        if self.asked is not None:
            self.asked = length
        elif self._values is not None:
            for x in (*self._keys.values(), self._values, self._token_ids):
                if x is not None:
                    x.crop(length)
            self.convolved.crop(length)

    def reorder(self, index: Tensor) -> None:
        """Select sequences by index, as beam search does."""
        if self._values is not None:
            count = self.values.shape[0]
            for x in (*self._keys.values(), self._values, self._token_ids):
                # A part with batch 1 is the same for all sequences.
                if x is not None and x.tensor.shape[0] == count:
                    x.reorder(index)
            self.convolved.reorder(index)


class SegmentMemory:
    """The hidden states of the last `length` places, without gradient (Transformer-XL).

    A layer with token kernels also keeps the few states before them that the taps read.
    """

    def __init__(self, length: int) -> None:
        if not isinstance(length, int) or length < 0:
            raise ValueError(f"length must be a whole number >= 0, got {length!r}")
        self.capacity = length
        self.seen = 0
        self._states: Tensor | None = None
        self._token_ids: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self._states is None else self._states.shape[1]

    def extend(self, x: Tensor, reach: int = 0) -> Tensor:
        """The memory followed by x, [B, M + T, C]; then x is added to the memory.

        `reach` is how many places before a key its taps read.
        """
        if self._states is not None and self._states.shape[0] != x.shape[0]:
            raise ValueError(
                f"the memory holds {self._states.shape[0]} sequences, got {x.shape[0]}"
            )
        whole = x if self._states is None else torch.cat([self._states, x], 1)
        self._states = self._last(whole, reach).detach()
        self.seen += x.shape[1]
        return whole

    def extend_ids(self, token_ids: Tensor, reach: int = 0) -> Tensor:
        """The same for token ids, [B, M + T]."""
        known = self._token_ids
        whole = token_ids if known is None else torch.cat([known, token_ids], 1)
        self._token_ids = self._last(whole, reach)
        return whole

    def visible(self, filter: Filter, whole: Tensor, new: int) -> Filter:
        """The filter of the sequence for the states that `extend` gave; queries are the new."""
        num_keys = whole.shape[1]
        if num_keys > self.capacity + new:
            shown = Memory(self.capacity)
            filter = shown if isinstance(filter, Causal) else filter & shown
        places = Places(self.seen - new, self.seen - num_keys, new, num_keys)
        return filter if places.usual else place(filter, places, whole.device)

    def _last(self, whole: Tensor, reach: int) -> Tensor:
        return whole[:, max(whole.shape[1] - self.capacity - reach, 0) :]
