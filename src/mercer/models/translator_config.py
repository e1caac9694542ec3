"""The config of translators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .block import Activation, Mlp, Norm
from .config import (
    PARTS,
    Each,
    EachKernel,
    KernelConfig,
    Options,
    check_names,
    check_types,
    check_whole,
    spread,
)
from .parts import Parts


class KernelTranslatorConfig(KernelConfig):
    """An encoder and a decoder over one vocabulary.

    Args:
        encoder_layers, decoder_layers: how many blocks each has.
        system, system_options, kernel, position, value, filter: those of self-attention in both.
        encoder_attention, decoder_attention, cross_attention: the same names in a dict, for the
            self-attention of the encoder or the decoder alone, and for cross-attention; a list in
            it has one entry for each layer. Fields missing in the first two are as above.
            Cross-attention is exponential and without positions by default.
        decoder_start_token_id: what a translation starts from; bos_token_id unless given.
        others: as in `KernelLMConfig`.
    """

    model_type = "mercer-translator"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_layers": "decoder_layers",
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "context_length",
    }

    def __init__(
        self,
        *,
        vocab_size: int = 10000,
        d_model: int = 512,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        num_heads: int = 8,
        d_ff: int | None = None,
        context_length: int = 1024,
        system: Each = None,
        system_options: Options = None,
        kernel: EachKernel = None,
        position: Each = None,
        value: Each = None,
        filter: Each = None,
        encoder_attention: Mapping[str, Any] | None = None,
        decoder_attention: Mapping[str, Any] | None = None,
        cross_attention: Mapping[str, Any] | None = None,
        num_kv_heads: int | None = None,
        norm: Norm = "layer",
        norm_eps: float | None = None,
        pre_norm: bool = True,
        activation: Activation = "relu",
        mlp: Mlp = "plain",
        bias: bool = False,
        normalize: bool = False,
        input_position: str | None = None,
        embedding_scale: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        initializer_range: float | None = None,
        residual_start: str = "scaled",
        backend: str = "auto",
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        pad_token_id: int | None = 0,
        bos_token_id: int | None = 1,
        eos_token_id: int | list[int] | None = 2,
        decoder_start_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_types(KernelTranslatorConfig, locals())
        self.vocab_size, self.d_model, self.num_heads = vocab_size, d_model, num_heads
        self.encoder_layers, self.decoder_layers = encoder_layers, decoder_layers
        self.d_ff = 4 * d_model if d_ff is None else d_ff
        self.mlp, self.norm_eps = mlp, norm_eps
        self.context_length = context_length
        self.system, self.kernel, self.position = system, kernel, position
        self.value, self.filter = value, filter
        self.system_options = {} if system_options is None else system_options
        self.encoder_attention = dict(encoder_attention or {})
        self.decoder_attention = dict(decoder_attention or {})
        self.cross_attention = dict(cross_attention or {})
        self.num_kv_heads, self.norm, self.pre_norm = num_kv_heads, norm, pre_norm
        self.activation, self.bias, self.normalize = activation, bias, normalize
        self.input_position, self.embedding_scale = input_position, embedding_scale
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.activation_dropout, self.initializer_range = activation_dropout, initializer_range
        self.residual_start, self.backend = residual_start, backend
        self.use_cache, self.tie_word_embeddings = use_cache, tie_word_embeddings
        if decoder_start_token_id is None:
            first = eos_token_id[0] if isinstance(eos_token_id, list) else eos_token_id
            decoder_start_token_id = first if bos_token_id is None else bos_token_id
        self.decoder_start_token_id = decoder_start_token_id
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        self.pad_token_id = pad_token_id
        check_whole(
            vocab_size=vocab_size,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            context_length=context_length,
        )
        check_names(input_position, residual_start)
        kwargs.pop("is_encoder_decoder", None)
        super().__init__(
            is_encoder_decoder=True,
            tie_word_embeddings=tie_word_embeddings,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            decoder_start_token_id=decoder_start_token_id,
            **kwargs,
        )
        self.encoder_parts(), self.decoder_parts(), self.cross_parts()

    def encoder_parts(self) -> list[Parts]:
        return self._self_attention(self.encoder_attention, self.encoder_layers, "encoder")

    def decoder_parts(self) -> list[Parts]:
        return self._self_attention(self.decoder_attention, self.decoder_layers, "decoder")

    def cross_parts(self) -> list[Parts]:
        return spread(
            self.cross_attention, self.decoder_layers, "cross-attention ", trust=self.trust_kernels
        )

    def _self_attention(self, own: Mapping[str, Any], num_layers: int, side: str) -> list[Parts]:
        shared = {name: getattr(self, name) for name in PARTS}
        if "system" in own:
            # Options belong to a system: another system does not inherit them.
            shared |= {"system_options": {}}
        return spread(shared | dict(own), num_layers, f"{side} ", trust=self.trust_kernels)
