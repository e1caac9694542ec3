"""Kernels of i - j alone, a number for each head: ALiBi, Buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..memory.constants import constant
from ..term.biases import Relative, Slope
from ..term.features import Features, Input
from ..term.layout import accumulator
from ..term.term import Term
from .dot import Exponential
from .entry import Entry, normal
from .position import Positional, distances, said


class ALiBi(Positional):
    """exp(-slope |i - j|), one slope per head."""

    entry = Entry(
        kind="keyed",
        bench=("alibi", lambda h, d: Exponential() * ALiBi(ALiBi.standard(h))),
        examples={"alibi": lambda h, d: ALiBi(nn.Parameter(ALiBi.standard(h)))},
    )

    symmetric = True
    slopes: Tensor

    def __init__(self, slopes: Sequence[float] | Tensor) -> None:
        super().__init__()
        if not isinstance(slopes, Tensor | Sequence):
            raise ValueError(
                "slopes must be a list of numbers, one per head, such as [0.5, 0.25], "
                f"got {slopes!r}"
            )
        table = slopes if isinstance(slopes, Tensor) else torch.tensor([float(m) for m in slopes])
        if table.dim() != 1 or not bool(table.detach().isfinite().all()):
            raise ValueError(f"slopes must be finite, one per head [H], got {slopes}")
        self.keep("slopes", table)

    @property
    def valid(self) -> bool:  # type: ignore[override]
        return bool((self.slopes.detach() >= 0).all())

    @staticmethod
    def standard(heads: int) -> Tensor:
        """The slopes of the paper: 2^(-8 h / H), interleaved where H is no power of two."""
        whole = 2 ** math.floor(math.log2(heads))
        first = [2.0 ** (-8 * (h + 1) / whole) for h in range(whole)]
        between = [2.0 ** (-4 * (h + 1) / whole) for h in range(0, 2 * (heads - whole), 2)]
        return torch.tensor(first + between)

    @property
    def query_parts(self) -> frozenset[str]:
        return frozenset()

    def log_weight(self, q: Input, k: Input) -> Tensor:
        q, k = Features.of(q), Features.of(k)
        m = self.checked(q)
        return -(m[:, None, None] * distances(q, k, m.device).abs())

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        slope = Slope(slope=self.checked(Features.of(q)), places=said(q, k))
        return (Term(biases=(slope,)),)

    def checked(self, q: Features) -> Tensor:
        if self.slopes.shape[0] != q.heads:
            raise ValueError(
                f"ALiBi has slopes for {self.slopes.shape[0]} heads, but the queries have {q.heads}"
            )
        return self.slopes.to(accumulator(q.tensors()[0].dtype))

    @property
    def formula(self) -> str:
        return "exp(-m_h |i-j|)"


class Buckets(Positional):
    """exp(table[bucket(i - j), h]): T5's relative position bias, with its table [buckets, H]."""

    entry = Entry(
        kind="table",
        text=False,
        bench=("buckets", lambda h, d: Exponential() * Buckets(normal(32, h))),
        examples={
            "buckets": lambda h, d: Buckets(normal(8, h), max_distance=6),
            "buckets-one-way": lambda h, d: Buckets(
                normal(6, h), max_distance=5, bidirectional=False
            ),
        },
    )

    table: Tensor

    def __init__(
        self, table: Tensor, *, max_distance: int = 128, bidirectional: bool = True
    ) -> None:
        super().__init__()
        if table.dim() != 2 or table.shape[0] < 2 or (bidirectional and table.shape[0] % 2):
            raise ValueError(
                "table must be [buckets, H], with an even number of buckets if bidirectional, "
                f"got {list(table.shape)}"
            )
        one_way = table.shape[0] // 2 if bidirectional else table.shape[0]
        if max_distance <= one_way // 2:
            raise ValueError(f"max_distance must be more than {one_way // 2}, got {max_distance}")
        self.keep("table", table)
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    @property
    def query_parts(self) -> frozenset[str]:
        return frozenset()

    def log_weight(self, q: Input, k: Input) -> Tensor:
        q, k = Features.of(q), Features.of(k)
        self.check(q)
        index = self.bucket(distances(q, k, self.table.device)[:, 0])
        table = self.table.to(accumulator(q.tensors()[0].dtype))
        return table[index].movedim(-1, 1)

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        places, q = said(q, k), Features.of(q)
        self.check(q)
        dtype = accumulator(q.tensors()[0].dtype)
        table = _by_distance(self.max_distance, self.bidirectional, dtype, self.table)
        return (Term(biases=(Relative(table=table, places=places),)),)

    def bucket(self, away: Tensor) -> Tensor:
        """Small distances have a bucket each; larger ones share buckets of equal ratio."""
        return bucket(away, self.table.shape[0], self.max_distance, self.bidirectional)

    def check(self, q: Features) -> None:
        if self.table.shape[1] != q.heads:
            raise ValueError(
                f"Buckets has a table for {self.table.shape[1]} heads, "
                f"but the queries have {q.heads}"
            )

    @property
    def formula(self) -> str:
        return "exp(b_h[bucket(i-j)])"


def _by_distance(most: int, bidirectional: bool, dtype: torch.dtype, table: Tensor) -> Tensor:
    """The table of buckets, expanded to the distances -most..most: [1, H, 1, 2 most + 1]."""
    buckets, device = table.shape[0], table.device

    def make() -> Tensor:
        away = torch.arange(-most, most + 1, device=device)
        return bucket(away, buckets, most, bidirectional)

    index = constant(("buckets", buckets, most, bidirectional), device, make)
    table = table.to(dtype).mT
    # The backward of index_select adds by atomics, in no fixed order; that of indexing is
    # deterministic.
    found = table[:, index] if table.requires_grad else table.index_select(1, index)
    return found[None, :, None]


def bucket(away: Tensor, buckets: int, most: int, bidirectional: bool) -> Tensor:
    """The bucket of each distance; distances from `most` on are in the last one."""
    ahead = torch.zeros_like(away)
    if bidirectional:
        buckets //= 2
        ahead = torch.where(away < 0, buckets, 0)
        away = away.abs()
    else:
        away = away.clamp(min=0)
    exact = buckets // 2
    # In float32 as in T5: the bucket borders depend on rounding.
    ratio = (away.clamp(min=1).float() / max(exact, 1)).log()
    ratio = ratio / math.log(most / max(exact, 1))
    shared = exact + (ratio * (buckets - exact)).long()
    return ahead + torch.where(away < exact, away, shared.clamp(max=buckets - 1))
