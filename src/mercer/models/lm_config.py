"""The config of language models."""

from __future__ import annotations

from collections.abc import Sequence
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


class KernelLMConfig(KernelConfig):
    """A language model of `num_layers` blocks.

    Args:
        vocab_size, d_model, num_layers, num_heads, d_ff: its sizes; d_ff is 4 d_model unless given.
        context_length: the length it is made for; the number of learned positions.
        system, system_options, kernel, position, value, filter: one for all layers, or a
            list with one for each.
        num_kv_heads: fewer heads for keys and values.
        norm: "layer", "rms", or "rms-plain" for a division by the root mean square without weights.
        norm_eps: what a norm adds to the mean square; by default 1e-6, in a layer norm 1e-5.
        pre_norm: norms before each sub-layer, or after each sum.
        activation: "relu", "relu2" (its square), "gelu" (its tanh form, as in GPT-2), "gelu-exact"
            (as in ViT) or "silu".
        mlp: "plain", or "gated" for a feed-forward net W_2 (f(W_3 x) * W_1 x); with "silu", SwiGLU.
        bias: whether linear maps and layer norms have one. attention_bias: the same of attention;
            None: as the others. head_bias: whether each token has a number added to its logit.
        normalize: divide q and k by their root mean square per head, after a rotation.
        value_embeddings: on every second layer, the last included, a vector of the token is added
            to the values.
        windows, short_window: a pattern such as "SSSL"; S sees `short_window` places back, L all.
        memory_length: how many states of earlier segments `new_memory` holds in each layer.
        segment_length: without a cache, read longer sequences segment by segment. Each segment
            sees the states of earlier ones, without gradient (Transformer-XL).
        share_biases: one pair of Transformer-XL's vectors u and v for all layers.
        input_position: "learned" or "sinusoid", added once to the embeddings; None: not added.
            It is independent of the positions in the layers.
        embedding_scale: multiply embeddings by sqrt(d_model).
        embedding_norm: divide them by their root mean square.
        cutoffs, div: adaptive input and softmax: where the vocabulary is cut (ids must be sorted by
            frequency), and by how much each part is narrower than the one before.
        logit_cap: c, replaces each logit by c tanh(logit / c).
        dropout, attention_dropout, activation_dropout: after each sub-layer, of attention weights,
            inside the feed-forward net.
        initializer_range: the standard deviation of all weights; None: 1 / sqrt(their inputs).
        residual_start: the last projection of a residual branch: "scaled" by 1 / sqrt(2
        num_layers), "zero" or "plain". backend: as in `mercer.smooth`.
    """

    model_type = "mercer-lm"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "context_length",
    }

    def __init__(
        self,
        *,
        vocab_size: int = 50257,
        d_model: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        d_ff: int | None = None,
        context_length: int = 1024,
        system: Each = None,
        system_options: Options = None,
        kernel: EachKernel = None,
        position: Each = None,
        value: Each = None,
        filter: Each = None,
        num_kv_heads: int | None = None,
        norm: Norm = "layer",
        norm_eps: float | None = None,
        pre_norm: bool = True,
        activation: Activation = "gelu",
        mlp: Mlp = "plain",
        bias: bool = False,
        attention_bias: bool | None = None,
        head_bias: bool = False,
        normalize: bool = False,
        value_embeddings: bool = False,
        windows: str | None = None,
        short_window: int | None = None,
        memory_length: int | None = None,
        segment_length: int | None = None,
        share_biases: bool = False,
        input_position: str | None = None,
        embedding_scale: bool = False,
        embedding_norm: bool = False,
        cutoffs: Sequence[int] | None = None,
        div: int = 4,
        logit_cap: float | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        initializer_range: float | None = None,
        residual_start: str = "scaled",
        backend: str = "auto",
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_types(KernelLMConfig, locals())
        self.vocab_size, self.d_model, self.num_heads = vocab_size, d_model, num_heads
        self.num_layers, self.context_length = num_layers, context_length
        self.d_ff = 4 * d_model if d_ff is None else d_ff
        self.mlp, self.norm_eps = mlp, norm_eps
        self.system, self.kernel, self.position = system, kernel, position
        self.value, self.filter = value, filter
        self.system_options = {} if system_options is None else system_options
        self.num_kv_heads, self.norm, self.pre_norm = num_kv_heads, norm, pre_norm
        self.activation, self.bias, self.normalize = activation, bias, normalize
        self.attention_bias, self.head_bias = attention_bias, head_bias
        self.value_embeddings, self.windows = value_embeddings, windows
        self.short_window, self.memory_length = short_window, memory_length
        self.segment_length, self.share_biases = segment_length, share_biases
        self.input_position = input_position
        self.embedding_scale, self.embedding_norm = embedding_scale, embedding_norm
        self.cutoffs, self.div = None if cutoffs is None else list(cutoffs), div
        self.logit_cap, self.dropout = logit_cap, dropout
        self.attention_dropout, self.activation_dropout = attention_dropout, activation_dropout
        self.initializer_range, self.residual_start = initializer_range, residual_start
        self.backend, self.use_cache = backend, use_cache
        self.tie_word_embeddings = tie_word_embeddings
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        self.pad_token_id = pad_token_id
        check_whole(vocab_size=vocab_size, num_layers=num_layers, context_length=context_length)
        some = {"segment_length": segment_length, "memory_length": memory_length, "div": div}
        check_whole(**{name: size for name, size in some.items() if size is not None})
        if logit_cap is not None and logit_cap <= 0:
            raise ValueError(f"logit_cap must be above 0, got {logit_cap}")
        check_names(input_position, residual_start)
        if self.windows is not None and self.short_window is None:
            self.short_window = max(context_length // 2, 1)
        super().__init__(
            tie_word_embeddings=tie_word_embeddings,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            **kwargs,
        )
        self.layer_parts()

    def layer_parts(self) -> list[Parts]:
        """The parts of every layer's attention."""
        parts = {name: getattr(self, name) for name in PARTS}
        return spread(parts, self.num_layers, trust=self.trust_kernels)
