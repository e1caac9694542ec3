"""n-gram models of token ids: the perplexity of one corpus under another, as a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .style import Distances


class NGrams:
    """p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h)): Witten and Bell's interpolation.

    T(h) is how many different tokens follow h, and h' is h without its first token. The shortest
    history backs off to 1 / vocab_size, so every token has a probability.
    """

    def __init__(self, ids: object, vocab_size: int, order: int = 2) -> None:
        import numpy as np

        if order < 1 or vocab_size < 1 or vocab_size**order >= 2**63:
            raise ValueError(
                "order and vocab_size must be at least 1 and vocab_size^order below 2^63, got "
                f"order {order} and {vocab_size} tokens"
            )
        self.vocab_size, self.order = vocab_size, order
        tokens = self._read(ids)
        # For each length: the n-grams, their counts; the histories, their counts and followers.
        self.levels = []
        for length in range(1, order + 1):
            grams, counts = np.unique(self._code(tokens, length), return_counts=True)
            heads, first = np.unique(grams // vocab_size, return_index=True)
            totals = np.add.reduceat(counts, first) if len(first) else counts
            kinds = np.diff(np.append(first, len(grams)))
            self.levels.append((grams, counts, heads, totals, kinds))

    def probabilities(self, ids: object) -> Any:
        """The probability of each token, given up to order - 1 tokens before it."""
        import numpy as np

        tokens = self._read(ids)
        p = np.full(len(tokens), 1 / self.vocab_size)
        for length, (grams, counts, heads, totals, kinds) in enumerate(self.levels, 1):
            # The first tokens have no history of this length.
            codes = self._code(tokens, length)
            before = p[length - 1 :]
            many = _find(heads, codes // self.vocab_size, totals)
            follow = _find(heads, codes // self.vocab_size, kinds)
            found = _find(grams, codes, counts)
            longer = (found + follow * before) / np.maximum(many + follow, 1)
            p[length - 1 :] = np.where(many > 0, longer, before)
        return p

    def cross_entropy(self, ids: object) -> float:
        """The mean of -ln p, so that its exponential is the perplexity."""
        import numpy as np

        return float(-np.log(self.probabilities(ids)).mean())

    def _read(self, ids: object) -> Any:
        import numpy as np

        tokens = np.asarray(ids).reshape(-1).astype(np.int64)
        if not len(tokens) or not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise ValueError(f"ids must be one or more numbers from 0 to {self.vocab_size - 1}")
        return tokens

    def _code(self, tokens: Any, length: int) -> Any:
        """Each n-gram as one number."""
        end = len(tokens) - length + 1
        code = tokens[: max(end, 0)] * 0
        for n in range(length):
            code = code * self.vocab_size + tokens[n : max(end, 0) + n]
        return code


def _find(known: Any, wanted: Any, values: Any) -> Any:
    """The values of the wanted codes, and 0 for unknown ones."""
    import numpy as np

    if not len(known):
        return np.zeros(len(wanted), np.int64)
    place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[place] == wanted, values[place], 0)


def ngram_distances(texts: Mapping[str, object], vocab_size: int, order: int = 2) -> Distances:
    """Row n, column m: what the model of text m needs more for text n than that of n, in nats.

    The nearest of a row is the corpus under which the text has the least perplexity.
    """
    models = [NGrams(ids, vocab_size, order) for ids in texts.values()]
    rows = [[model.cross_entropy(ids) for model in models] for ids in texts.values()]
    matrix = torch.tensor(rows, dtype=torch.float64)
    return Distances(tuple(texts), matrix - matrix.diagonal()[:, None])
