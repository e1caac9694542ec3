"""The biases of a term: tables of relative distances, and slopes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..filters.places import Places
from .factors import Factor
from .layout import accumulator
from .learned import needs_gradient

# The distances of a slope over keys on both sides, which are a table.
FARTHEST_SLOPE = 2**20
# How far tables reach that are formed for a number of keys; further, a multiple of the last.
REACHES = (128, 256, 512, 1024)


def reach(distance: int) -> int:
    """A reach that covers a distance, out of few: the fused kernels are compiled for each."""
    for enough in REACHES:
        if distance <= enough:
            return enough
    return -(-distance // REACHES[-1]) * REACHES[-1]


@dataclass(kw_only=True, eq=False)
class Relative:
    """bias(i, j) = table[..., i, clip(i - j, -c, c) + c]."""

    table: Tensor  # [B or 1, H, Q or 1, 2c + 1]
    places: Places | None = None  # of i and j, where they are said

    @property
    def clip(self) -> int:
        return (self.table.shape[-1] - 1) // 2

    @property
    def per_query(self) -> bool:
        """Whether every query has its own table."""
        return self.table.shape[2] > 1

    @property
    def learned(self) -> bool:
        """Whether it needs a gradient. Does not form the table."""
        return needs_gradient(self.table)

    def raised(self, exponent: float) -> Relative:
        """The bias of weights to a power."""
        return Relative(table=exponent * self.table, places=self.places)

    def widen(self, clip: int) -> Tensor:
        """The same bias as a table of at least that many distances."""
        grow = clip - self.clip
        if grow <= 0:
            return self.table
        left, right = self.table[..., :1], self.table[..., -1:]
        ends = (*left.shape[:-1], grow)
        return torch.cat([left.expand(ends), self.table, right.expand(ends)], -1)


class QueryTable(Relative):
    """bias(i, j) = <q_i, rows[clip(i - j, -c, c) + c]>: the table is formed lazily.

    The rows are a tensor, or a function of the first distance: a causal call needs only the rows
    of distances from 0 on.
    """

    q: Tensor  # [B, H, Q, D]

    def __init__(
        self, *, q: Tensor, rows: Tensor | None = None, clip: int = 0,
        form: Callable[[int], Tensor] | None = None, source: Tensor | None = None,
        places: Places | None = None,
    ) -> None:  # fmt: skip
        self.q, self._rows, self._form, self.places = q, rows, form, places
        self._table: Tensor | None = None
        self._clip = clip if rows is None else (rows.shape[-2] - 1) // 2
        # The tensor that gets the gradient of the rows.
        self.source = rows if source is None else source

    @property
    def rows(self) -> Tensor:
        """[1 or H, 2c + 1, D]."""
        if self._rows is None:
            assert self._form is not None
            self._rows = self._form(-self._clip)
        return self._rows

    def raised(self, exponent: float) -> Relative:
        return QueryTable(q=self.q, rows=exponent * self.rows, places=self.places)

    def past(self) -> Tensor:
        """Rows of distances from 0 on, [1 or H, c + 1, D], or all if given as a tensor."""
        return self.rows if self._form is None else self._form(0)

    @property
    def table(self) -> Tensor:  # type: ignore[override]
        if self._table is None:
            wide = accumulator(self.rows.dtype)
            self._table = self.q.to(wide) @ self.rows.to(wide).mT
        return self._table

    @property
    def clip(self) -> int:
        return self._clip

    @property
    def per_query(self) -> bool:
        return self.q.shape[2] > 1

    @property
    def learned(self) -> bool:
        return needs_gradient(self.q, self.source)


@dataclass(frozen=True, kw_only=True)
class Slope:
    """bias(i, j) = -slope |i - j|."""

    slope: Tensor  # [H]
    places: Places | None = None  # of i and j, where they are said

    def raised(self, exponent: float) -> Slope:
        return Slope(slope=exponent * self.slope, places=self.places)

    def as_factor(self) -> Factor:
        """-m (i - j) = m j - m i for places that are said, where j <= i."""
        assert self.places is not None
        q, k = self.places.tensors(self.slope.device)
        # Counted from the last key, so that numbers are small for the nearest keys.
        last = k.amax(-1, keepdim=True) if k.numel() else 0
        q, k = ((x - last)[:, None].to(self.slope.dtype) for x in (q, k))  # [B or 1, 1, T]
        return Factor(
            q=self.slope.new_empty(q.shape[0], self.slope.shape[0], q.shape[2], 0),
            k=self.slope.new_empty(*k.shape, 0),
            scale=self.slope.view(-1, 1, 1), row=-(self.slope.view(1, -1, 1) * q), col=k,
        )  # fmt: skip

    def as_table(self) -> Relative:
        """-m |i - j| of every distance, for places that are said."""
        assert self.places is not None
        q, k = self.places.tensors(self.slope.device)
        most = 0
        if q.numel() and k.numel():
            most = int(torch.maximum(q.amax() - k.amin(), k.amax() - q.amin()))
        if most > FARTHEST_SLOPE:
            raise ValueError(
                f"places are up to {most} apart, and a slope over keys on both sides reaches "
                f"{FARTHEST_SLOPE}: join the filter with Causal()"
            )
        far = torch.arange(-most, most + 1, device=self.slope.device).abs()
        return Relative(table=-(self.slope[:, None] * far)[None, :, None], places=self.places)
