"""The attention layers of a model: which there are, and which a person means.

A layer is a module whose `forward` looks its attention function up in transformers'
AttentionInterface. The names are read from the compiled code, so nothing has to run.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...names import suggest

# The layers of a person: all, numbers, names of layers, or of modules that contain layers.
Which = str | int | Sequence[str | int]
SELECTION = '"all", a number, a name, or a list of these'
# Arguments of attention functions that change the scores; no kernel of q and k has them.
ADDED = {
    "position_bias": "adds a bias for each pair of positions to the scores",
    "softcap": "caps the scores with tanh",
    "s_aux": "gives each head a sink, a score without a key",
    "indices": "chooses keys by an index of its own",
    "block_indices": "chooses keys by an index of its own",
}


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model."""

    number: int
    name: str
    module: nn.Module

    @property
    def heads(self) -> int | None:
        """How many query heads it has, or None if it does not say."""
        names = ("num_heads", "num_attention_heads", "n_heads", "n_head")
        return _whole(self.module, *names) or _whole(self._config, *names)

    @property
    def dim(self) -> int | None:
        """The features of a head, or None if it does not say."""
        return _whole(self.module, "head_dim", "attention_head_size")

    @property
    def own(self) -> bool:
        """Whether its queries and keys are of one sequence."""
        return not any(part in self.name.lower() for part in ("cross", "encoder_attn", "encdec"))

    @property
    def _config(self) -> object:
        return getattr(self.module, "config", None)

    def __str__(self) -> str:
        return f"layer {self.number} ({self.name})"


def attention_layers(model: nn.Module) -> list[Layer]:
    """The attention layers of a model, in its order; ValueError if its attention is its own."""
    found = [(name, m) for name, m in model.named_modules() if _asks_the_interface(m)]
    kind = type(model).__name__
    if not found:
        raise ValueError(
            f"{kind} computes its attention itself and not through transformers' "
            "AttentionInterface, so its kernel cannot be replaced"
        )
    for name, module in found:
        for argument in ("position_bias", "s_aux", "indices", "block_indices"):
            if argument in _words(module):
                raise ValueError(
                    f"{kind} cannot be patched: its attention ({name}) {ADDED[argument]}, which a "
                    "kernel of queries and keys does not have"
                )
        capped = getattr(module, "attn_logit_softcapping", None) is not None
        if capped and "softcap" in _words(module):
            raise ValueError(
                f"{kind} cannot be patched: its attention ({name}) {ADDED['softcap']}, which a "
                "kernel of queries and keys does not have; its config has attn_logit_softcapping, "
                "which may be None"
            )
    numbers = [getattr(module, "layer_idx", None) for _, module in found]
    # A decoder with cross-attention has a number twice; then the order counts.
    own = all(isinstance(n, int) for n in numbers) and len(set(numbers)) == len(numbers)
    return [
        Layer(number if own and number is not None else n, name, module)
        for n, (number, (name, module)) in enumerate(zip(numbers, found, strict=True))
    ]


def choose(layers: Sequence[Layer], which: Which) -> list[Layer]:
    """The layers that a person means."""
    if which == "all":
        return list(layers)
    asked: object = [which] if isinstance(which, str | int) else which
    if not isinstance(asked, Iterable) or not (several := list(asked)):
        raise ValueError(f"layers must be {SELECTION}, got {which!r}")
    chosen: dict[int, Layer] = {}
    for one in several:
        for layer in _named(layers, one):
            chosen[layer.number] = layer
    return [layer for layer in layers if layer.number in chosen]


def _named(layers: Sequence[Layer], one: str | int) -> Iterator[Layer]:
    """The layers of one number, of one name, or inside of one module."""
    if isinstance(one, bool) or not isinstance(one, str | int):
        raise ValueError(f"layers must be {SELECTION}, got {one!r}")
    found = [
        layer
        for layer in layers
        if layer.number == one
        or layer.name == one
        or (isinstance(one, str) and layer.name.startswith(f"{one}."))
    ]
    if found:
        yield from found
    elif isinstance(one, int):
        raise ValueError(f"there is no attention layer {one}: the model has {_range(layers)}")
    else:
        hint = suggest(one, [layer.name for layer in layers])
        raise ValueError(f"there is no attention layer {one!r} in the model; {hint}")


def _range(layers: Sequence[Layer]) -> str:
    numbers = [layer.number for layer in layers]
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
        return f"layers {numbers[0]} to {numbers[-1]}"
    return f"layers {', '.join(map(str, numbers))}" if len(numbers) > 1 else f"layer {numbers[0]}"


def _asks_the_interface(module: nn.Module) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in _words(module)


def _words(module: nn.Module) -> set[str]:
    """The names in the code of its `forward`, of globals, attributes and keyword arguments."""
    forward: Any = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return set(_names(code)) if code is not None else set()


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, tuple):
            yield from (word for word in constant if isinstance(word, str))
        elif isinstance(constant, types.CodeType):
            yield from _names(constant)


def _whole(source: object, *names: str) -> int | None:
    found = (getattr(source, name, None) for name in names)
    return next((n for n in found if isinstance(n, int) and not isinstance(n, bool)), None)
