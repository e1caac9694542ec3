"""The weights of a Llama model in a KernelLM: softmax attention with rotary positions is a kernel.

exp(<R_i q_i, R_j k_j> / sqrt(D)) is `Exponential()` with `Rotary(base)`; the rest is a pre-norm
block with RMS norms and a gated net.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
import transformers
from torch import Tensor

from ..names import suggest
from .lm import KernelLM
from .lm_config import KernelLMConfig

# Our names of the parts of a layer, and theirs.
LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
WHOLE = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def from_llama(model: Any, **fields: Any) -> KernelLM:
    """A KernelLM with the weights of a LlamaForCausalLM, and with the same logits.

    Args:
        model: the model, or what `from_pretrained` takes: a folder, or a name on the hub.
        fields: of `KernelLMConfig`, in place of those that follow from the model, such as
            `kernel="RBF()"`. Parameters that Llama does not have start as in a new model.
    """
    if isinstance(model, str | os.PathLike):
        model = transformers.AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
    if not isinstance(model, transformers.LlamaForCausalLM):
        raise ValueError(f"model must be a LlamaForCausalLM, got {type(model).__name__}")
    known = [name for name in inspect.signature(KernelLMConfig).parameters if name != "kwargs"]
    for name in fields:
        if name not in known:
            raise ValueError(f"a mercer-lm has no field {name!r}; {suggest(name, known)}")
    new: Any = KernelLM(KernelLMConfig(**(describe(model.config) | fields)))
    new = new.to(model.dtype)
    try:
        found = new.load_state_dict(_renamed(model), strict=False)
    except RuntimeError as error:
        raise ValueError(f"the weights do not fit these fields: {error}") from None
    lost = [name for name in found.missing_keys if not {"kernel", "position"} & {*name.split(".")}]
    if lost or found.unexpected_keys:
        names = ", ".join(sorted([*lost, *found.unexpected_keys])[:3])
        raise ValueError(f"the weights do not fit these fields: {names}")
    read: KernelLM = new.train(model.training)
    return read


def describe(config: Any) -> dict[str, Any]:
    """The fields of a KernelLMConfig for a LlamaConfig, or ValueError."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"rotary positions scaled by {kind!r} are not known here, only plain ones")
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ValueError(
            f"head_dim must be hidden_size / num_attention_heads, got {config.head_dim} for "
            f"{config.hidden_size} / {config.num_attention_heads}"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act must be 'silu', got {config.hidden_act!r}")
    if config.attention_bias != config.mlp_bias:
        raise ValueError("attention_bias and mlp_bias must be both True or both False")
    base = rope.get("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "d_ff": config.intermediate_size,
        "context_length": config.max_position_embeddings,
        "position": f"Rotary({float(base)})",
        "norm": "rms",
        "norm_eps": config.rms_norm_eps,
        "mlp": "gated",
        "activation": "silu",
        "bias": config.attention_bias,
        "attention_dropout": float(config.attention_dropout),
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def _renamed(model: Any) -> dict[str, Tensor]:
    """The weights by our names."""
    names = {theirs: ours for ours, theirs in WHOLE.items()}
    for n in range(model.config.num_hidden_layers):
        names |= {f"model.layers.{n}.{t}": f"blocks.{n}.{o}" for o, t in LAYER.items()}
    with torch.no_grad():
        state = model.state_dict()
    parts = {name: name.rpartition(".") for name in state}
    return {f"{names.get(p, p)}.{last}": state[name] for name, (p, _, last) in parts.items()}
