"""The base of the configs. They are JSON: sizes, and the parts of attention as text.

`system`, `system_options`, `kernel`, `position`, `value` and `filter` are each one entry for all
layers, or a list with one for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from ..nn import TokenKernels
from .block import check_block
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
                raise ValueError(f"{name} must be at least 0 and below 1, got {share}")

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
                f"{what}{name} must have one entry for each of {num_layers} layers, got "
                f"{len(given)}"
            )
        for layer, row in enumerate(each):
            one = given[layer] if listed else given
            if one is not None:
                row[name] = one
    return [Parts(**row).check() for row in each]


def token_kernels(layers: Sequence[Parts], vocab_size: int) -> TokenKernels | None:
    """The TokenKernels that all layers share, or None."""
    each = [parts for parts in layers if parts.tokens is not None]
    if not each:
        return None
    if any(parts.tokens != each[0].tokens for parts in each):
        raise ValueError("all layers share their token kernels, so their options must be the same")
    for parts in each:
        asked = parts.system_options.get("vocab_size", vocab_size)
        if asked != vocab_size:
            raise ValueError(
                f"vocab_size of {parts.system} must be the model's {vocab_size}, got {asked}"
            )
    return TokenKernels(vocab_size, **(each[0].tokens or {}))


def check_whole(**sizes: Any) -> None:
    """Raise ValueError for a size that is not a whole number >= 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a whole number from 1 up, got {size!r}")


def check_names(input_position: object, residual_start: object) -> None:
    """Raise ValueError for an unknown name."""
    if input_position not in (None, "learned", "sinusoid"):
        raise ValueError(
            f"input_position must be 'learned', 'sinusoid' or None, got {input_position!r}"
        )
    if residual_start not in ("scaled", "zero", "plain"):
        raise ValueError(
            f"residual_start must be 'scaled', 'zero' or 'plain', got {residual_start!r}"
        )
