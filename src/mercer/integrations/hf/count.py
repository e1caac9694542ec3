"""Parameters by part and operations per token of a model of transformers, by the rule of `models`.

Linear maps are counted for each token, and attention for each visible pair of a causal model: 2 D
operations for the score and 2 D for the value, in every query head.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ...filters import Causal
from ...models.count import FORWARD_AND_BACKWARD, PARTS, Count, visible_pairs
from .layers import attention_layers


def count(model: Any, length: int) -> Count:
    """What a language model costs at this length, whether it is patched or not."""
    config = model.config.get_text_config()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
    forward = sum(2.0 * m.weight.numel() for m in linear)
    pairs = visible_pairs(Causal(), length) / length
    layers = attention_layers(model)
    width = config.hidden_size
    for layer in layers:
        heads = layer.heads or config.num_attention_heads
        forward += 4.0 * heads * (layer.dim or width // heads) * pairs
    inner = max((m.weight.numel() // width for m in linear), default=width)
    inner = min(getattr(config, "intermediate_size", None) or 4 * width, inner)
    return Count(
        parameters=_by_part(model, [layer.name for layer in layers]),
        flops_per_token=FORWARD_AND_BACKWARD * forward,
        length=length,
        # As for our own: states around attention, and those inside the feed-forward net.
        activations_per_token=len(layers) * (8 * width + 3 * inner),
        logits_per_token=config.vocab_size,
    )


def _by_part(model: Any, layers: list[str]) -> dict[str, int]:
    """How many parameters each part has; tied ones count once, as embedding."""
    found = dict.fromkeys(PARTS, 0)
    embedding = {id(p) for p in model.get_input_embeddings().parameters()}
    head = model.get_output_embeddings()
    heads = set() if head is None else {id(p) for p in head.parameters()}
    for name, parameter in model.named_parameters():
        steps = name.split(".")
        if "mercer_tokens" in steps:
            part = "token-kernels"
        elif "mercer" in steps:
            part = "kernel"
        elif id(parameter) in embedding:
            part = "embedding"
        elif id(parameter) in heads:
            part = "head"
        elif any(name.startswith(f"{layer}.") for layer in layers):
            part = "attention"
        elif any("norm" in step or step.startswith("ln_") for step in steps):
            part = "norm"
        elif "embed" in name or steps[-2:-1] in (["wpe"], ["wte"]):
            part = "embedding"
        else:
            part = "feed-forward"
        found[part] += parameter.numel()
    return found
