"""The waist: every kernel lowers to terms, every backend runs a term.

    log w_ij = sum_f link_f(scale_f (<q^f_i, k^f_j> + col^f_j) + row^f_i) + bias(i, j) + log_weight

N kernels and M backends need N + M pieces of code, not N x M. A number per key is never rounded to
the dtype of the features. Only backends concatenate parts of the features, so a backend that reads
them in place needs no copy. A bias is data, not an opaque function. `log_weight` is one number for
all pairs of a head. It cancels in the ratio, so no backend reads it: it is added to log_mass.

Letters: B batch, H heads, Q queries, K keys, E features, V values. Key tensors may have fewer heads
that divide H, and any tensor may have batch 1. Query i sits at position i + K - Q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .biases import Relative, Slope, reach
from .factors import Factor, SlopeFactor
from .layout import as_column, join
from .links import Link


@dataclass(frozen=True, kw_only=True)
class Lifted:
    """link(<q_i, k_j> + row_i): a factor, or all identity factors, as one dot product."""

    q: Tensor  # [B, H, Q, E]
    k: Tensor  # [B, H, K, E]
    row: Tensor | None  # [B, H, Q]
    link: Link | None


@dataclass(frozen=True, kw_only=True)
class Term:
    """One product of factors, with its biases and its weight."""

    factors: tuple[Factor, ...] = ()
    biases: tuple[Relative | Slope, ...] = ()
    log_weight: Tensor | None = None  # [1 or H]

    def __mul__(self, other: Term) -> Term:
        return Term(
            factors=self.factors + other.factors,
            biases=self.biases + other.biases,
            log_weight=_sum(self.log_weight, other.log_weight),
        )

    def __pow__(self, exponent: float) -> Term:
        """Every weight to a power: all links must be the identity."""
        return Term(
            factors=tuple(f.raised(exponent) for f in self.factors),
            biases=tuple(bias.raised(exponent) for bias in self.biases),
            log_weight=None if self.log_weight is None else exponent * self.log_weight,
        )

    def times(self, log_weight: Tensor) -> Term:
        """The same term with a weight, given by its logarithm, [1 or H]."""
        log = _sum(self.log_weight, log_weight)
        return Term(factors=self.factors, biases=self.biases, log_weight=log)

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(f.link for f in self.factors if f.link is not None)

    @property
    def signed(self) -> bool:
        return any(link.signed for link in self.links)

    @property
    def learned(self) -> bool:
        """Whether any part of a resolved term needs a gradient. Forms no tensor."""
        bias = self.relative
        return any(any(f.learned) for f in self.factors) or (bias is not None and bias.learned)

    @property
    def relative(self) -> Relative | None:
        """The one bias of a resolved term."""
        if not self.biases:
            return None
        (bias,) = self.biases
        assert isinstance(bias, Relative)
        return bias

    @property
    def table(self) -> Tensor | None:
        """The relative table of a resolved term."""
        return None if self.relative is None else self.relative.table

    def resolve(self, num_queries: int, num_keys: int, *, causal: bool) -> Term:
        """The same weights with at most one bias: slopes become columns or join one table."""
        if not self.biases:
            return self
        factors = list(self.factors)
        tables: list[Relative] = []
        for bias in self.biases:
            if isinstance(bias, Relative):
                tables.append(bias)
            elif bias.places is not None:
                if causal:
                    factors.append(bias.as_factor())
                else:
                    tables.append(bias.as_table())
            elif causal:
                factors.append(SlopeFactor(bias.slope, num_queries, num_keys))
            else:
                clip = reach(max(num_queries, num_keys) - 1)
                far = torch.arange(-clip, clip + 1, device=bias.slope.device).abs()
                tables.append(Relative(table=-(bias.slope[:, None] * far)[None, :, None]))
        if len(tables) > 1:
            widest = max(bias.clip for bias in tables)
            first, *others = (bias.widen(widest) for bias in tables)
            tables = [Relative(table=sum(others, first), places=tables[0].places)]
        return Term(factors=tuple(factors), biases=tuple(tables), log_weight=self.log_weight)

    def lift(self, dtype: torch.dtype) -> tuple[Lifted, ...]:
        """All identity factors side by side as one dot product, then each factor with a link."""
        plain = [f for f in self.factors if f.link is None]
        linked = [f for f in self.factors if f.link is not None]
        groups = ([plain] if plain else []) + [[f] for f in linked]
        return tuple(_side_by_side(group, dtype) for group in groups)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _side_by_side(factors: list[Factor], dtype: torch.dtype) -> Lifted:
    """q' = [scale q, scale], k' = [k, col]; rows add up."""
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    rows: list[Tensor] = []
    for f in factors:
        q = f.q.to(dtype)
        if isinstance(f.scale, Tensor) or f.scale != 1.0:
            q = q * f.scale
        queries.append(q)
        keys.append(f.k.to(dtype))
        if f.col is not None:
            queries.append(as_column(f.scale, f.q, dtype))
            keys.append(f.col.to(dtype)[..., None])
        if f.row is not None:
            rows.append(f.row.to(dtype))
    row = sum(rows[1:], rows[0]) if rows else None
    return Lifted(q=join(queries), k=join(keys), row=row, link=factors[0].link)
