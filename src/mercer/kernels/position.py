"""Kernels of the query and the distance i - j: Lookup, RelativeSinusoid."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..filters.places import Places
from ..term.biases import QueryTable
from ..term.features import Features, Input
from ..term.layout import accumulator
from ..term.sinusoids import (
    SinusoidFactor,
    coefficients,
    run_of_sinusoids,
    turned_at,
    waves,
)
from ..term.term import Term
from .arguments import is_finite
from .base import Kernel
from .dot import Exponential, default_scale
from .entry import Entry, normal


class Positional(Kernel):
    """A kernel of i - j; the last query is beside the last key, unless places are said."""

    symmetric = False
    valid = False
    relative = True
    placed = True
    exponential = True

    @property
    def key_parts(self) -> frozenset[str]:
        return frozenset()

    def keep(self, name: str, table: Tensor) -> None:
        """Register a parameter as a parameter, and any other tensor as a buffer."""
        if isinstance(table, nn.Parameter):
            self.register_parameter(name, table)
        else:
            self.register_buffer(name, table)


class Lookup(Positional):
    """exp(scale <q_i, a_{clip(i - j, -c, c)}>), scale 1/sqrt(D) by default.

    With `causal` the table holds the distances from 0 to c alone, distance d in row d, and a key
    after the query has weight 1.
    """

    entry = Entry(
        kind="table",
        text=False,
        bench=("lookup", lambda h, d: Exponential() * Lookup(normal(129, d))),
        examples={
            "lookup": lambda h, d: Lookup(normal(5, d)),
            "lookup-per-head": lambda h, d: Lookup(normal(h, 7, d), scale=0.5),
            "lookup-causal": lambda h, d: Lookup(normal(4, d), causal=True),
        },
    )

    table: Tensor

    def __init__(
        self,
        table: Tensor,
        scale: float | None = None,
        on: str = "content",
        *,
        causal: bool = False,
    ) -> None:
        super().__init__()
        count = table.shape[-2] if table.dim() in (2, 3) else 0
        if not count or (not causal and count % 2 == 0):
            rows, zero = ("c + 1", 0) if causal else ("2c + 1", "c")
            raise ValueError(
                f"table must be [{rows}, D] or [H, {rows}, D], with distance 0 in row {zero}, "
                f"got {list(table.shape)}"
            )
        if scale is not None and not is_finite(scale):
            raise ValueError(f"scale must be a finite number, got {scale}")
        self.keep("table", table)
        self.scale = scale
        self.on = on
        self.causal = causal

    def log_weight(self, q: Input, k: Input) -> Tensor:
        scores = self.scores(q)  # [B, H, Q, 2c + 1]
        clip = (scores.shape[-1] - 1) // 2
        away = distances(q, k, scores.device)
        index = away.clamp(-clip, clip) + clip
        batch = max(scores.shape[0], index.shape[0]) if scores.shape[0] else 0
        shape = batch, scores.shape[1]
        return scores.expand(batch, -1, -1, -1).gather(-1, index.expand(*shape, *index.shape[2:]))

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        return (Term(biases=(self.bias(q, said(q, k)),)),)

    def scores(self, q: Input) -> Tensor:
        """scale <q_i, a_d> for every distance d."""
        return self.bias(q).table

    def bias(self, q: Input, places: Places | None = None) -> QueryTable:
        q = Features.of(q).part(self.on)
        if self.table.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"the table has {self.table.shape[-1]} features a row, "
                f"but the queries have {q.shape[-1]}"
            )
        if self.table.dim() == 3 and self.table.shape[0] != q.shape[1]:
            raise ValueError(
                f"the table has {self.table.shape[0]} heads, but the queries have {q.shape[1]}"
            )
        scale = default_scale(q.shape[-1]) if self.scale is None else self.scale
        rows = scale * self.table.to(accumulator(q.dtype))
        rows = rows if rows.dim() == 3 else rows[None]
        if not self.causal:
            return QueryTable(q=q, rows=rows, places=places)
        if rows.shape[-2] == 1:
            # One table for both sides needs a row for each.
            rows = rows.expand(-1, 2, -1)
        # Rows of zeros for the distances below 0, where they are asked for.
        return QueryTable(
            q=q, clip=rows.shape[-2] - 1, form=lambda first: F.pad(rows, (0, 0, -first, 0)),
            source=rows, places=places,
        )  # fmt: skip

    @property
    def formula(self) -> str:
        scale = "/ sqrt(D)" if self.scale is None else f"* {self.scale:g}"
        return f"exp(<{'q' if self.on == 'content' else f'q.{self.on}'}, a(i-j)> {scale})"


class RelativeSinusoid(Positional):
    """exp(sum_p c_{2p} sin((i-j) w_p) + c_{2p+1} cos((i-j) w_p)), w_p = base^(-2p/P).

    The coefficients c are the query's part, or the product of that part with a weight [H, D, P].
    With `max_distance` all farther keys have that distance, as in `Lookup`.
    """

    entry = Entry(
        kind="several",
        text=False,
        bench=("relative-sinusoid", lambda h, d: Exponential() * RelativeSinusoid()),
        examples={
            "relative-sinusoid": lambda h, d: RelativeSinusoid(),
            "relative-sinusoid-clipped": lambda h, d: RelativeSinusoid(max_distance=2),
        },
    )

    weight: Tensor | None

    def __init__(
        self,
        on: str = "relative",
        base: float = 10000.0,
        weight: Tensor | None = None,
        max_distance: int | None = None,
    ) -> None:
        super().__init__()
        if not (is_finite(base) and base > 0):
            raise ValueError(f"base must be a positive finite number, got {base}")
        if max_distance is not None and (not isinstance(max_distance, int) or max_distance < 1):
            raise ValueError(
                f"max_distance must be a whole number from 1 up, or None, got {max_distance!r}"
            )
        self.on = on
        self.base = base
        self.max_distance = max_distance
        if weight is None:
            self.register_parameter("weight", None)
        elif weight.dim() != 3 or weight.shape[-1] % 2:
            raise ValueError(f"weight must be [H, D, P] with an even P, got {list(weight.shape)}")
        else:
            self.keep("weight", weight)

    def log_weight(self, q: Input, k: Input) -> Tensor:
        c = coefficients(self._asking(q), self.weight)
        away = distances(q, k, c.device)[:, 0]
        if self.max_distance is not None:
            away = away.clamp(-self.max_distance, self.max_distance)
        sin, cos = waves(away, c.shape[-1], self.base, c.dtype)  # [B or 1, Q, K, P / 2]
        if away.shape[0] == 1:
            return torch.einsum("bhip,ijp->bhij", c[..., 0::2], sin[0]) + torch.einsum(
                "bhip,ijp->bhij", c[..., 1::2], cos[0]
            )
        c = c.expand(away.shape[0], -1, -1, -1)
        return torch.einsum("bhip,bijp->bhij", c[..., 0::2], sin) + torch.einsum(
            "bhip,bijp->bhij", c[..., 1::2], cos
        )

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        asking, num_keys, places = self._asking(q), Features.of(k).length, said(q, k)
        clip = self.max_distance
        if clip is not None and (places is not None or max(asking.shape[2], num_keys) > clip + 1):
            # The angle sums need distances as they are.
            return (Term(biases=(self._clipped(asking, clip, places),)),)
        if places is not None:
            i, j = places.tensors(asking.device)
            return (Term(factors=(turned_at(coefficients(asking, self.weight), i, j, self.base),)),)
        turned = SinusoidFactor(
            asking=asking, weight=self.weight, base=self.base, num_keys=num_keys
        )
        return (Term(factors=(turned,)),)

    def _clipped(self, asking: Tensor, clip: int, places: Places | None) -> QueryTable:
        """The same weights by a table of the distances up to `clip`."""
        weight = self.weight
        width = asking.shape[-1] if weight is None else weight.shape[-1]
        wide = asking.dtype != torch.bfloat16

        def form(first: int) -> Tensor:
            rows = run_of_sinusoids(first, clip + 1, width, self.base, asking, wide=wide)
            return rows[None] if weight is None else rows @ weight.to(asking.dtype).mT

        return QueryTable(q=asking, form=form, clip=clip, source=weight, places=places)

    def _asking(self, q: Input) -> Tensor:
        """The queries' part, [B, H, Q, P], or with a weight [B, H, Q, D]."""
        x = Features.of(q).part(self.on)
        if self.weight is None and x.shape[-1] % 2:
            raise ValueError(f"part {self.on!r} must have an even width, but has {x.shape[-1]}")
        if self.weight is not None and (x.shape[1], x.shape[-1]) != self.weight.shape[:2]:
            heads, width = self.weight.shape[:2]
            raise ValueError(
                f"the weight is for {heads} heads of {width} features, "
                f"but part {self.on!r} has {x.shape[1]} of {x.shape[-1]}"
            )
        return x

    @property
    def formula(self) -> str:
        part = f"q.{self.on}" if self.weight is None else f"q.{self.on} W"
        away = "i-j" if self.max_distance is None else f"clip(i-j, {self.max_distance})"
        return f"exp(<{part}, sinusoid({away})>)"


def said(q: Input, k: Input) -> Places | None:
    """The places of queries and keys, where they are said."""
    q, k = Features.of(q), Features.of(k)
    if q.places is None or k.places is None:
        return None
    return Places(q.places, k.places, q.length, k.length)


def distances(q: Input, k: Input, device: torch.device) -> Tensor:
    """i - j, [B or 1, 1, Q, K]; unless places are said, the last query is beside the last key."""
    q, k = Features.of(q), Features.of(k)
    places = said(q, k) or Places(k.length - q.length, 0, q.length, k.length)
    i, j = places.tensors(device)
    return (i[:, :, None] - j[:, None])[:, None]
