"""Rows of attention: which tokens a token looks at, head by head.

The output is linear in the values, out = P v, so row i of P is the gradient of out_i by the values.
It comes from the forward and the backward of the backend that runs the layer, with its log_mass:
exact for every kernel, filter and token kernel. P itself is never formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .calls import Batch, Seen, watch
from .records import Records

# How many rows are formed at a time.
TOGETHER = 64


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """Rows of one layer.

    Attributes:
        layer: the name of the layer in the model.
        places: of the queries, counted from the beginning of the sequence.
        first_key: the place of the first key; before 0 there are none.
        own: whether keys and queries are of one sequence.
        weights: of each head, row and key, [H, rows, K].
    """

    layer: str
    places: tuple[int, ...]
    first_key: int
    own: bool
    weights: Tensor

    def top(self, head: int, row: int, most: int = 10) -> list[tuple[int, float]]:
        """The places of the largest weights of a row, with the weights, the largest first."""
        found = self.weights[head, row].sort(descending=True, stable=True)
        places, weights = found.indices[:most].tolist(), found.values[:most].tolist()
        return [(place + self.first_key, w) for place, w in zip(places, weights, strict=True) if w]


class Rows(Records[LayerRows]):
    """Rows of every layer."""

    def to_pandas(self) -> Any:
        """A line for each weight that is not zero: layer, head, query, key, weight."""
        lines = [
            (one.layer, h, one.places[n], one.first_key + k, one.weights[h, n, k].item())
            for one in self
            for h, n, k in one.weights.nonzero().tolist()
        ]
        import pandas

        return pandas.DataFrame(lines, columns=["layer", "head", "query", "key", "weight"])

    def plot(self, axes: Any = None, *, layer: int = 0, tokens: Sequence[str] | None = None) -> Any:
        """The rows of one layer as bars of weight by place, a line for each head."""
        from .plots import plot_rows

        return plot_rows(self, axes, layer=layer, tokens=tokens)


def rows(
    model: nn.Module, batch: Batch, places: Sequence[int] | None = None, *, sequence: int = 0
) -> Rows:
    """The weights that the tokens at these places give to all others, in every layer and head.

    Args:
        model, batch: as for `heads`.
        places: of the tokens that look, counted from 0; by default the last that a layer sees.
        sequence: which sequence of the batch.
    """
    if places is not None and (not places or min(places) < 0):
        raise ValueError(f"places must be one or more numbers from 0 on, got {list(places)}")
    found: list[LayerRows] = []

    def look(seen: Seen) -> None:
        batch_size, _, length, _ = seen.sizes
        if not -batch_size <= sequence < batch_size:
            raise ValueError(f"the batch has {batch_size} sequences, got sequence={sequence}")
        end = seen.first_query + length
        wanted = [end - 1] if places is None else places
        here = [n for n in wanted if seen.first_query <= n < end]
        if here:
            own = [n - seen.first_query for n in here]
            found.append(
                LayerRows(
                    layer=seen.name, places=tuple(here), first_key=seen.first_key, own=seen.own,
                    weights=row_weights(seen, own, sequence),
                )
            )  # fmt: skip

    watch(model, batch, look)
    if not found:
        raise ValueError(f"no layer has a token at {list(places or ())}: the sequence is shorter")
    return Rows(tuple(found))


def row_weights(seen: Seen, queries: Sequence[int], sequence: int = 0) -> Tensor:
    """The weights of these queries of one call, [H, rows, K]."""
    _, heads, _, num_keys = seen.sizes
    call = seen.call
    batch, kv_heads = call.v.shape[:2]
    group = heads // kv_heads
    out = torch.empty(heads, len(queries), num_keys, dtype=call.v.dtype, device=call.v.device)
    for begin in range(0, len(queries), TOGETHER):
        part = list(queries[begin : begin + TOGETHER])
        shape = (batch, kv_heads, num_keys, len(part))
        values = torch.zeros(shape, dtype=call.v.dtype, device=call.v.device, requires_grad=True)
        with torch.enable_grad():
            y = call.smooth(values)  # [B, H, Q, rows]
        for member in range(group):
            # Query heads that share values would be summed, so one of each group at a time.
            pick = torch.zeros_like(y)
            pick[sequence, member::group, part, range(len(part))] = 1
            last = member == group - 1
            (g,) = torch.autograd.grad(y, values, pick, retain_graph=not last)
            out[member::group, begin : begin + len(part)] = g[sequence].mT
    return out
