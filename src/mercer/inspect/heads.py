"""What each head does: its kernel, its bandwidth, how far and how widely it looks.

With P_ij the weights of row i, a head's effective neighbourhood is exp(-sum_j P_ij log P_ij), its
weight on self P_ii, and its distance sum_j P_ij |i - j|, each averaged over rows. Weights are
formed for some keys at a time, so memory is linear in the length.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import GaussianAttention
from ..nn.bandwidths import bandwidths_of, kernels_with_bandwidth
from ..nn.report import visible_keys
from ..term.layout import accumulator
from .calls import Batch, Seen, watch
from .formulas import write_head
from .records import Records

# How many keys' weights are formed at a time.
COLUMNS = 256
# The least distance of each bin: 0, 1, 2, 3, 4, 6, 8, 12, …
BINS = (0, 1, 2, 3, *(n for p in range(2, 20) for n in (2**p, 3 * 2 ** (p - 1))))


@dataclass(frozen=True, kw_only=True)
class HeadSummary:
    """One head, averaged over the rows that see a key.

    Attributes:
        layer, head: the name of the layer in the model, and the number of the head.
        kernel: its formula, with its learned numbers.
        bandwidth, start: now, and before training where the model knows it; of the first kernel
            that has one. Of bandwidths by query or dimension it is the geometric mean.
        neighbours: exp of the entropy of a row: how many keys it would be if all counted alike.
        visible: how many keys a row sees.
        self_weight, first_weight: on the token itself, and on the first token of the sequence.
        distance: the mean |i - j|, in tokens; of given places, the mean Euclidean distance.
        far, shares: the share of the weight from each distance of `far` on, up to the next one.
    """

    layer: str
    head: int
    kernel: str
    bandwidth: float | None
    start: float | None
    neighbours: float
    visible: float
    self_weight: float | None
    first_weight: float | None
    distance: float | None
    far: tuple[int, ...] = field(repr=False)
    shares: tuple[float, ...] = field(repr=False)


class Heads(Records[HeadSummary]):
    """A row for each head, layer by layer."""

    def plot(self, axes: Any = None, *, of: str = "neighbours") -> Any:
        """A map of layers and heads, coloured by one of the numbers, on matplotlib's axes."""
        from .plots import plot_heads

        return plot_heads(self, axes, of=of)


def heads(model: nn.Module, batch: Batch, *more: Batch, places: Tensor | None = None) -> Heads:
    """A row for each head of every attention layer, from a call of the model for each batch.

    Args:
        batch, more: what the model is called with: a tensor, a tuple, or arguments by name such as
            {"input_ids": ids}. Sequences longer than a few thousand tokens take minutes on a CPU;
            give a part of the text.
        places: where each token stands, [T, D], such as the patches of an image; NaN for a token
            that stands nowhere, which has no distance. By default tokens stand in a line.
    """
    found: dict[str, _Sums] = defaultdict(lambda: _Sums(places))
    for one in (batch, *more):
        watch(model, one, lambda seen: found[seen.name].add(seen))
    return Heads(tuple(one for sums in found.values() for one in sums.finish()))


class _Sums:
    """The numbers of one layer, over its calls."""

    def __init__(self, places: Tensor | None) -> None:
        self.places = places
        self.rows = torch.zeros(1)  # [H or 1]
        self.sums: dict[str, Tensor] = {}
        self.far: tuple[int, ...] = ()
        self.fixed: list[dict[str, Any]] = []
        self.name, self.own = "", True

    def add(self, seen: Seen) -> None:
        batch, heads, length, num_keys = seen.sizes
        device, wide = seen.call.v.device, accumulator(seen.call.v.dtype)
        self.name, self.own = seen.name, seen.own
        visible = visible_keys(seen.call.filter, batch, length, num_keys, device)  # [B, H or 1, Q]
        counted = (visible > 0).to(wide)
        edges = torch.tensor(BINS, device=device)
        part = {
            name: torch.zeros(batch, heads, length, dtype=wide, device=device)
            for name in ("entropy", "alone", "first", "away", "nowhere")
        }
        shares = torch.zeros(heads, len(BINS), dtype=wide, device=device)
        place = torch.arange(length, device=device) + seen.first_query
        for begin in range(0, num_keys, COLUMNS):
            end = min(begin + COLUMNS, num_keys)
            p = seen.call.columns(begin, end).to(wide)  # [B, H, Q, C]
            keys = torch.arange(begin, end, device=device) + seen.first_key
            part["entropy"] += torch.special.entr(p.clamp(min=0)).sum(-1)
            if seen.own:
                away = self._distances(place, keys).to(wide)  # [Q, C]
                nowhere, away = away.isnan(), away.nan_to_num()
                part["alone"] += (p * (place[:, None] == keys)).sum(-1)
                part["first"] += (p * (keys == 0)).sum(-1)
                part["away"] += (p * away).sum(-1)
                part["nowhere"] += (p * nowhere).sum(-1)
                bins = (torch.bucketize(away, edges, right=True) - 1).flatten()
                shares.index_add_(1, bins, (p * ~nowhere * counted[..., None]).sum(0).flatten(1))
        mean = {
            "neighbours": part["entropy"].exp(), "visible": visible.expand(batch, heads, length),
            "alone": part["alone"], "first": part["first"], "away": part["away"],
            "nowhere": part["nowhere"],
        }  # fmt: skip
        self.rows = self.rows.to(counted) + counted.sum((0, 2))
        for name, x in mean.items():
            self._sum(name, (x * counted).sum((0, 2)))
        self._sum("shares", shares)
        fixed = _fixed(seen, counted.bool())
        self.fixed = self.fixed or fixed
        if self.fixed[0]["bandwidth"] is not None:
            # Bandwidths by query differ between calls.
            log = torch.tensor([one["bandwidth"] for one in fixed], dtype=torch.float64).log()
            self._sum("log", log.to(device) * counted.sum((0, 2)))

    def _distances(self, place: Tensor, keys: Tensor) -> Tensor:
        """How far the queries at these places are from the keys, [Q, C]."""
        if self.places is None:
            return (place[:, None] - keys).abs()
        stand = self.places.to(place.device)
        if len(stand) <= max(int(place.max()), int(keys.max())):
            raise ValueError(f"places must be of all tokens, got {len(stand)}")
        return (stand[place][:, None] - stand[keys]).norm(dim=-1)

    def _sum(self, name: str, x: Tensor) -> None:
        self.sums[name] = self.sums[name] + x if name in self.sums else x

    def finish(self) -> list[HeadSummary]:
        if not self.rows.any():
            raise ValueError(f"no place sees a key in layer {self.name}: there is nothing to read")
        mean = {
            name: (x.transpose(0, -1) / self.rows).transpose(0, -1).tolist()
            for name, x in self.sums.items()
        }
        used = max((n for row in mean["shares"] for n, x in enumerate(row) if x > 0), default=0) + 1
        return [
            HeadSummary(
                layer=self.name, head=h, kernel=fixed["kernel"], start=fixed["start"],
                bandwidth=math.exp(mean["log"][h]) if "log" in mean else None,
                neighbours=mean["neighbours"][h], visible=mean["visible"][h],
                self_weight=mean["alone"][h] if self.own else None,
                first_weight=mean["first"][h] if self.own else None,
                # Weights on tokens that stand nowhere do not count.
                distance=mean["away"][h] / ((1 - mean["nowhere"][h]) or math.nan)
                if self.own else None,
                far=BINS[:used] if self.own else (),
                shares=tuple(mean["shares"][h][:used]) if self.own else (),
            )
            for h, fixed in enumerate(self.fixed)
        ]  # fmt: skip


def _fixed(seen: Seen, counted: Tensor) -> list[dict[str, Any]]:
    """What does not depend on the weights: the kernel of each head, and its bandwidth."""
    layer, q = seen.layer, seen.call.q
    number = layer.num_heads
    now: list[float | None] = [None] * number
    start: list[float | None] = [None] * number
    if isinstance(layer, GaussianAttention):
        scale = layer.log_scale(q).double()  # [H, 1, 1] or [B, H, Q, 1]
        each = scale.mean((0, 2, 3)) if scale.dim() == 4 else scale[:, 0, 0]
        now = list(each.exp().tolist())
        start = _starts(layer, number, 1.0)
    elif kernels := kernels_with_bandwidth(layer.joined_kernel):
        kernel = kernels[0]
        now = list(bandwidths_of(kernel, q, counted).tolist())
        # A bandwidth may be relative to a default, which is the same before and after training.
        log = kernel.log_bandwidth
        assert isinstance(log, Tensor)
        start = _starts(kernel, number, _default(kernel, q))
    return [
        {"kernel": write_head(layer, h, q), "bandwidth": now[h], "start": start[h]}
        for h in range(number)
    ]


def _default(kernel: Any, q: Any) -> float:
    if getattr(kernel, "relative_to_default", False) and kernel.on in q:
        return float(kernel.default(q.part(kernel.on).shape[-1]))
    return 1.0


def _starts(module: nn.Module, number: int, default: float) -> list[float | None]:
    """The bandwidths before training, where the model has kept them."""
    kept = getattr(module, "starts", None)
    log = kept.get("log_bandwidth") if isinstance(kept, dict) else None
    if not isinstance(log, Tensor):
        return [None] * number
    log = log.detach().double()
    if log.dim() > 1:
        log = log.flatten(1).mean(1)
    elif log.numel() not in (1, number):
        log = log.mean()
    return [default * s for s in log.reshape(-1).expand(number).exp().tolist()]
