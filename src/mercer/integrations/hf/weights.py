"""The weights of an attention layer, for people who plot them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...filters import Filter
from ...kernels import Kernel
from ...smoother import smooth

# The most keys of a table of weights. It has a number for each pair, in every layer and head.
MOST_KEYS = 2048


def weights_of(kernel: Kernel, q: Tensor, k: Tensor, filter: Filter) -> Tensor:
    """w(q_i, k_j) / sum_j w(q_i, k_j), [B, H, Q, K]: what smoothing makes of the unit vectors."""
    batch, heads, keys = k.shape[:3]
    if keys > MOST_KEYS:
        raise ValueError(
            f"output_attentions is for at most {MOST_KEYS} keys, got {keys}: a table of weights "
            "has a number for each pair of tokens in every head; hf.report summarises longer texts"
        )
    units = torch.eye(keys, dtype=q.dtype, device=q.device).expand(batch, heads, keys, keys)
    return smooth(kernel, q, k, units, filter=filter)
