"""Whether a run has learnt more than the frequencies of tokens.

The baseline is the loss of a model that predicts each token by its share of the training tokens,
p(t) = (count(t) + 1) / (N + V), over the same targets as the model's own loss. A run of `STEPS`
steps or more whose last validation loss is not below the baseline by `MARGIN` nats per token ends
as `STUCK`. Shorter runs are not judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

STEPS = 100
MARGIN = 0.1
STUCK = "not converged (unigram)"
# Frequencies are counted over at most so many training tokens, from the first one on.
MOST = 1 << 24


class Unigram:
    """-log p(t) of every token, [V], from counts."""

    def __init__(self, ids: Any, vocab_size: int) -> None:
        counts = np.bincount(np.asarray(ids[:MOST]).astype(np.int64), minlength=vocab_size) + 1
        self.nats = torch.from_numpy(np.log(counts.sum()) - np.log(counts))

    def total(self, targets: Tensor) -> Tensor:
        """The sum of -log p over targets of at least 0; others are left out."""
        return self.nats.to(targets.device)[targets[targets >= 0]].sum()


def is_stuck(metrics: Mapping[str, Any], steps: int) -> bool:
    """Whether a run has learnt no more than the frequencies of tokens."""
    if steps < STEPS or "unigram_loss" not in metrics:
        return False
    return bool(metrics["eval_loss"] > metrics["unigram_loss"] - MARGIN)
