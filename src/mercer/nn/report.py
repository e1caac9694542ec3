"""A report on heads of Gaussian attention: bandwidth, neighbourhood, weight on self.

With P_ij the weights of row i and E_i[f] = sum_j P_ij f_j, the entropy of the row is

    H_i = log_mass_i - E_i[log w]
    E_i[log w] = (<q_i, E_i[k]> + E_i[-|k|^2 / 2] - |q_i|^2 / 2) / s^2

and E_i is what a smoother computes: keys and their norms are smoothed as values, and no row is
ever written out. The weight on self is exp(-log_mass_i), since w_ii = 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..filters import Filter
from ..kernels import Exponential, Kernel
from ..smoother import smooth
from ..term.factors import half_norm
from ..term.features import Features


@dataclass(frozen=True, kw_only=True)
class Head:
    """One head, averaged over the rows that see themselves."""

    layer: str
    head: int
    bandwidth: float
    neighbours: float  # exp of the entropy of a row
    visible: float  # how many places a row sees
    self_weight: float | None  # None in cross-attention
    at_bound: bool
    # Which kernel's bandwidth it is, where a head has several.
    kernel: str = ""

    @property
    def note(self) -> str:
        """A remark on an unusual head; empty otherwise."""
        notes = []
        alone = 0.0 if self.self_weight is None else self.self_weight
        if not all(map(math.isfinite, (self.bandwidth, self.neighbours, alone))):
            notes.append("not finite")
        if self.at_bound:
            notes.append("at its bound")
        if self.visible > 1.5 and alone > 0.99:
            notes.append("sees itself only")
        if self.visible > 1.5 and self.neighbours > 0.99 * self.visible:
            notes.append("a plain mean")
        return ", ".join(notes)


@dataclass(frozen=True)
class Report:
    """Heads, layer by layer; `print` it."""

    heads: tuple[Head, ...]

    def __iter__(self) -> Iterator[Head]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def __getitem__(self, index: int) -> Head:
        return self.heads[index]

    def named(self, layer: str) -> Report:
        """The same, under the name of a layer."""
        return Report(tuple(replace(head, layer=layer) for head in self.heads))

    def __str__(self) -> str:
        columns = {
            "layer": [h.layer for h in self.heads],
            "head": [str(h.head) for h in self.heads],
            "kernel": [h.kernel for h in self.heads],
            "bandwidth": [f"{h.bandwidth:.4g}" for h in self.heads],
            "neighbours": [f"{h.neighbours:.1f}" for h in self.heads],
            "of visible": [f"{h.visible:.1f}" for h in self.heads],
            "self": ["" if h.self_weight is None else f"{h.self_weight:.4f}" for h in self.heads],
            "note": [h.note for h in self.heads],
        }
        for name in ("layer", "kernel"):
            if not any(columns[name]):
                del columns[name]
        aligned = []
        for name, cells in columns.items():
            # Words to the left, numbers to the right.
            side = str.ljust if name in ("layer", "kernel", "note") else str.rjust
            width = max(map(len, (name, *cells)))
            aligned.append([side(cell, width) for cell in (name, *cells)])
        return "\n".join("  ".join(row).rstrip() for row in zip(*aligned, strict=True))


def measure(
    kernel: Kernel, q: Features, k: Features, log_s: Tensor, filter: Filter, at_bound: list[bool]
) -> Report:
    """The report of a Gaussian kernel with these log bandwidths, [H, 1, 1] or [B, H, T, 1]."""
    x, y = q.part("content"), k.part("content")
    batch, heads, length, dim = x.shape
    values = torch.cat([y, half_norm(y)[..., None]], -1)  # [B, H, T, D + 1]
    mean, log_mass = smooth(kernel, q, k, values, filter=filter, return_log_mass=True)
    near = (x * mean[..., :dim]).sum(-1) + mean[..., dim] + half_norm(x)
    entropy = (log_mass - near * torch.exp(-2 * log_s)[..., 0]).clamp(min=0.0)

    counted = sees_itself(filter, batch, length, x.device)  # [B, H or 1, T]
    if not bool(counted.any()):
        raise ValueError(f"no place sees itself, so there is nothing to report: {filter}")
    columns = {
        "bandwidth": mean_of_rows(log_s[..., 0].expand(batch, heads, length), counted).exp(),
        "neighbours": mean_of_rows(entropy.exp(), counted),
        "visible": mean_of_rows(
            visible_keys(filter, batch, length, length, x.device), counted
        ).expand(heads),
        "self_weight": mean_of_rows(torch.exp(-log_mass).clamp(max=1.0), counted),
    }
    numbers = {name: column.tolist() for name, column in columns.items()}
    return Report(
        tuple(
            Head(layer="", head=h, at_bound=at_bound[h], **{n: c[h] for n, c in numbers.items()})
            for h in range(heads)
        )
    )


def mean_of_rows(x: Tensor, counted: Tensor) -> Tensor:
    """The mean over the rows that count, per head: [B, H or 1, Q] -> [H or 1]."""
    return torch.where(counted, x, 0.0).sum((0, 2)) / counted.sum((0, 2))


def sees_itself(filter: Filter, batch: int, length: int, device: torch.device) -> Tensor:
    """Which rows see themselves, [B, H or 1, T]: none past the padding, or that sees nothing."""
    b, h, i = (torch.arange(n, device=device) for n in (batch, filter.heads or 1, length))
    seen = filter.to(device).shows(b[:, None, None], h[:, None], i, i, 0)
    return torch.as_tensor(seen, device=device).expand(batch, len(h), length)


def visible_keys(
    filter: Filter, batch: int, num_queries: int, num_keys: int, device: torch.device
) -> Tensor:
    """How many keys every row sees, [B, H or 1, Q]: the mass of the weight 1."""
    heads = filter.heads or 1
    q, k = (torch.zeros(batch, heads, n, 1, device=device) for n in (num_queries, num_keys))
    _, log_mass = smooth(Exponential(), q, k, k, filter=filter, return_log_mass=True)
    return log_mass.exp()
