"""Run a model once and look at every call of its attention layers.

Each call is looked at when it happens, so the inputs of one layer are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import Kernel
from ..nn import Cache, GaussianAttention, KernelAttention, SegmentMemory
from ..nn.weights import Call, read_call

# What a model is called with: one tensor, positional arguments, or arguments by name.
Batch = Tensor | tuple[object, ...] | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """A layer inside a model of another library, in one of its calls.

    The module that computes its attention has a method `read_call`, which takes the arguments of
    its `forward` and gives this.
    """

    joined_kernel: Kernel
    num_heads: int
    call: Call
    own: bool


Layer = KernelAttention | GaussianAttention | Hosted


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One call of one layer of attention, before it runs."""

    name: str
    layer: Layer
    call: Call
    # Whether queries and keys are of one sequence.
    own: bool
    # The place of the first query and of the first key, from the beginning of the sequence.
    first_query: int
    first_key: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries and keys."""
        batch, _, num_keys, _ = self.call.v.shape
        return batch, self.layer.num_heads, self.call.q.length, num_keys


def attention_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of attention in a model, with their names; ValueError if there are none."""
    found = [
        (name or type(module).__name__, module)
        for name, module in model.named_modules()
        if isinstance(module, KernelAttention | GaussianAttention) or _reads(module)
    ]
    if not found:
        raise ValueError(f"there is no layer of Mercer's attention in {type(model).__name__}")
    return found


@torch.no_grad()
def watch(model: nn.Module, batch: Batch, look: Callable[[Seen], None]) -> None:
    """Call the model with the batch, and `look` with each call of an attention layer.

    Nothing is dropped: the model runs in evaluation mode, and is then as it was.
    """
    hooks = [
        layer.register_forward_pre_hook(_looking(name, look), with_kwargs=True)
        for name, layer in attention_layers(model)
    ]
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, tuple):
            model(*batch)
        else:
            model(batch)
    finally:
        for module, training in modes.items():
            module.training = training
        for hook in hooks:
            hook.remove()


def _looking(
    name: str, look: Callable[[Seen], None]
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _reads(layer):
            look(_hosted(name, layer.read_call(*args, **kwargs)))  # type: ignore[operator]
            return
        assert isinstance(layer, KernelAttention | GaussianAttention)
        given = dict(zip(("x", "context"), args, strict=False)) | kwargs
        x, context, cache = given.pop("x"), given.pop("context", None), given.get("cache")
        call = read_call(layer, x, context, **given)
        first, num_keys = 0, call.v.shape[2]
        if isinstance(cache, Cache) and context is None:
            first = cache.length
        elif isinstance(cache, SegmentMemory):
            first = cache.seen
        own = context is None
        look(
            Seen(
                name=name, layer=layer, call=call, own=own, first_query=first,
                first_key=first + x.shape[1] - num_keys if own else 0,
            )
        )  # fmt: skip

    return hook


def _reads(module: nn.Module) -> bool:
    """Whether it is inside a model of another library; wrappers pass on attributes of objects."""
    return hasattr(type(module), "read_call")


def _hosted(name: str, layer: Hosted) -> Seen:
    # The last query stands beside the last key.
    past = max(layer.call.k.length - layer.call.q.length, 0) if layer.own else 0
    return Seen(
        name=name, layer=layer, call=layer.call, own=layer.own, first_query=past, first_key=0
    )
