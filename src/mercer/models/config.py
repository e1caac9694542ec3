"""What a model is made of, as JSON: sizes, and the parts of its attention as text.

`system`, `system_options`, `kernel`, `position`, `value` and `filter` are each one entry for all
layers, or a list with one for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from ..nn import TokenKernels
from .block import Activation, Norm, check_block
from .parts import Parts

PARTS = ("system", "system_options", "kernel", "position", "value", "filter")
Each = str | Sequence[str | None] | None
Options = Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None


class KernelConfig(PreTrainedConfig):
    """What the configs of all models have in common."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_block(self.norm, self.activation)
        check_whole(d_model=self.d_model, num_heads=self.num_heads, d_ff=self.d_ff)
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model {self.d_model} does not divide into {self.num_heads} heads")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            share = getattr(self, name)
            if not 0 <= share < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, but came as {share}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


def spread(parts: Mapping[str, Any], num_layers: int, what: str = "") -> list[Parts]:
    """The parts of every layer; an entry that is a list has one for each layer."""
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise ValueError(
            f"{what or 'attention '}has no part {unknown[0]!r}; its parts are: {', '.join(PARTS)}"
        )
    each: list[dict[str, Any]] = [{} for _ in range(num_layers)]
    for name, given in parts.items():
        listed = isinstance(given, list | tuple)
        if listed and len(given) != num_layers:
            raise ValueError(
                f"{what}{name} must have one entry for each of {num_layers} layers, but came with "
                f"{len(given)}"
            )
        for layer, row in enumerate(each):
            one = given[layer] if listed else given
            if one is not None:
                row[name] = one
    return [Parts(**row).check() for row in each]


def token_kernels(layers: Sequence[Parts], vocab_size: int) -> TokenKernels | None:
    """The one object that all layers with token kernels share."""
    each = [parts for parts in layers if parts.tokens is not None]
    if not each:
        return None
    if any(parts.tokens != each[0].tokens for parts in each):
        raise ValueError("all layers share their token kernels, so their options must be the same")
    for parts in each:
        asked = parts.system_options.get("vocab_size", vocab_size)
        if asked != vocab_size:
            raise ValueError(
                f"vocab_size of leng2026 must be the model's {vocab_size}, but came as {asked}"
            )
    return TokenKernels(vocab_size, **(each[0].tokens or {}))


def check_whole(**sizes: Any) -> None:
    """Raise ValueError for what is no whole number from 1 up."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a whole number from 1 up, but came as {size!r}")


class KernelLMConfig(KernelConfig):
    """A language model of `num_layers` blocks.

    Args:
        vocab_size, d_model, num_layers, num_heads, d_ff: its sizes; d_ff is 4 d_model unless given.
        context_length: the longest sequence it is made for; learned positions have as many places.
        system, system_options, kernel, position, value, filter: see the module.
        num_kv_heads: fewer heads for keys and values.
        norm: "layer", "rms", or "rms-plain" for a division by the root mean square without weights.
        pre_norm: norms before each net, or after each sum.
        activation: "relu", "gelu", "relu2" (its square) or "silu".
        bias: whether linear maps and layer norms have one.
        normalize: divide q and k by their root mean square, after a rotation.
        value_embeddings: on alternate layers, the last one included, a vector of the token is added
            to the values; `kundu2026` has no values to add it to.
        windows, short_window: a pattern such as "SSSL"; S sees `short_window` places back, L all.
        memory_length: how many states of earlier segments `new_memory` holds in each layer.
        input_position: "learned" or "sinusoid", added once to the embeddings; None: not at all. The
            positions of the layers are theirs.
        embedding_scale: multiply embeddings by sqrt(d_model).
        embedding_norm: divide them by their root mean square.
        cutoffs, div: adaptive input and softmax: where the vocabulary is cut (ids must be sorted by
            frequency), and by how much each part is narrower than the one before.
        logit_cap: c tanh(logit / c).
        dropout, attention_dropout, activation_dropout: after each net, of weights, inside the net.
        initializer_range: the standard deviation of all weights; None: 1 / sqrt(their inputs).
        residual_start: "scaled" by 1 / sqrt(2 num_layers), "zero" or "plain".
        backend: as in `mercer.smooth`.
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
        kernel: Each = None,
        position: Each = None,
        value: Each = None,
        filter: Each = None,
        num_kv_heads: int | None = None,
        norm: Norm = "layer",
        pre_norm: bool = True,
        activation: Activation = "gelu",
        bias: bool = False,
        normalize: bool = False,
        value_embeddings: bool = False,
        windows: str | None = None,
        short_window: int | None = None,
        memory_length: int | None = None,
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
        self.vocab_size, self.d_model, self.num_heads = vocab_size, d_model, num_heads
        self.num_layers, self.context_length = num_layers, context_length
        self.d_ff = 4 * d_model if d_ff is None else d_ff
        self.system, self.kernel, self.position = system, kernel, position
        self.value, self.filter = value, filter
        self.system_options = {} if system_options is None else system_options
        self.num_kv_heads, self.norm, self.pre_norm = num_kv_heads, norm, pre_norm
        self.activation, self.bias, self.normalize = activation, bias, normalize
        self.value_embeddings, self.windows = value_embeddings, windows
        self.short_window, self.memory_length = short_window, memory_length
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
        """What every layer's attention is made of."""
        return spread({name: getattr(self, name) for name in PARTS}, self.num_layers)


class KernelTranslatorConfig(KernelConfig):
    """An encoder and a decoder over one vocabulary.

    Args:
        encoder_layers, decoder_layers: how many blocks each has.
        system, system_options, kernel, position, value, filter: those of self-attention in both.
        encoder_attention, decoder_attention, cross_attention: the same names in a dict, for the
            self-attention of the encoder or the decoder alone, and for cross-attention; a list in
            it has one entry for each layer. What the first two leave out is as above;
            cross-attention is exponential and without positions unless it says otherwise.
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
        kernel: Each = None,
        position: Each = None,
        value: Each = None,
        filter: Each = None,
        encoder_attention: Mapping[str, Any] | None = None,
        decoder_attention: Mapping[str, Any] | None = None,
        cross_attention: Mapping[str, Any] | None = None,
        num_kv_heads: int | None = None,
        norm: Norm = "layer",
        pre_norm: bool = True,
        activation: Activation = "relu",
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
        self.vocab_size, self.d_model, self.num_heads = vocab_size, d_model, num_heads
        self.encoder_layers, self.decoder_layers = encoder_layers, decoder_layers
        self.d_ff = 4 * d_model if d_ff is None else d_ff
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
        return spread(self.cross_attention, self.decoder_layers, "cross-attention ")

    def _self_attention(self, own: Mapping[str, Any], num_layers: int, side: str) -> list[Parts]:
        shared = {name: getattr(self, name) for name in PARTS}
        if "system" in own:
            # Options are those of a system: another one does not take them over.
            shared |= {"system_options": {}}
        return spread(shared | dict(own), num_layers, f"{side} ")


class KernelViTConfig(KernelConfig):
    """An image as a sequence of patches, row by row.

    Args:
        image_size, patch_size, num_channels: of a square image; patches divide it.
        num_labels: how many classes there are.
        pooling: "class" for a class token before the patches, "mean" for the mean of the patches.
        position: as elsewhere, and "grid" for a product of a height and a width kernel, or
            "grid-sum" for the sum of both embeddings (`Grid2D`). A class token is not on the grid:
            its position is 0 in both. Where places are counted in one line, it is the first.
        others: as in `KernelLMConfig`.
    """

    model_type = "mercer-vit"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
    }

    def __init__(
        self,
        *,
        image_size: int = 224,
        patch_size: int = 16,
        num_channels: int = 3,
        d_model: int = 192,
        num_layers: int = 12,
        num_heads: int = 3,
        d_ff: int | None = None,
        pooling: str = "class",
        system: Each = None,
        system_options: Options = None,
        kernel: Each = None,
        position: Each = None,
        value: Each = None,
        filter: Each = None,
        num_kv_heads: int | None = None,
        norm: Norm = "layer",
        pre_norm: bool = True,
        activation: Activation = "gelu",
        bias: bool = True,
        normalize: bool = False,
        input_position: str | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        initializer_range: float | None = None,
        residual_start: str = "scaled",
        backend: str = "auto",
        **kwargs: Any,
    ) -> None:
        self.image_size, self.patch_size = image_size, patch_size
        self.num_channels, self.pooling = num_channels, pooling
        self.d_model, self.num_layers, self.num_heads = d_model, num_layers, num_heads
        self.d_ff = 4 * d_model if d_ff is None else d_ff
        self.system, self.kernel, self.position = system, kernel, position
        self.value, self.filter = value, filter
        self.system_options = {} if system_options is None else system_options
        self.num_kv_heads, self.norm, self.pre_norm = num_kv_heads, norm, pre_norm
        self.activation, self.bias, self.normalize = activation, bias, normalize
        self.input_position, self.dropout = input_position, dropout
        self.attention_dropout, self.activation_dropout = attention_dropout, activation_dropout
        self.initializer_range, self.residual_start = initializer_range, residual_start
        self.backend = backend
        check_whole(
            image_size=image_size,
            patch_size=patch_size,
            num_channels=num_channels,
            num_layers=num_layers,
        )
        check_names(input_position, residual_start)
        if image_size % patch_size:
            raise ValueError(
                f"patch_size must divide image_size, but came as {patch_size} and {image_size}"
            )
        if pooling not in ("class", "mean"):
            raise ValueError(f"pooling must be 'class' or 'mean', but came as {pooling!r}")
        super().__init__(**kwargs)
        if any(parts.tokens is not None for parts in self.layer_parts()):
            raise ValueError("leng2026 has kernels of tokens, and an image has no tokens")

    @property
    def side(self) -> int:
        """Patches along one side."""
        return self.image_size // self.patch_size

    @property
    def prefix(self) -> int:
        """Places before the first patch."""
        return 1 if self.pooling == "class" else 0

    @property
    def places(self) -> int:
        return self.prefix + self.side**2

    def layer_parts(self) -> list[Parts]:
        """What every layer's attention is made of."""
        parts = {name: getattr(self, name) for name in PARTS}
        given = parts["position"]
        if isinstance(given, list | tuple):
            parts["position"] = [self._on_grid(one) for one in given]
        else:
            parts["position"] = self._on_grid(given)
        return spread(parts, self.num_layers)

    def _on_grid(self, position: str | None) -> str | None:
        combine = {"grid": "product", "grid-sum": "sum"}.get(position or "")
        if combine is None:
            return position
        return f"Grid2D({self.side}, {self.side}, prefix={self.prefix}, combine={combine!r})"


def check_names(input_position: object, residual_start: object) -> None:
    """Raise ValueError for a name that there is not."""
    if input_position not in (None, "learned", "sinusoid"):
        raise ValueError(
            f"input_position must be 'learned', 'sinusoid' or None, but came as {input_position!r}"
        )
    if residual_start not in ("scaled", "zero", "plain"):
        raise ValueError(
            f"residual_start must be 'scaled', 'zero' or 'plain', but came as {residual_start!r}"
        )
