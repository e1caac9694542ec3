"""The language model: a decoder with any kernel, position, value function and filter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ..filters import Filter, Fixed, Window
from ..filters.base import Joined
from ..nn import SegmentMemory, layer_windows
from .adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from .base import KernelModel, check_ids, make_input_position, read_mask, scale_of
from .block import Block, make_norm, norm_of
from .cache import KernelCache
from .config import KernelLMConfig, token_kernels
from .parts import Place, join


class KernelLM(KernelModel, GenerationMixin):
    """log p(token | tokens before it), for any attention; no token sees a later one.

    `forward` takes what every causal language model of transformers takes, and `memory`, a list
    from `new_memory`, for segments that see the states of the segments before them.
    """

    config: KernelLMConfig
    config_class = KernelLMConfig
    _tied_weights_keys = {"head.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self, config: KernelLMConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self.embed: nn.Embedding | AdaptiveEmbedding
        self.head: nn.Linear | AdaptiveSoftmax
        sizes = config.vocab_size, config.d_model
        if config.cutoffs is None:
            self.embed, self.head = nn.Embedding(*sizes), nn.Linear(*reversed(sizes), bias=False)
        else:
            self._tied_weights_keys = {}
            self.embed = AdaptiveEmbedding(*sizes, config.cutoffs, config.div)
            self.head = AdaptiveSoftmax(
                *sizes, config.cutoffs, config.div, tied=config.tie_word_embeddings
            )
        self.input_position = make_input_position(
            config.input_position, config.d_model, config.context_length
        )
        layers = config.layer_parts()
        self.token_kernels = token_kernels(layers, config.vocab_size)
        windows = _windows(config)
        blocks = []
        for n, parts in enumerate(layers):
            embeds = config.value_embeddings and n % 2 == (config.num_layers - 1) % 2
            place = Place(
                d_model=config.d_model,
                num_heads=config.num_heads,
                role="decoder",
                layer=n,
                max_length=config.context_length,
                memory=config.memory_length,
                window=windows[n],
                tokens=self.token_kernels,
                normalized=config.pre_norm,
                shape=self.shape(value_vocab=config.vocab_size if embeds else None),
                dropout=config.attention_dropout,
                backend=config.backend,
            )
            blocks.append(self.make_block(parts, place))
        self.blocks = nn.ModuleList(blocks)
        # With norms after each sum, the last block has already normalised.
        last = make_norm(config.norm, config.d_model, config.bias)
        self.norm = last if config.pre_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head if isinstance(self.head, nn.Linear) else None

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.head = new_embeddings  # type: ignore[assignment]

    def new_memory(self, length: int | None = None) -> list[SegmentMemory]:
        """An empty memory of earlier segments for each layer, as `forward` takes it."""
        length = self.config.memory_length if length is None else length
        if length is None:
            raise ValueError("the config has no memory_length: say how long the memory is to be")
        return [SegmentMemory(length) for _ in self.blocks]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: KernelCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        memory: Sequence[SegmentMemory] | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token at every place, [B, T, vocab], and the loss if labels come.

        Labels are shifted here; -100 is left out. `attention_mask` is [B, T], or with a cache
        [B, seen + T], and 0 for padding, on either side.
        """
        check_ids(input_ids, self.config.vocab_size)
        cache = self._cache(past_key_values, use_cache, labels, memory)
        before = self._seen(cache, memory)
        batch, new = input_ids.shape
        self.check_length(before + new)
        if memory is not None:
            if attention_mask is not None and not bool(attention_mask.all()):
                raise ValueError("a memory goes with segments without padding, but a mask came")
            attention_mask = None
        padding, offset = read_mask(attention_mask, batch, before + new, causal=True)
        x = self._embedded(input_ids, before, offset)
        hidden = [x]
        caches: Sequence[Any] = memory or (cache.each if cache else [None] * len(self.blocks))
        for block, remembered in zip(self.blocks, caches, strict=True):
            x = block(
                x,
                filter=self._filter(block, padding, offset),
                cache=remembered,
                token_ids=input_ids,
                offset=offset,
            )
            if output_hidden_states:
                hidden.append(x)
        loss, logits = self._read_out(self.norm(x), labels, logits_to_keep, kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            hidden_states=tuple(hidden) if output_hidden_states else None,
        )

    def _embedded(self, ids: Tensor, before: int, offset: Tensor | None) -> Tensor:
        x = self.embed(ids) * scale_of(self.config)
        if self.input_position is not None:
            places = torch.arange(before, before + ids.shape[1], device=ids.device)
            places = places if offset is None else (places - offset[:, None]).clamp(min=0)
            x = x + self.input_position(places).to(x.dtype)
        return self.dropout(norm_of(x) if self.config.embedding_norm else x)

    def _filter(self, block: Block, padding: Filter | None, offset: Tensor | None) -> Filter | None:
        if padding is None:
            return None
        own = block.attention.filter
        if offset is not None and _counts_blocks(own):
            raise ValueError(
                "Fixed counts its blocks from the first place, so padding must be on the right"
            )
        return join(own, padding)

    def _read_out(
        self, x: Tensor, labels: Tensor | None, keep: int | Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        if isinstance(self.head, AdaptiveSoftmax):
            tables = self.embed.tables if self.config.tie_word_embeddings else None
            loss = None
            if labels is not None:
                loss = self.head.loss(x, labels, tables, kwargs.get("num_items_in_batch"))
            if loss is not None and self.training:
                return loss, None
            return loss, self.head(_kept(x, keep), tables)
        logits = self.head(_kept(x, keep))
        if (cap := self.config.logit_cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        if labels is None:
            return None, logits
        vocab = self.config.vocab_size
        return self.loss_function(logits, labels, vocab_size=vocab, **kwargs), logits

    def _cache(
        self,
        given: object,
        use_cache: bool | None,
        labels: Tensor | None,
        memory: Sequence[SegmentMemory] | None,
    ) -> KernelCache | None:
        if memory is not None:
            if given is not None or use_cache:
                raise ValueError("memory and a cache are two ways to remember: give one of them")
            if len(memory) != len(self.blocks):
                raise ValueError(
                    f"memory must have one entry for each of {len(self.blocks)} layers, "
                    f"but came with {len(memory)}"
                )
            if self.training and self.is_gradient_checkpointing:
                raise ValueError("gradient checkpointing runs a block twice, a memory only once")
            return None
        if given is not None:
            if not isinstance(given, KernelCache):
                raise ValueError(
                    f"past_key_values must be a KernelCache, but came as {type(given).__name__}"
                )
            return given
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None and not self.training
        if not use_cache or (self.training and self.is_gradient_checkpointing):
            return None
        return KernelCache(len(self.blocks))

    @staticmethod
    def _seen(cache: KernelCache | None, memory: Sequence[SegmentMemory] | None) -> int:
        if memory is not None:
            return memory[0].seen
        return 0 if cache is None else cache.get_seq_length()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # `forward` makes the cache: transformers' own knows one part of the keys only.
        return False


def _windows(config: KernelLMConfig) -> list[Filter | None]:
    if config.windows is None:
        return [None] * config.num_layers
    assert config.short_window is not None
    # A long layer sees all that the layer's own filter lets through.
    filters = layer_windows(config.windows, config.num_layers, short=config.short_window)
    return [f if isinstance(f, Window) else None for f in filters]


def _counts_blocks(filter: Filter) -> bool:
    each = filter.filters if isinstance(filter, Joined) else (filter,)
    return any(isinstance(f, Fixed) for f in each)


def _kept(x: Tensor, keep: int | Tensor) -> Tensor:
    if isinstance(keep, int):
        return x[:, -keep:] if keep else x
    return x[:, keep]
