"""Parameters by part, operations per token and memory, by one rule for all systems.

Operations are those of matrix products, 2 for a multiplication with its addition:

    linear maps    2 x their weights, for each token they read
    attention      2 x (E + V) for each head, each term of the kernel and each visible pair, where
                   E is the number of features it lowers to, numbers per key included
    tables         2 x D for each row of a lookup table and each head, for each token
    token kernels  2 x taps x the width of what they mix

Lookups of embeddings, norms and activations count nothing. The backward takes twice the forward, so
that forward and backward are three times as much. Projections of positions are counted for each
token, as in a batch of one. A translator's token is one of the source with one of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..filters import Filter, Full
from ..nn import GaussianAttention, KernelAttention, RelativeSinusoid, TokenKernels
from ..systems import Attention
from .block import FeedForward
from .lm import KernelLM
from .parts import Cost, cost_of
from .translator import KernelTranslator
from .vit import KernelViT

PARTS = (
    "embedding", "attention", "kernel", "token-kernels", "value-embedding", "feed-forward", "norm",
    "head",
)  # fmt: skip
FORWARD_AND_BACKWARD = 3
STATES = {"adamw": 2, "adam": 2, "sgd": 1, "none": 0}


@dataclass(frozen=True, kw_only=True)
class Count:
    """What a model of this length costs."""

    parameters: dict[str, int]
    flops_per_token: float
    length: int
    # Numbers kept for the backward, for each token.
    activations_per_token: int
    logits_per_token: int

    @property
    def total(self) -> int:
        return sum(self.parameters.values())

    def memory_bytes(
        self,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        optimizer: str | None = "adamw",
    ) -> int:
        """About what a training step holds: weights, gradients and states in float32, activations
        in `dtype`, logits in both. With optimizer None, the weights alone, in `dtype`."""
        if optimizer is None:
            return self.total * dtype.itemsize
        if optimizer not in STATES:
            raise ValueError(
                f"optimizer must be one of {', '.join(STATES)} or None, got {optimizer!r}"
            )
        tokens = batch * self.length
        fixed = self.total * 4 * (2 + STATES[optimizer])
        activations = tokens * self.activations_per_token * dtype.itemsize
        return fixed + activations + tokens * self.logits_per_token * (dtype.itemsize + 8)

    def __str__(self) -> str:
        rows = [*self.parameters.items(), ("total", self.total)]
        lines = [f"{name:<16}{number:>15,}" for name, number in rows if number]
        lines.append(f"{'FLOPs per token':<16}{self.flops_per_token:>15,.0f}")
        return "\n".join(lines)


def count(model: PreTrainedModel | PreTrainedConfig, length: int | None = None) -> Count:
    """What a model or a config costs at this length; no weights are made for a config."""
    if isinstance(model, PreTrainedConfig):
        model = build_on_meta(model)
    config: Any = model.config
    length = getattr(config, "places", None) or config.context_length if length is None else length
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    layers = [m for m in model.modules() if isinstance(m, KernelAttention | GaussianAttention)]
    forward = sum(_linear(m, length) for m in model.modules())
    forward += sum(_attention(layer, length, _segments(config, length)) for layer in layers)
    nets = [m for m in model.modules() if isinstance(m, FeedForward)]
    kept = sum(8 * m.d_model for m in layers) + sum(m.kept for m in nets)
    return Count(
        parameters=count_parameters(model),
        flops_per_token=FORWARD_AND_BACKWARD * forward,
        length=length,
        activations_per_token=kept,
        logits_per_token=getattr(config, "vocab_size", 0),
    )


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without its weights."""
    models: tuple[Any, ...] = (KernelLM, KernelTranslator, KernelViT)
    for model in models:
        if isinstance(config, model.config_class):
            with torch.device("meta"):
                built: PreTrainedModel = model(config)
            return built
    raise ValueError(f"there is no model for a {type(config).__name__}")


def count_parameters(model: nn.Module) -> dict[str, int]:
    """How many parameters every part has; shared ones count once."""
    parameters = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        parameters[part_of(name)] += parameter.numel()
    return parameters


def part_of(name: str) -> str:
    """The part of a model that a parameter belongs to, one of PARTS."""
    steps = name.split(".")
    if "token_kernels" in steps:
        return "token-kernels"
    if steps[0] in ("head",):
        return "head"
    if any(step == "norm" or step.endswith("_norm") for step in steps):
        return "norm"
    if "feed_forward" in steps:
        return "feed-forward"
    if "value_embedding" in steps:
        return "value-embedding"
    if {"kernel", "position", "relative_biases"} & set(steps) or steps[-1] in (
        "log_bandwidth",
        "steering",
    ):
        return "kernel"
    return "attention" if {"attention", "cross"} & set(steps) else "embedding"


def _linear(module: nn.Module, length: int) -> float:
    if isinstance(module, nn.Linear | nn.Conv2d):
        # The head of a classifier reads one vector of an image.
        once = isinstance(module, nn.Linear) and getattr(module, "once", False)
        return 2.0 * module.weight.numel() / (length if once else 1)
    if isinstance(module, RelativeSinusoid):
        return 2.0 * module.weight.numel()
    if (tables := getattr(module, "read_tables", None)) is not None:
        return 2.0 * tables
    return 0.0


def _segments(config: Any, length: int) -> list[tuple[int, int]]:
    """Tokens in a segment, and how many remembered states it sees."""
    size = getattr(config, "segment_length", None)
    if size is None or length <= size:
        return [(length, 0)]
    held = config.memory_length or size
    return [(min(size, length - n), min(n, held)) for n in range(0, length, size)]


def _attention(layer: Attention, length: int, segments: list[tuple[int, int]]) -> float:
    # The kernel may have been replaced. On the meta device it cannot run.
    cost = layer.cost if layer.out.weight.is_meta else cost_of(layer)
    assert isinstance(cost, Cost)
    seen = sum(visible_pairs(layer.filter, *segment) for segment in segments) / length
    flops = 2.0 * layer.num_heads * (seen * cost.pair + cost.tables)
    if isinstance(layer, KernelAttention):
        # Keys and values of remembered states are projected again.
        again = sum(before for _, before in segments) / length
        flops += (
            2.0 * again * ((layer.key or layer.query).weight.numel() + layer.value.weight.numel())
        )
        if layer.has_token_kernels:
            assert isinstance(layer.tokens, TokenKernels)
            mixed = len(layer.tokens.on) * layer.num_kv_heads * layer.head_dim
            flops += 2.0 * layer.tokens.size * mixed
    return flops


def visible_pairs(filter: Filter, length: int, before: int = 0) -> float:
    """How many pairs of a query and a key a head sees, with so many keys before the first query."""
    if isinstance(filter, Full):
        return length * (before + length)
    j = torch.arange(before + length, device="cpu")
    seen = 0
    # By rows, since a mask of all pairs may not fit.
    for i in j[before:].split(1024):
        seen += int(filter.mask_of_rows(i, len(j), before)[0].sum())
    return seen / (filter.heads or 1)
