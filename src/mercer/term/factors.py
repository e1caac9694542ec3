"""The factors of a term. Some form their numbers lazily, on first access.

A backend that can compute such a number inside its kernel reads the inputs instead, and the number
is never stored in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..memory.constants import constant
from .layout import accumulator
from .learned import Learned, needs_gradient
from .links import Link


# Not frozen, like Relative below: torch 2.11 cannot compile subclasses of frozen dataclasses.
@dataclass(kw_only=True, eq=False)
class Factor:
    """link(scale_i (<q_i, k_j> + col_j) + row_i)."""

    q: Tensor  # [B, H, Q, E]
    k: Tensor  # [B, H, K, E]
    scale: Tensor | float = 1.0  # a number, [H, 1, 1] or [B, H, Q, 1]
    row: Tensor | None = None  # [B, H, Q]
    col: Tensor | None = None  # [B, H, K]
    link: Link | None = None

    @property
    def width(self) -> int:
        """How many features it has."""
        return self.q.shape[-1]

    @property
    def keyed(self) -> bool:
        """Whether it has a number per key."""
        return self.col is not None

    @property
    def has_row(self) -> bool:
        """Whether it has a number per query."""
        return self.row is not None

    @property
    def per_query(self) -> bool:
        """Whether every query has its own scale."""
        return isinstance(self.scale, Tensor) and self.scale.dim() == 4

    def raised(self, exponent: float) -> Factor:
        """The factor of weights to a power: its link must be the identity."""
        assert self.link is None, self.link
        row = None if self.row is None else exponent * self.row
        return Factor(q=self.q, k=self.k, scale=exponent * self.scale, row=row, col=self.col)

    @property
    def learned(self) -> Learned:
        """Which of its parts need a gradient. A lazy part does if its sources do."""
        return Learned(*map(needs_gradient, (self.q, self.k, self.scale, self.row, self.col)))


# A bounded log bandwidth is smoothed by tanh over this distance from each bound.
BEND = math.log(2.0)


@dataclass(kw_only=True, eq=False)
class LogScale:
    """exp(-2 log s), log s = log + offset; with bounds, tanh smooths log near each bound."""

    log: Tensor  # [1 or H], in the accumulator's dtype
    offset: float = 0.0
    bounds: tuple[float, float] | None = None

    def bent(self) -> Tensor:
        """log s, [1 or H]."""
        log = self.log
        if self.bounds is not None:
            free = log.clamp(self.bounds[0] + BEND, self.bounds[1] - BEND)
            log = free + BEND * torch.tanh((log - free) / BEND)
        return log + self.offset if self.offset else log

    def times(self, number: float) -> LogScale:
        """The scale times a number."""
        offset = self.offset - 0.5 * math.log(number)
        return LogScale(log=self.log, offset=offset, bounds=self.bounds)

    def formed(self) -> Tensor:
        """[1 or H, 1, 1]."""
        return (-2.0 * self.bent()).exp()[:, None, None]


class DistanceFactor(Factor):
    """link(-scale_i |q_i - k_j|^2 / 2).

    `row` and `col` are norms. They, and a scale given by its logarithm, are formed lazily.
    """

    given: Tensor | float | LogScale
    _col: Tensor | None
    _row: Tensor | None
    _scale: Tensor | None

    def __init__(
        self,
        *,
        q: Tensor,
        k: Tensor,
        scale: Tensor | float | LogScale = 1.0,
        link: Link | None = None,
    ) -> None:
        self.q, self.k, self.given, self.link = q, k, scale, link
        self._col = self._row = self._scale = None

    def raised(self, exponent: float) -> Factor:
        assert self.link is None, self.link
        given = self.given
        scale = given.times(exponent) if isinstance(given, LogScale) else exponent * given
        return DistanceFactor(q=self.q, k=self.k, scale=scale)

    @property
    def scale(self) -> Tensor | float:  # type: ignore[override]
        if not isinstance(self.given, LogScale):
            return self.given
        if self._scale is None:
            self._scale = self.given.formed()
        return self._scale

    @property
    def per_query(self) -> bool:
        return isinstance(self.given, Tensor) and self.given.dim() == 4

    @property
    def keyed(self) -> bool:
        return True

    @property
    def has_row(self) -> bool:
        return True

    @property
    def learned(self) -> Learned:
        q, k, scale = needs_gradient(self.q), needs_gradient(self.k), self._learns_scale()
        return Learned(q, k, scale, row=q or scale, col=k)

    def _learns_scale(self) -> bool:
        return needs_gradient(self.given.log if isinstance(self.given, LogScale) else self.given)

    @property
    def col(self) -> Tensor:  # type: ignore[override]
        if self._col is None:
            self._col = half_norm(self.k)
        return self._col

    @property
    def row(self) -> Tensor:  # type: ignore[override]
        if self._row is None:
            scale = self.scale[..., 0] if isinstance(self.scale, Tensor) else self.scale
            self._row = scale * half_norm(self.q)
        return self._row


class QueryBandwidthFactor(DistanceFactor):
    """A distance whose scale each query computes, from features x and a row w of its head.

    scale_i = exp(-2 (log s + reach tanh(<x_i, w> / reach))), formed lazily.
    """

    x: Tensor  # [B, H, Q, E]
    w: Tensor  # [1 or H, E], in the accumulator's dtype
    base: LogScale
    reach: float

    def __init__(
        self, *, q: Tensor, k: Tensor, x: Tensor, w: Tensor, base: LogScale, reach: float
    ) -> None:
        super().__init__(q=q, k=k)
        self.x, self.w, self.base, self.reach = x, w, base, reach

    def raised(self, exponent: float) -> Factor:
        base = self.base.times(exponent)
        return QueryBandwidthFactor(
            q=self.q, k=self.k, x=self.x, w=self.w, base=base, reach=self.reach
        )

    @property
    def per_query(self) -> bool:
        return True

    def _learns_scale(self) -> bool:
        return needs_gradient(self.x, self.w, self.base.log)

    def log_scale(self) -> Tensor:
        """log s_i, [B, H, Q, 1]."""
        steer = self.x.to(self.w.dtype) @ self.w[..., None]
        return self.base.bent()[:, None, None] + self.reach * torch.tanh(steer / self.reach)

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        if self._scale is None:
            self._scale = torch.exp(-2.0 * self.log_scale())
        return self._scale


# Shorter vectors are divided by this length, so zeros stay zeros.
LEAST_LENGTH = 1e-12


class CosineFactor(Factor):
    """scale <q_i, k_j> / |q_i||k_j|; the normalised features are formed lazily."""

    queries: Tensor
    keys: Tensor
    _q: Tensor | None
    _k: Tensor | None

    def __init__(self, *, q: Tensor, k: Tensor, scale: float) -> None:
        self.queries, self.keys, self.scale = q, k, scale
        self.row = self.col = self.link = self._q = self._k = None

    def raised(self, exponent: float) -> Factor:
        assert not isinstance(self.scale, Tensor)
        return CosineFactor(q=self.queries, k=self.keys, scale=exponent * self.scale)

    @property
    def width(self) -> int:
        return self.queries.shape[-1]

    @property
    def learned(self) -> Learned:
        q, k = needs_gradient(self.queries), needs_gradient(self.keys)
        return Learned(q, k, scale=False, row=False, col=False)

    @property
    def q(self) -> Tensor:  # type: ignore[override]
        if self._q is None:
            self._q = unit(self.queries)
        return self._q

    @property
    def k(self) -> Tensor:  # type: ignore[override]
        if self._k is None:
            self._k = unit(self.keys)
        return self._k


def unit(x: Tensor) -> Tensor:
    """x / |x| in the accumulator's dtype; zeros stay zeros."""
    return F.normalize(x.to(accumulator(x.dtype)), dim=-1, eps=LEAST_LENGTH)


class SlopeFactor(Factor):
    """-m (i - j) = m j - m i where j <= i, with places counted from the last key.

    The part of the query is formed lazily.
    """

    slope: Tensor  # [H]
    _row: Tensor | None

    def __init__(self, slope: Tensor, num_queries: int, num_keys: int) -> None:
        self.num_queries, self.num_keys = num_queries, num_keys
        self.slope, self.link, self._row = slope, None, None

    @property
    def width(self) -> int:
        return 0

    @property
    def q(self) -> Tensor:  # type: ignore[override]
        return self.slope.new_empty(1, self.slope.shape[0], self.num_queries, 0)

    @property
    def k(self) -> Tensor:  # type: ignore[override]
        return self.slope.new_empty(1, 1, self.num_keys, 0)

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        return self.slope.view(-1, 1, 1)

    @property
    def keyed(self) -> bool:
        return True

    @property
    def col(self) -> Tensor:  # type: ignore[override]
        return places_from_end(self.num_keys, self.slope.device, self.slope.dtype)

    @property
    def has_row(self) -> bool:
        return True

    @property
    def learned(self) -> Learned:
        slope = needs_gradient(self.slope)
        return Learned(q=False, k=False, scale=slope, row=slope, col=False)

    @property
    def row(self) -> Tensor:  # type: ignore[override]
        if self._row is None:
            places = places_from_end(self.num_queries, self.slope.device, self.slope.dtype)
            self._row = -(self.slope.view(1, -1, 1) * places)
        return self._row


def places_from_end(
    length: int, device: torch.device, dtype: torch.dtype, unit: float = 1.0
) -> Tensor:
    """The places 1 - T to 0, counted from the last one in a unit, [1, 1, T]."""

    def make() -> Tensor:
        return torch.arange(1 - length, 1, device=device, dtype=dtype)[None, None] / unit

    return constant(("places from end", length, dtype, unit), device, make)


def half_norm(x: Tensor) -> Tensor:
    """-|x|^2 / 2 in the accumulator's dtype, [B, H, T]."""
    # The norm reads half precision and sums in float32, without a copy of x in float32.
    return -0.5 * torch.linalg.vector_norm(x, dim=-1, dtype=accumulator(x.dtype)).square()
