"""The weights of an attention layer, for people who plot them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils.output_capturing import _active_collector

# The most keys of a table of weights. It has a number for each pair, in every layer and head.
MOST_KEYS = 2048


def are_wanted(options: Mapping[str, Any]) -> bool:
    """Whether a call of a layer has to give its weights.

    Models pass `output_attentions` on to their layers, or have hooks that collect the weights.
    """
    if options.get("output_attentions"):
        return True
    # A graph cannot read the variable of a context, and its model sets a plain one.
    readable = _active_collector.compiling or not torch.compiler.is_compiling()
    collected = _active_collector.get() if readable else None
    return any("attentions" in key for key in collected or ())


def weights_of(run: Callable[[Tensor], Tensor], k: Tensor) -> Tensor:
    """P, [B, H, Q, K], of an attention that gives P v for values v: that of the unit vectors.

    Without token kernels it is w(q_i, k_j) / sum_j w(q_i, k_j).
    """
    batch, heads, keys = k.shape[:3]
    if keys > MOST_KEYS:
        raise ValueError(
            f"output_attentions is for at most {MOST_KEYS} keys, got {keys}: a table of weights "
            "has a number for each pair of tokens in every head; hf.report summarises longer texts"
        )
    units = torch.eye(keys, dtype=k.dtype, device=k.device)
    return run(units.expand(batch, heads, keys, keys))
