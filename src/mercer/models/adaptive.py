"""Adaptive input and softmax: rare tokens have narrower vectors.

The vocabulary is cut at `cutoffs`. Part n has vectors of width d / div^n, projected to d. Token ids
must be sorted by frequency, the most frequent first. The first softmax is over the tokens of the
first part and one entry for each other part: log p(token) = log p(part) + log p(token | part).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..term.layout import accumulator


def split_vocabulary(
    vocab_size: int, d_model: int, cutoffs: Sequence[int], div: int
) -> list[tuple[int, int, int]]:
    """First token, number of tokens and width of every part."""
    edges = [0, *cutoffs, vocab_size]
    if len(edges) < 3 or any(a >= b for a, b in pairwise(edges)):
        raise ValueError(
            f"cutoffs must rise from above 0 to below the vocabulary of {vocab_size}, "
            f"got {list(cutoffs)}"
        )
    if div < 1:
        raise ValueError(f"div must be at least 1, got {div}")
    return [
        (first, last - first, max(d_model // div**n, 1))
        for n, (first, last) in enumerate(pairwise(edges))
    ]


def _make_tables(parts: Sequence[tuple[int, int, int]]) -> nn.ModuleList:
    return nn.ModuleList(nn.Embedding(size, width) for _, size, width in parts)


def _project(width: int, other: int) -> nn.Module:
    return nn.Identity() if width == other else nn.Linear(width, other, bias=False)


class AdaptiveEmbedding(nn.Module):
    """The vector of a token, from the table of its part."""

    def __init__(self, vocab_size: int, d_model: int, cutoffs: Sequence[int], div: int) -> None:
        super().__init__()
        self.parts = split_vocabulary(vocab_size, d_model, cutoffs, div)
        self.d_model = d_model
        self.tables = _make_tables(self.parts)
        self.up = nn.ModuleList(_project(width, d_model) for _, _, width in self.parts[1:])

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, d_model]."""
        # Compute every part for every place, then select: shapes do not depend on the data.
        out: Tensor | None = None
        for n, (first, size, _) in enumerate(self.parts):
            inside = (ids >= first) & (ids < first + size)
            x = self.tables[n]((ids - first).clamp(0, size - 1))
            x = x if n == 0 else self.up[n - 1](x)
            x = torch.where(inside[..., None], x, 0.0)
            out = x if out is None else out + x
        assert out is not None
        return out


class AdaptiveSoftmax(nn.Module):
    """log p(token), in two steps; tied, it reads the tables of the embedding.

    With `bias`, each token has a number that is added to its score.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        cutoffs: Sequence[int],
        div: int,
        *,
        tied: bool,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.token_bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None
        self.parts = split_vocabulary(vocab_size, d_model, cutoffs, div)
        self.tables = None if tied else _make_tables(self.parts)
        self.down = nn.ModuleList(_project(d_model, width) for _, _, width in self.parts[1:])
        self.cluster = nn.Linear(d_model, len(self.parts) - 1)

    @property
    def read_tables(self) -> int:
        """How many table weights it reads for a token."""
        return sum(size * width for _, size, width in self.parts)

    def forward(self, x: Tensor, tables: nn.ModuleList | None = None) -> Tensor:
        """log p of all tokens, [B, T, vocab]."""
        head = self._head(x, tables)
        short = self.parts[0][1]
        each = [head[..., :short]]
        for n in range(1, len(self.parts)):
            each.append(head[..., short + n - 1, None] + self._tail(x, n, tables))
        return torch.cat(each, -1)

    def loss(
        self,
        x: Tensor,
        labels: Tensor,
        tables: nn.ModuleList | None = None,
        num_items: Tensor | int | None = None,
        shifted: Tensor | None = None,
    ) -> Tensor:
        """The mean of -log p of the labels, without forming all probabilities.

        `shifted` are those of the next place, where they are not all in `labels`.
        """
        if shifted is None:
            x, shifted = x[:, :-1], labels[:, 1:]
        x, target = x.flatten(0, 1), shifted.flatten()
        head = self._head(x, tables)
        short = self.parts[0][1]
        total = head.new_zeros(())
        for n, (first, size, _) in enumerate(self.parts):
            rows = ((target >= first) & (target < first + size)).nonzero().squeeze(-1)
            local = (target[rows] - first)[:, None]
            if n == 0:
                total = total + head[rows].gather(-1, local).sum()
                continue
            total = total + head[rows, short + n - 1].sum()
            total = total + self._tail(x[rows], n, tables).gather(-1, local).sum()
        count = (target != -100).sum() if num_items is None else num_items
        return -total / count

    def _table(self, n: int, tables: nn.ModuleList | None) -> Tensor:
        chosen = tables if self.tables is None else self.tables
        assert chosen is not None
        weight = chosen[n].weight
        assert isinstance(weight, Tensor)
        return weight

    def _head(self, x: Tensor, tables: nn.ModuleList | None) -> Tensor:
        scores = F.linear(x, self._table(0, tables), self._bias(0))
        return _log_softmax(torch.cat([scores, self.cluster(x)], -1))

    def _tail(self, x: Tensor, n: int, tables: nn.ModuleList | None) -> Tensor:
        return _log_softmax(F.linear(self.down[n - 1](x), self._table(n, tables), self._bias(n)))

    def _bias(self, n: int) -> Tensor | None:
        first, size, _ = self.parts[n]
        return None if self.token_bias is None else self.token_bias[first : first + size]


def _log_softmax(scores: Tensor) -> Tensor:
    """In float32, or in float64 if the scores are."""
    return scores.to(accumulator(scores.dtype)).log_softmax(-1)
