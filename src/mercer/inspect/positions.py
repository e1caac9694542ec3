"""The learned weight of positions against i - j: tables, slopes, sinusoids, buckets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import ALiBi, Buckets, Kernel, Lookup, RelativeSinusoid
from ..kernels.base import members
from ..term.features import Features
from ..term.sinusoids import coefficients, waves
from .calls import Batch, Seen, watch
from .records import Records

# Queries that the mean and the spread are over, and places of kernels on positions.
QUERIES, PLACES = 512, 256


@dataclass(frozen=True, kw_only=True)
class DistanceWeight:
    """The factor of positions in the weight of one head, by distance.

    Attributes:
        layer, head: the name of the layer in the model, and the number of the head.
        kernel: its formula.
        distances: i - j; below 0 are keys after the query.
        log_weight: the mean over queries of the log of the factor.
        spread: its standard deviation over queries; 0 where it does not depend on them.
    """

    layer: str
    head: int
    kernel: str
    distances: tuple[int, ...]
    log_weight: tuple[float, ...]
    spread: tuple[float, ...]


class DistanceWeights(Records[DistanceWeight]):
    """A row for each head and each kernel of positions in it."""

    def plot(self, axes: Any = None, *, layer: str | None = None) -> Any:
        """The weight of each head against the distance, on matplotlib's axes."""
        from .plots import plot_distances

        return plot_distances(self, axes, layer=layer)


def by_distance(model: nn.Module, batch: Batch, *, most: int = 128) -> DistanceWeights:
    """How positions alone weigh a key at each distance, as the model has learned it.

    Args:
        model, batch: as for `heads`; factors that depend on the query are averaged over it.
        most: the largest distance.
    """
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    found: dict[str, list[DistanceWeight]] = {}

    def look(seen: Seen) -> None:
        if seen.own and seen.name not in found:
            found[seen.name] = list(_read(seen, most))

    watch(model, batch, look)
    return DistanceWeights(tuple(one for each in found.values() for one in each))


def _read(seen: Seen, most: int) -> Iterator[DistanceWeight]:
    call, heads = seen.call, seen.layer.num_heads
    # At most the distances that occur.
    most = min(most, max(call.k.length - 1, 1))
    first = 0 if call.filter.causal else -most
    away = torch.arange(first, most + 1, device=call.v.device)
    for kernel in members(seen.layer.joined_kernel):
        found = _log_weights(kernel, call.q, call.k, away)
        if found is None:
            continue
        mean = found.mean(1).expand(heads, -1).tolist()
        # One number has no spread.
        spread = found.std(1, correction=0).expand(heads, -1).tolist()
        for h in range(heads):
            yield DistanceWeight(
                layer=seen.name, head=h, kernel=kernel.formula, distances=tuple(away.tolist()),
                log_weight=tuple(mean[h]), spread=tuple(spread[h]),
            )  # fmt: skip


def _log_weights(kernel: Kernel, q: Features, k: Features, away: Tensor) -> Tensor | None:
    """The log of a factor, [heads or 1, queries, distances]; None if it is none of positions."""
    if isinstance(kernel, ALiBi):
        return -(kernel.slopes[:, None, None] * away.abs()).double()
    if isinstance(kernel, Buckets):
        return kernel.table[kernel.bucket(away)].mT[:, None].double()
    if isinstance(kernel, Lookup):
        table = kernel.scores(_some(q, kernel.on)).double()  # [B, H, Q, 2c + 1]
        clip = (table.shape[-1] - 1) // 2
        return table[..., away.clamp(-clip, clip) + clip].transpose(0, 1).flatten(1, 2)
    if isinstance(kernel, RelativeSinusoid):
        c = coefficients(_some(q, kernel.on).part(kernel.on), kernel.weight).double()
        sin, cos = waves(away, c.shape[-1], kernel.base, c.dtype)  # [distances, P / 2]
        log = c[..., 0::2] @ sin.mT + c[..., 1::2] @ cos.mT
        return log.transpose(0, 1).flatten(1, 2)
    if kernel.query_parts == {"position"} and kernel.key_parts == {"position"}:
        return _by_diagonal(kernel, q, k, away)
    return None


def _some(q: Features, part: str) -> Features:
    """At most QUERIES queries, spread evenly."""
    x = q.part(part)
    number = min(x.shape[2], max(QUERIES // x.shape[0], 1))
    index = torch.linspace(0, x.shape[2] - 1, number, device=x.device).long()
    return Features(**{part: x[:, :, index]})


def _by_diagonal(kernel: Kernel, q: Features, k: Features, away: Tensor) -> Tensor:
    """Of a kernel of the positions i and j: its log at a few places i, by i - j."""
    x, y = q.part("position"), k.part("position")
    start = y.shape[2] - x.shape[2]
    reach = int(away.max())
    low = reach if int(away.min()) >= 0 else min(reach, y.shape[2] // 2)
    # The places that have a key at every distance, else the last one.
    high = y.shape[2] - 1 + min(int(away.min()), 0)
    high = max(high, start)
    low = min(max(low, start), high)
    places = torch.linspace(low, high, min(PLACES, high - low + 1), device=x.device).long()
    logs = []
    for place in places.tolist():
        keys = (place - away).clamp(0, y.shape[2] - 1)
        one = kernel.log_weight(
            Features(position=x[:1, :, place - start : place - start + 1]),
            Features(position=y[:1, :, keys]),
        )
        logs.append(one[0, :, 0].double())  # [H, distances]
    return torch.stack(logs, 1)
