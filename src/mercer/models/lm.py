"""The language model: a decoder with any kernel, position, value function and filter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ..filters import Blocks, Filter, Memory, Window
from ..kernels import Kernel
from ..nn import Cache, RelativeBiases, RelativeSinusoid, SegmentMemory, layer_windows
from ..parallel import Split
from .adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from .base import KernelModel, check_ids, embed_places, read_mask, scale_of
from .block import Block, Weights, norm_of
from .cache import KernelCache
from .config import token_kernels
from .decoding import Decoding, keep_last
from .filters import join, remember, with_padding
from .lm_config import KernelLMConfig
from .parts import Place


class KernelLM(KernelModel, Decoding, GenerationMixin):
    """log p(token | tokens before it), for any attention; no token sees a later one.

    `forward` takes the arguments of causal language models in transformers. It also takes
    `memory`, a list from `new_memory`: each segment sees the states of earlier segments.
    `kernel`, where given, replaces that of the config in all layers.
    """

    config: KernelLMConfig
    config_class = KernelLMConfig
    _tied_weights_keys = {"head.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self, config: KernelLMConfig, *, kernel: Kernel | str | None = None) -> None:
        super().__init__(config.with_kernel(kernel))
        config = self.config
        self.loss_type = "ForCausalLM"
        self.embed: nn.Embedding | AdaptiveEmbedding
        self.head: nn.Linear | AdaptiveSoftmax
        sizes = config.vocab_size, config.d_model
        if config.cutoffs is None:
            self.embed = nn.Embedding(*sizes)
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        else:
            self._tied_weights_keys = {}
            self.graph_read_out = False
            self.embed = AdaptiveEmbedding(*sizes, config.cutoffs, config.div)
            self.head = AdaptiveSoftmax(
                *sizes, config.cutoffs, config.div, tied=config.tie_word_embeddings,
                bias=config.head_bias,
            )  # fmt: skip
        self.input_position = self.make_input_position()
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
                shape=self.shape(
                    value_vocab=config.vocab_size if embeds else None,
                    bias=config.bias if config.attention_bias is None else config.attention_bias,
                ),
                dropout=config.attention_dropout,
                backend=config.backend,
            )
            blocks.append(self.make_block(parts, place))
        self.blocks = nn.ModuleList(blocks)
        self.relative_biases = share_biases(config, blocks) if config.share_biases else None
        self.norm = self.make_last_norm()
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()
        self.set_generation_defaults()

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
        output_attentions: bool | None = None,
        split: Split | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token at every place, [B, T, vocab], and the loss if labels are given.

        Labels are shifted here; -100 is left out. `attention_mask` is [B, T], or with a cache
        [B, seen + T], and 0 for padding, on either side. With a `split`, logits are those of the
        tokens of this process, and the losses of all processes sum to the mean.
        """
        check_ids(input_ids, self.config.vocab_size)
        if split is not None:
            self._check_split(
                input_ids, past_key_values or use_cache or memory or output_attentions
            )
            cache = None
            if labels is not None:
                labels = split_labels(labels, split, kwargs)
        elif memory is not None:
            self._check_memory(memory, attention_mask, bool(past_key_values or use_cache))
            cache, attention_mask = None, None
        else:
            cache = self.choose_cache(past_key_values, use_cache, labels)
        length = self.config.segment_length
        keep, weights = bool(output_hidden_states), self.new_weights(output_attentions)
        if (
            length is None
            or cache is not None
            or memory is not None
            or input_ids.shape[1] <= length
        ):
            hidden = self._states(input_ids, attention_mask, cache, memory, keep, weights, split)
        else:
            if weights is not None:
                raise ValueError(
                    f"output_attentions needs one segment, at most {length} tokens, since each "
                    f"sees other keys, got {input_ids.shape[1]}: give segments with a memory"
                )
            memory = self.new_memory(self.config.memory_length or length)
            self._check_memory(memory, attention_mask, False)
            parts = input_ids.split(length, 1)
            segments = [self._states(ids, None, None, memory, keep) for ids in parts]
            hidden = [torch.cat(states, 1) for states in zip(*segments, strict=True)]
        loss, logits = self.read_out(hidden[-1], labels, logits_to_keep, kwargs)
        out: dict[str, Any] = {"loss": loss, "logits": logits, "past_key_values": cache}
        if output_hidden_states:
            out["hidden_states"] = tuple(hidden)
        if weights is not None:
            out["attentions"] = tuple(weights.own)
        return CausalLMOutputWithPast(**out)

    def _states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        cache: KernelCache | None,
        memory: Sequence[SegmentMemory] | None,
        keep: bool,
        weights: Weights | None = None,
        split: Split | None = None,
    ) -> list[Tensor]:
        """The states after the last block, [B, T, d_model]; with `keep`, after all earlier ones."""
        before = self._seen(cache, memory)
        batch, new = input_ids.shape
        self.check_length(before + new)
        padding, offset = read_mask(attention_mask, batch, before + new, causal=True)
        own = input_ids
        places: int | Tensor = before
        if split is not None:
            own, places = split.cut(input_ids), split.places(input_ids.device)
        x = self.embed(own) * scale_of(self.config)
        x = embed_places(self.input_position, x, places, offset)
        x = self.dropout(norm_of(x) if self.config.embedding_norm else x)
        hidden = [x]
        caches: Sequence[Any] = memory or (cache.each if cache else [None] * len(self.blocks))
        for block, remembered in zip(self.blocks, caches, strict=True):
            assert isinstance(block, Block)
            seen = self._filter(block, remembered)
            x = block(
                x,
                filter=with_padding(seen, padding, offset),
                cache=remembered,
                token_ids=input_ids,
                offset=offset,
                weights=weights,
                split=split,
            )
            if keep:
                hidden.append(x)
        return hidden if keep else [x]

    def _filter(self, block: Block, remembered: Cache | SegmentMemory | None) -> Filter:
        """What a layer sees: its filter, and of earlier segments the memory alone."""
        own, length = block.attention.filter, self.config.segment_length
        if isinstance(remembered, SegmentMemory):
            return remember(own, Memory(remembered.capacity))
        if remembered is None or length is None:
            return own
        segments = Blocks(length, self.config.memory_length or length)
        return join(remember(own, segments), segments)

    def read_out(
        self, x: Tensor, labels: Tensor | None, keep: int | Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The last norm, the head and the loss."""
        x = self.norm(x)
        if isinstance(self.head, AdaptiveSoftmax):
            assert isinstance(self.embed, AdaptiveEmbedding)
            tables = self.embed.tables if self.config.tie_word_embeddings else None
            loss = None
            if labels is not None:
                more = kwargs.get("num_items_in_batch"), kwargs.get("shift_labels")
                loss = self.head.loss(x, labels, tables, *more)
            if loss is not None and self.training:
                return loss, None
            return loss, self.head(keep_last(x, keep), tables)
        logits = self.head(keep_last(x, keep))
        if (cap := self.config.logit_cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        if labels is None:
            return None, logits
        vocab = self.config.vocab_size
        return self.loss_function(logits, labels, vocab_size=vocab, **kwargs), logits

    def _check_split(self, input_ids: Tensor, held: object) -> None:
        if held:
            raise ValueError(
                "a sequence that is split among processes takes no cache, no memory and no "
                "output_attentions: no process has all keys"
            )
        length = self.config.segment_length
        if length is not None and input_ids.shape[1] > length:
            raise ValueError(
                f"this model reads segments of {length} tokens one after the other, so its "
                "sequences cannot be split among processes"
            )

    def _check_memory(
        self, memory: Sequence[SegmentMemory], mask: Tensor | None, cached: bool
    ) -> None:
        if cached:
            raise ValueError("memory and a cache exclude each other: give one of them")
        if len(memory) != len(self.blocks):
            raise ValueError(
                f"memory must have one entry for each of {len(self.blocks)} layers, "
                f"got {len(memory)}"
            )
        if mask is not None and not bool(mask.all()):
            raise ValueError(
                "a memory needs segments without padding, but an attention_mask was given"
            )
        if self.training and self.runs_blocks_twice:
            raise ValueError(
                "gradient checkpointing runs a block twice, which would update a memory twice"
            )

    @staticmethod
    def _seen(cache: KernelCache | None, memory: Sequence[SegmentMemory] | None) -> int:
        if memory is not None:
            return memory[0].seen
        return 0 if cache is None else cache.get_seq_length()


def split_labels(labels: Tensor, split: Split, kwargs: dict[str, Any]) -> Tensor:
    """The labels of this process; the next ones and the number of all targets go to `kwargs`."""
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    if kwargs.get("num_items_in_batch") is None:
        kwargs["num_items_in_batch"] = (shifted != -100).sum()
    kwargs["shift_labels"] = split.cut(shifted)
    return split.cut(labels)


def share_biases(config: KernelLMConfig, blocks: Sequence[Block]) -> RelativeBiases:
    """One pair of Transformer-XL's vectors, which all layers with such positions take."""
    positions = [getattr(block.attention, "position", None) for block in blocks]
    taking = [p for p in positions if isinstance(p, RelativeSinusoid) and p.biases]
    if not taking:
        raise ValueError("share_biases is for RelativeSinusoid positions, and no layer has them")
    shared = RelativeBiases(config.num_heads, config.head_dim)
    for position in taking:
        position.share(shared)
    return shared


def _windows(config: KernelLMConfig) -> list[Filter | None]:
    if config.windows is None:
        return [None] * config.num_layers
    assert config.short_window is not None
    # A long layer keeps its own filter.
    filters = layer_windows(config.windows, config.num_layers, short=config.short_window)
    return [f if isinstance(f, Window) else None for f in filters]
