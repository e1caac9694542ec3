"""What every head of a patched model does on a text: a table of `mercer.inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ...inspect import Records, heads
from ...nn import TokenKernels
from .layers import attention_layers
from .patch import base_of, is_patched, tokens_of

# A model is called with text, ids [B, T], or arguments by name.
Text = str | Tensor | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class HeadReport:
    """One head on a text, averaged over its tokens.

    Attributes:
        layer, head: the name of the layer in the model, and the number of the head.
        kernel: its formula, with its learned numbers.
        bandwidth: of the first kernel that has one.
        neighbours: the effective neighbourhood, exp of the entropy of a row of weights.
        visible: how many keys a row sees.
        self_weight, distance: the weight on the token itself, and the mean |i - j|; None in
            cross-attention.
        deviation: the mean |kernel - Dirac| of the tokens; None without token kernels.
    """

    layer: str
    head: int
    kernel: str
    bandwidth: float | None
    neighbours: float
    visible: float
    self_weight: float | None
    distance: float | None
    deviation: float | None


class Report(Records[HeadReport]):
    """A row for each head, layer by layer."""

    def plot(self, axes: Any = None, *, of: str = "neighbours") -> Any:
        """A map of layers and heads, coloured by one of the numbers, on matplotlib's axes."""
        from ...inspect.plots import plot_heads

        return plot_heads(self, axes, of=of)  # type: ignore[arg-type]


def report(model: nn.Module, text: Text, *, tokenizer: Any = None, length: int = 1024) -> Report:
    """A row for each head of every layer: bandwidth, neighbourhood, deviation of token kernels.

    Args:
        model: a patched model.
        text: text, ids [B, T], or the arguments of the model by name.
        tokenizer: of the text; by default that of the folder or name that the model came from.
        length: how many tokens of a text are read.
    """
    base = base_of(model)
    layers = attention_layers(base)
    if not all(map(is_patched, layers)):
        raise ValueError(
            f"{type(base).__name__} is not patched: hf.patch(model, 'Exponential()') reads a model "
            "as it came"
        )
    batch = _batch(base, text, tokenizer, length)
    numbers = {layer.name: layer.number for layer in layers}
    tokens, ids = tokens_of(base), batch.get("input_ids")
    rows = []
    for row in heads(base, batch):
        name = row.layer.split(".mercer")[0]
        deviation = None
        if tokens is not None and isinstance(ids, Tensor):
            deviation = _deviation(tokens, ids, numbers[name], row.head)
        same = {f.name: getattr(row, f.name) for f in fields(HeadReport) if hasattr(row, f.name)}
        rows.append(HeadReport(**same | {"layer": name, "deviation": deviation}))
    return Report(tuple(rows))


def _batch(base: Any, text: Text, tokenizer: Any, length: int) -> Mapping[str, Any]:
    if isinstance(text, Mapping):
        return text
    if isinstance(text, Tensor):
        return {"input_ids": _checked(base, text)}
    if not isinstance(text, str):
        raise ValueError(
            "a report reads text, ids [B, T] as a tensor, or the arguments of the model by name, "
            f"got {type(text).__name__}"
        )
    if tokenizer is None:
        tokenizer = _tokenizer_of(base)
    ids = tokenizer(text)["input_ids"][:length]
    if not ids:
        raise ValueError("the text has no tokens")
    return {"input_ids": torch.tensor([ids], device=base.device)}


def _checked(base: Any, ids: Tensor) -> Tensor:
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not whole or ids.dim() != 2 or not ids.numel():
        raise ValueError(f"ids must be whole numbers [B, T], got {ids.dtype} {list(ids.shape)}")
    count = getattr(base.get_input_embeddings(), "num_embeddings", None)
    outside = ids[(ids < 0) | (ids >= count)] if count is not None else ids[:0]
    if outside.numel():
        raise ValueError(f"token id {int(outside[0])} is outside the model's {count} tokens")
    return ids


def _tokenizer_of(base: Any) -> Any:
    from transformers import AutoTokenizer

    path = getattr(base.config, "_name_or_path", "")
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception:
        where = f"there is none in {path!r}" if path else "it does not say where it came from"
        raise ValueError(
            f"the model needs a tokenizer for the text, but {where}: give tokenizer=…, or ids "
            "[B, T] in place of the text"
        ) from None


def _deviation(tokens: TokenKernels, ids: Tensor, layer: int, head: int) -> float | None:
    """The mean deviation of these tokens in a head."""
    if not tokens.acts_on(layer):
        return None
    each = tokens.deviations().mean(2)  # [vocab, layers or 1, heads or 1]
    column = tokens.layers.index(layer) if isinstance(tokens.layers, tuple) else layer
    column = column if each.shape[1] > 1 else 0
    return float(each[ids.flatten(), column, head if each.shape[2] > 1 else 0].mean())
