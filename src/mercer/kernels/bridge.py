"""From softmax to RBF: a kernel that is the first at c = 1 and the second at c = 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..term.factors import Factor, half_norm
from ..term.features import Input
from ..term.term import Term
from .arguments import is_finite
from .distance import Bandwidth, Distance, squared_distance, times_square
from .dot import default_scale
from .entry import Entry
from .positive import hold


class Bridge(Distance):
    """exp(-|q - k|^2 / 2 s^2) exp(c |k|^2 / 2 s^2): RBF times a weight of the keys.

    At c = 1 it is exp(<q, k> / s^2) times a number of the query, which cancels: softmax. At c = 0
    it is RBF. c is one number for all heads. Unless a bandwidth is given, s^2 = sqrt(D) at the
    start, so that softmax has its scale 1 / sqrt(D).
    """

    entry = Entry(
        kind="keyed",
        examples={
            "bridge": lambda h, d: Bridge(),
            "bridge-per-head": lambda h, d: Bridge([1.0 + 1.5 * n for n in range(h)], 0.4),
        },
    )

    symmetric = False
    valid = False
    c: Tensor

    def __init__(
        self,
        bandwidth: Bandwidth = None,
        c: float = 1.0,
        *,
        heads: int | None = None,
        trainable: bool = True,
        on: str = "content",
    ) -> None:
        super().__init__(bandwidth, heads=heads, trainable=trainable, on=on)
        if not is_finite(c):
            raise ValueError(f"c must be a finite number, got {c}")
        hold(self, "c", torch.tensor(float(c)), trainable)
        # The scale of softmax; a model may have another one than 1 / sqrt(D).
        self.scale: float | None = None

    def default(self, dim: int) -> float:
        scale = default_scale(dim) if self.scale is None else self.scale
        return 1 / math.sqrt(scale)

    def log_weight(self, q: Input, k: Input) -> Tensor:
        q, k = self.select(q, k)
        precision = self.precision(q)
        keys = self.c.to(precision.dtype) * k.square().sum(-1)[..., None, :]
        return 0.5 * precision * (keys - squared_distance(q, k))

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        q, k = self.select(q, k)
        precision = self.precision(q)
        factor = Factor(
            q=q, k=k, scale=precision, row=precision[..., 0] * half_norm(q),
            col=(1 - self.c.to(precision.dtype)) * half_norm(k),
        )  # fmt: skip
        return (Term(factors=(factor,)),)

    def written_with(self, r: str, s: str) -> str:
        k = "k" if self.on == "content" else f"k.{self.on}"
        c = f"{self.c.detach().item():.4g}"
        return f"{super().written_with(r, s)} * exp({c} |{k}|^2 / {times_square('2', s)})"
