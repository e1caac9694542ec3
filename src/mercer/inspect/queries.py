"""Bandwidths that queries compute for themselves: their spread, the widest and narrowest words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import AdaptiveRBF
from ..nn import GaussianAttention
from .calls import Batch, Seen, watch
from .records import Records

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The bandwidths of one head over the tokens of a text.

    Attributes:
        layer, head: the name of the layer in the model, and the number of the head.
        quantiles: of 5, 25, 50, 75 and 95 per cent of the tokens.
        widest, narrowest: tokens and their mean bandwidths, the most extreme first.
    """

    layer: str
    head: int
    quantiles: tuple[float, ...]
    widest: tuple[tuple[str, float], ...]
    narrowest: tuple[tuple[str, float], ...]


class Spreads(Records[Spread]):
    """A row for each head whose queries have bandwidths of their own."""

    def plot(self, axes: Any = None) -> Any:
        """The quantiles of each head as a line with a mark, on matplotlib's axes."""
        from .plots import plot_spreads

        return plot_spreads(self, axes)


def query_bandwidths(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The bandwidth of every query, [B, H, Q], by the name of the layer; empty if none has."""
    found: dict[str, list[Tensor]] = defaultdict(list)

    def look(seen: Seen) -> None:
        s = _bandwidths(seen)
        if s is not None:
            found[seen.name].append(s.expand(seen.sizes[0], seen.sizes[1], -1).float().cpu())

    watch(model, batch, look)
    return {name: torch.cat(each, -1) for name, each in found.items()}


def spreads(
    model: nn.Module,
    batch: Batch,
    ids: Tensor,
    texts: Sequence[str] | None = None,
    *,
    most: int = 8,
    minimum: int = 2,
) -> Spreads:
    """How the bandwidths of each head differ between tokens.

    Args:
        model, batch: as for `heads`.
        ids: of the tokens, [B, T], in the places of the queries.
        texts: what each id stands for; by default the number itself.
        most: how many tokens to name at each end.
        minimum: only tokens that occur so often are named.
    """
    found = []
    for name, s in query_bandwidths(model, batch).items():
        if s.shape[0] != ids.shape[0] or s.shape[2] != ids.shape[1]:
            raise ValueError(f"ids must be {[s.shape[0], s.shape[2]]}, got {list(ids.shape)}")
        known, index, counts = ids.flatten().cpu().unique(return_inverse=True, return_counts=True)
        often = (counts >= minimum).nonzero()[:, 0]
        words = [str(n) if texts is None else texts[n] for n in known[often].tolist()]
        for h in range(s.shape[1]):
            log = s[:, h].flatten().double().log()
            sums = torch.zeros(len(known), dtype=torch.float64).index_add_(0, index, log)
            means = (sums / counts)[often].exp()
            order = means.argsort(stable=True).tolist()
            ends = order[::-1][:most], order[:most]
            wide, narrow = (tuple((words[n], float(means[n])) for n in end) for end in ends)
            shares = torch.tensor(SHARES, dtype=torch.float64)
            found.append(
                Spread(
                    layer=name, head=h, quantiles=tuple(log.quantile(shares).exp().tolist()),
                    widest=wide, narrowest=narrow,
                )
            )  # fmt: skip
    return Spreads(tuple(found))


def _bandwidths(seen: Seen) -> Tensor | None:
    """s of every query, [B or 1, H or 1, Q]; None where all queries share it."""
    layer, q = seen.layer, seen.call.q
    if isinstance(layer, GaussianAttention):
        return layer.log_scale(q)[..., 0].exp() if layer.adaptive else None
    for kernel in layer.joined_kernel.modules():
        if isinstance(kernel, AdaptiveRBF):
            return kernel.precision(q.part(kernel.on))[..., 0] ** -0.5
    return None
