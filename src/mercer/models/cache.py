"""The cache of a decoding model: one `mercer.nn.Cache` a layer, as a transformers Cache.

What this must meet: `generate` in all its modes, greedy, sampling, beams (which reorder sequences)
and rejected guesses (which crop); keys of any number of parts; token ids beside the keys; the
context of a translator, held once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from ..nn import Cache


class KernelCache(TransformersCache):
    """Keys and values of the layers' self-attention, and of a context where there is one."""

    def __init__(self, num_layers: int, *, cross: bool = False) -> None:
        super().__init__(layers=[])
        self.each = [Cache() for _ in range(num_layers)]
        self.cross = [Cache() for _ in range(num_layers)] if cross else []

    def __len__(self) -> int:
        return len(self.each)

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        """How many tokens are cached."""
        return self.each[layer_idx].length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length(layer_idx) + new, 0

    def reset(self) -> None:
        """Forget everything."""
        self.each = [Cache() for _ in self.each]
        self.cross = [Cache() for _ in self.cross]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select sequences by index, as beam search does."""
        for cache in (*self.each, *self.cross):
            if cache.length:
                cache.reorder(beam_idx.to(cache.values.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for cache in (*self.each, *self.cross):
            if cache.length:
                values = cache.values
                rows = torch.arange(values.shape[0], device=values.device)
                cache.reorder(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -n places; a positive number is the length that stays."""
        seen = self.get_seq_length()
        length = tokens_to_remove if tokens_to_remove > 0 else seen + tokens_to_remove
        if length < 0:
            raise ValueError(f"the cache holds {seen} places, so {-tokens_to_remove} cannot go")
        for cache in (*self.each, *self.cross):
            if length < cache.places:
                cache.crop(length)

    @property
    def batch_size(self) -> int:
        return self.each[0].values.shape[0] if self.each and self.each[0].length else -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return any(cache.length for cache in self.each)

    def __repr__(self) -> str:
        return f"KernelCache({len(self)} layers, {self.get_seq_length()} places)"
