"""The translator: an encoder that sees all of the source, and a causal decoder.

The encoder's self-attention, the decoder's self-attention and cross-attention are configured
separately. Padding of the source may be anywhere: the encoder moves it behind the tokens, so each
sentence gives the same states as without padding. The encoder's output has that order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils.generic import can_return_tuple

from ..filters import Filter, Padding
from ..kernels import Kernel
from ..nn import KernelAttention
from .base import KernelModel, check_ids, embed_places, read_mask, scale_of
from .block import Block, Weights
from .cache import KernelCache
from .config import token_kernels
from .decoding import Decoding, keep_last
from .filters import join, with_padding
from .parts import Place, Role, build
from .patched import remember
from .translator_config import KernelTranslatorConfig

IGNORED = -100


class Encoder(nn.Module):
    """The states of a source, [B, S, d_model]; padding is moved behind the tokens."""

    main_input_name = "input_ids"

    def __init__(self, model: KernelTranslator) -> None:
        super().__init__()
        config = model.config
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.input_position = model.make_input_position()
        layers = config.encoder_parts()
        self.token_kernels = token_kernels(layers, config.vocab_size)
        places = [model.place("encoder", n, self) for n in range(len(layers))]
        self.blocks = nn.ModuleList(map(model.make_block, layers, places))
        self.norm = model.make_last_norm()
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        weights = Weights() if output_attentions else None
        padding = read_lengths(attention_mask, input_ids.shape)
        if padding is not None and attention_mask is not None:
            order = (attention_mask == 0).int().argsort(dim=1, stable=True)
            input_ids = input_ids.gather(1, order)
        x = self.embed(input_ids) * scale_of(self.config)
        x = self.dropout(embed_places(self.input_position, x, 0, None))
        hidden = [x]
        for block in self.blocks:
            assert isinstance(block, Block)
            own = block.attention.filter
            x = block(
                x,
                filter=None if padding is None else join(own, padding),
                token_ids=input_ids,
                weights=weights,
            )
            hidden.append(x)
        every: Any = tuple(hidden) if output_hidden_states else None
        seen: Any = None if weights is None else tuple(weights.own)
        return BaseModelOutput(last_hidden_state=self.norm(x), hidden_states=every, attentions=seen)


class KernelTranslator(KernelModel, Decoding, GenerationMixin):
    """p(target | source), for any attention; beams by `generate`.

    `encoder_outputs`, where given, are those of `encoder`. `kernel`, where given, replaces that of
    the config in the self-attention of both sides.
    """

    config: KernelTranslatorConfig
    config_class = KernelTranslatorConfig
    cross = True
    _tied_weights_keys = {"head.weight": "encoder.embed.weight"}  # noqa: RUF012

    def __init__(
        self, config: KernelTranslatorConfig, *, kernel: Kernel | str | None = None
    ) -> None:
        super().__init__(config.with_kernel(kernel))
        config = self.config
        self.encoder = Encoder(self)
        self.input_position = self.make_input_position()
        layers = config.decoder_parts()
        self.token_kernels = token_kernels(layers, config.vocab_size)
        blocks = []
        for n, (own, towards) in enumerate(zip(layers, config.cross_parts(), strict=True)):
            if towards.tokens is not None:
                raise ValueError(
                    f"token kernels are for self-attention: {towards.system} has no cross-attention"
                )
            cross = build(towards, self.place("cross", n, self))
            assert isinstance(cross, KernelAttention)
            remember(cross, towards)
            blocks.append(self.make_block(own, self.place("decoder", n, self), cross=cross))
        self.blocks = nn.ModuleList(blocks)
        self.norm = self.make_last_norm()
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()
        self.set_generation_defaults()

    def attention_by_field(self) -> dict[str, list[Any]]:
        return {
            "encoder_attention": [block.attention for block in self.encoder.blocks],
            "decoder_attention": [block.attention for block in self.blocks],
            "cross_attention": [block.cross for block in self.blocks],
        }

    def place(self, role: Role, layer: int, owner: Any) -> Place:
        """The sizes and options of a layer; `owner` holds the token kernels."""
        config = self.config
        return Place(
            d_model=config.d_model,
            num_heads=config.num_heads,
            role=role,
            layer=layer,
            max_length=config.context_length,
            tokens=None if role == "cross" else owner.token_kernels,
            normalized=config.pre_norm,
            shape=self.shape(),
            dropout=config.attention_dropout,
            backend=config.backend,
        )

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        return self.encoder

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.head = new_embeddings  # type: ignore[assignment]

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The decoder's input: the start token, then the labels without the last."""
        start = self.config.decoder_start_token_id
        if start is None:
            raise ValueError("the config has no decoder_start_token_id, bos or eos to start from")
        pad = self.config.pad_token_id
        before = F.pad(labels[:, :-1], (1, 0), value=start)
        return before.masked_fill(before == IGNORED, start if pad is None else pad)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: KernelCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Logits of the next token of the target at every place, and the loss if labels are given.

        Labels [B, T] are the target with its end; -100 is left out. The decoder reads them one
        place to the right, unless `decoder_input_ids` are given.
        """
        weights = self.new_weights(output_attentions)
        if encoder_outputs is None:
            if input_ids is None:
                raise ValueError("a translator needs input_ids, or the encoder_outputs of a source")
            check_ids(input_ids, self.config.vocab_size)
            self.check_length(input_ids.shape[1])
            encoder_outputs = self.encoder(
                input_ids, attention_mask, output_attentions=weights is not None
            )
        source = encoder_outputs[0]
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("a translator needs decoder_input_ids or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        check_ids(decoder_input_ids, self.config.vocab_size, "decoder_input_ids")
        cache = self.choose_cache(past_key_values, use_cache, labels)
        x = self._decode(
            decoder_input_ids, decoder_attention_mask, source, attention_mask, cache, weights
        )
        loss, logits = self.read_out(x, labels, logits_to_keep, kwargs.get("num_items_in_batch"))
        out: dict[str, Any] = {
            "loss": loss,
            "logits": logits,
            "past_key_values": cache,
            "encoder_last_hidden_state": source,
        }
        if output_hidden_states:
            out["decoder_hidden_states"] = (self.norm(x),)
        if weights is not None:
            out["encoder_attentions"] = getattr(encoder_outputs, "attentions", None)
            out["decoder_attentions"] = tuple(weights.own)
            out["cross_attentions"] = tuple(weights.cross)
        return Seq2SeqLMOutput(**out)

    def read_out(
        self,
        x: Tensor,
        labels: Tensor | None,
        keep: int | Tensor,
        num_items: Tensor | int | None,
    ) -> tuple[Tensor | None, Tensor]:
        """The last norm, the head and the loss."""
        logits = self.head(keep_last(self.norm(x), keep))
        return None if labels is None else mean_loss(logits, labels, num_items), logits

    def _decode(
        self,
        ids: Tensor,
        mask: Tensor | None,
        source: Tensor,
        source_mask: Tensor | None,
        cache: KernelCache | None,
        weights: Weights | None = None,
    ) -> Tensor:
        before = 0 if cache is None else cache.get_seq_length()
        self.check_length(before + ids.shape[1])
        padding, offset = read_mask(mask, ids.shape[0], before + ids.shape[1], causal=True)
        hidden = read_lengths(source_mask, source.shape[:2])
        x = self.encoder.embed(ids) * scale_of(self.config)
        x = self.dropout(embed_places(self.input_position, x, before, offset))
        for n, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            assert block.cross is not None
            x = block(
                x,
                filter=with_padding(block.attention.filter, padding, offset),
                cache=None if cache is None else cache.each[n],
                token_ids=ids,
                offset=offset,
                context=source,
                context_filter=None if hidden is None else join(block.cross.filter, hidden),
                context_cache=None if cache is None else cache.cross[n],
                weights=weights,
            )
        return x


def read_lengths(mask: Tensor | None, shape: Any) -> Filter | None:
    """The filter of a source whose padding is behind its tokens."""
    if mask is None:
        return None
    if mask.dim() != 2 or mask.shape != tuple(shape):
        raise ValueError(
            f"attention_mask must be {list(shape)}, 1 for tokens and 0 for padding, "
            f"got {list(mask.shape)}"
        )
    return Padding((mask != 0).sum(1))


def mean_loss(logits: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
    """The mean of -log p over the labels; with a count, the sum divided by it."""
    reduction = "mean" if num_items is None else "sum"
    loss = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )
    return loss if num_items is None else loss / torch.as_tensor(num_items, device=loss.device)
