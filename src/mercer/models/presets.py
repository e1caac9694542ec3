"""Configs by name. A preset is a shape; the system, or any other field, can be another.

Presets with the name of a published model are that model: tests compare outputs and parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from .. import own, parse, systems
from ..kernels import Kernel
from ..names import suggest
from .config import LABELS, KernelConfig
from .lm_config import KernelLMConfig
from .translator_config import KernelTranslatorConfig
from .vit_config import KernelViTConfig

LM: dict[str, dict[str, Any]] = {
    # Transformer-XL on WikiText-103, base: tokens are words, sorted by frequency. Its authors
    # clamp distances in evaluation only; in training none is above 299.
    "xl-base": {
        "system": "dai2019",
        "system_options": {"max_distance": 400},
        "share_biases": True,
        "vocab_size": 267735,
        "d_model": 410,
        "num_layers": 16,
        "num_heads": 10,
        "d_ff": 2100,
        "context_length": 150,
        "memory_length": 150,
        "segment_length": 150,
        "pre_norm": False,
        "activation": "relu",
        "bias": True,
        "attention_bias": False,
        "head_bias": True,
        "dropout": 0.1,
        "activation_dropout": 0.1,
        "embedding_scale": True,
        "initializer_range": 0.02,
        "residual_start": "plain",
    },
    # GPT-2 of 124 M: positions are learned, and added once.
    "gpt2-small": {
        "vocab_size": 50257,
        "d_model": 768,
        "num_layers": 12,
        "num_heads": 12,
        "context_length": 1024,
        "input_position": "learned",
        "bias": True,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "initializer_range": 0.02,
    },
    # nanochat's style: d_model is 64 x depth, and heads have 128 features.
    "nano": {
        "vocab_size": 32768,
        "context_length": 2048,
        "position": "rotary",
        "norm": "rms-plain",
        "activation": "relu2",
        "normalize": True,
        "value_embeddings": True,
        "windows": "SSSL",
        "embedding_norm": True,
        "logit_cap": 15.0,
        "residual_start": "zero",
        "tie_word_embeddings": False,
    },
    # For minutes on a CPU.
    "tiny": {
        "system": "vaswani2017",
        "vocab_size": 1024,
        "d_model": 64,
        "num_layers": 2,
        "num_heads": 2,
        "context_length": 256,
        "memory_length": 64,
        "embedding_scale": True,
        "tie_word_embeddings": False,
    },
}
TRANSLATOR: dict[str, dict[str, Any]] = {
    # fairseq's transformer_iwslt_de_en: sinusoids are added once.
    "iwslt": {
        "vocab_size": 10000,
        "d_model": 512,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "num_heads": 4,
        "d_ff": 1024,
        "input_position": "sinusoid",
        "pre_norm": False,
        "bias": True,
        "dropout": 0.3,
    },
    "tiny": {
        "system": "vaswani2017",
        "vocab_size": 512,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "num_heads": 2,
        "d_ff": 128,
        "context_length": 128,
        "tie_word_embeddings": False,
    },
}
DEIT: dict[str, Any] = {
    "input_position": "learned",
    "activation": "gelu-exact",
    "norm_eps": 1e-6,
    "initializer_range": 0.02,
    "residual_start": "plain",
    "num_labels": 1000,
}
VIT: dict[str, dict[str, Any]] = {
    # DeiT without distillation.
    "deit-tiny": {"d_model": 192, "num_heads": 3, **DEIT},
    "deit-small": {"d_model": 384, "num_heads": 6, **DEIT},
    "cifar": {
        "position": "grid",
        "image_size": 32,
        "patch_size": 4,
        "d_model": 256,
        "num_layers": 7,
        "num_heads": 4,
        "d_ff": 512,
        "pooling": "mean",
        "num_labels": 10,
    },
    # 8 x 8 digits.
    "tiny": {
        "position": "grid",
        "image_size": 8,
        "patch_size": 2,
        "num_channels": 1,
        "d_model": 64,
        "num_layers": 2,
        "num_heads": 2,
        "d_ff": 128,
        "pooling": "mean",
        "num_labels": 10,
    },
}
# A preset's positions give way to those of a system, a position or a kernel that is named.
POSITIONS = ("position", "input_position", "share_biases")
# The cutoffs of Transformer-XL's vocabulary on WikiText-103.
XL_CUTOFFS = (20000, 40000, 200000)


def lm(
    name: str = "tiny",
    *,
    system: str | None = None,
    vocab_size: int | None = None,
    depth: int = 20,
    adaptive: bool = False,
    **overrides: Any,
) -> KernelLMConfig:
    """The config of a language model: xl-base, gpt2-small, nano (with its depth) or tiny.

    `adaptive=True` gives xl-base the adaptive input and softmax of its paper.
    """
    fields = _find(LM, name, "language model")
    if name == "nano":
        fields |= _nano(depth)
        # Not every system takes value embeddings.
        if systems.is_gaussian(system):
            fields |= {"normalize": False, "value_embeddings": False}
    elif depth != 20:
        raise ValueError(f"depth is for the preset nano, not for {name!r}: use num_layers")
    if adaptive:
        size = fields["vocab_size"] if vocab_size is None else vocab_size
        fields["div"] = 1
        fields["cutoffs"] = [cut for cut in XL_CUTOFFS if cut < size] or [max(size // 4, 1)]
    return KernelLMConfig(**_with(KernelLMConfig, fields, system, vocab_size, overrides))


def translator(
    name: str = "tiny",
    *,
    system: str | None = None,
    vocab_size: int | None = None,
    **overrides: Any,
) -> KernelTranslatorConfig:
    """The config of a translator: iwslt or tiny."""
    fields = _find(TRANSLATOR, name, "translator")
    return KernelTranslatorConfig(
        **_with(KernelTranslatorConfig, fields, system, vocab_size, overrides)
    )


def vit(name: str = "tiny", *, system: str | None = None, **overrides: Any) -> KernelViTConfig:
    """The config of a vision transformer: deit-tiny, deit-small, cifar or tiny.

    Without a system, positions of cifar and tiny are a product of a height and a width kernel.
    `kundu2026` has no positions of its own, so learned ones are added to its patches.
    """
    fields = _find(VIT, name, "vision")
    if systems.is_gaussian(system):
        overrides = {"input_position": "learned"} | overrides
    if "id2label" in overrides:
        # The names say how many classes there are.
        fields.pop("num_labels", None)
    return KernelViTConfig(**_with(KernelViTConfig, fields, system, None, overrides))


def _nano(depth: int) -> dict[str, Any]:
    if not isinstance(depth, int) or depth < 1:
        raise ValueError(f"depth must be a whole number from 1 up, got {depth!r}")
    d_model = -(-64 * depth // 128) * 128
    return {"num_layers": depth, "d_model": d_model, "num_heads": d_model // 128}


def _find(presets: Mapping[str, dict[str, Any]], name: str, what: str) -> dict[str, Any]:
    if name not in presets:
        raise ValueError(f"there is no {what} preset {name!r}; {suggest(name, presets)}")
    return dict(presets[name])


def _with(
    config: type[KernelConfig],
    fields: dict[str, Any],
    system: str | None,
    vocab_size: int | None,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    # transformers' configs keep any name, and a slip of the pen would change nothing.
    known = [n for n in inspect.signature(config).parameters if n != "kwargs"]
    for name in overrides:
        if name not in (*known, *config.attribute_map, *LABELS, "trust_kernels"):
            raise ValueError(f"a {config.model_type} has no field {name!r}; {suggest(name, known)}")
    given = {"system": system, "vocab_size": vocab_size}
    if system is not None or overrides.get("position") is not None or _reads_places(overrides):
        fields = {name: x for name, x in fields.items() if name not in POSITIONS}
    if system is not None:
        fields.pop("system_options", None)
    return fields | {n: x for n, x in given.items() if x is not None} | dict(overrides)


def _reads_places(overrides: Mapping[str, Any]) -> bool:
    """Whether a kernel is given that reads more than the content."""
    kernel = overrides.get("kernel")
    if isinstance(kernel, str):
        kernel = parse.kernel(kernel, own.trusted(overrides.get("trust_kernels")))
    return isinstance(kernel, Kernel) and bool(kernel.query_parts - {"content"})
