"""Token kernels in a model: where they live, and how the ids of tokens reach its attention.

The module that is called with `input_ids` owns the token kernels of the model. A hook before its
forward adds `token_ids`, the ids of all keys, to the arguments, which transformers passes on to
every attention layer. The ids of earlier calls are in the cache, as one more layer of it, so that
whatever a cache goes through happens to them too: crop, reorder, repeat, select, reset.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from ...nn import TokenKernels
from ...nn.tokens import Taps
from ..moving import kept


class Tokens(nn.Module):
    """The token kernels of a model, as its submodule `mercer_tokens`."""

    def __init__(self, kernels: TokenKernels) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, token_ids: Tensor, layer: int) -> Taps:
        """The taps of these tokens for a layer."""
        return self.kernels(token_ids, layer)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(kept(fn), recurse)


class PastIds(DynamicLayer):
    """The ids of all tokens of a cache, as keys [B, 1, T, 1]; its values have no features."""

    # A compiled graph would have to know their number.
    is_compileable = False
    supports_early_init = False

    def append(self, ids: Tensor) -> None:
        self.update(ids[:, None, :, None], ids.new_empty(ids.shape[0], 1, ids.shape[1], 0))

    def ids(self) -> Tensor:
        """[B, T]."""
        assert self.keys is not None
        return self.keys[:, 0, :, 0]


def give_ids(module: nn.Module) -> None:
    """Let this module, which is called with `input_ids`, pass ids on to its attention."""
    module.register_forward_pre_hook(_add_ids, with_kwargs=True)
    module.register_forward_hook(_keep_ids, with_kwargs=True)


def takes_ids(module: nn.Module) -> bool:
    """Whether a module is called with `input_ids`."""
    return "input_ids" in inspect.signature(type(module).forward).parameters


def _add_ids(
    module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = named.get("token_ids")
    ids = _argument(module, "input_ids", args, named) if ids is None else ids
    if not isinstance(ids, Tensor):
        raise ValueError(
            "the token kernels of this model need the ids of the tokens, but it was called "
            "without input_ids: beside inputs_embeds, give token_ids, a tensor [B, T]"
        )
    embeds = _argument(module, "inputs_embeds", args, named)
    if isinstance(embeds, Tensor) and ids.shape != embeds.shape[:2]:
        raise ValueError(
            f"token_ids must be {list(embeds.shape[:2])}, as inputs_embeds, got {list(ids.shape)}"
        )
    cache = _own_layers(_argument(module, "past_key_values", args, named))
    if cache is not None:
        past, length = _find(cache), cache.get_seq_length()
        known = 0 if past is None else past.get_seq_length()
        if torch.compiler.is_compiling() and isinstance(length, Tensor):
            raise ValueError(
                "token kernels cannot read a static cache in a compiled graph: give generate "
                "disable_compile=True, or another cache"
            )
        if int(length) != known:
            raise ValueError(
                f"the cache has keys of {int(length)} tokens, and the ids of {known}: token "
                "kernels need a cache that this model has filled from its start"
            )
        if past is not None and known:
            ids = torch.cat([past.ids(), ids], 1)
    return args, {**named, "token_ids": ids}


def _keep_ids(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
    """Keep the ids in the cache, which the call itself may have made."""
    made = getattr(out, "past_key_values", None)
    if made is None and isinstance(out, tuple):
        made = next((x for x in out if isinstance(x, Cache)), None)
    given = _argument(module, "past_key_values", args, named)
    cache = _own_layers(given if made is None else made)
    if cache is None or not cache.layers:
        return
    past = _find(cache)
    if past is None:
        past = PastIds()
        cache.layers.append(past)
    past.append(named["token_ids"][:, past.get_seq_length() :])


def _argument(module: nn.Module, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The argument of this name, wherever it stands."""
    if name in named or not args:
        return named.get(name)
    places = list(inspect.signature(type(module).forward).parameters)[1:]
    place = places.index(name) if name in places else len(args)
    return args[place] if place < len(args) else None


def _own_layers(cache: Any) -> Any:
    """The cache of self-attention."""
    return getattr(cache, "self_attention_cache", cache)


def _find(cache: Any) -> PastIds | None:
    return next((x for x in cache.layers if isinstance(x, PastIds)), None)
