"""The set filter: which keys a query sees.

One definition, `sees`, elementwise in the batch index b, the query's place i and the key's place j
(both count from the first key; query n sits at n + K - Q), gives the dense mask, SDPA's arguments,
FlexAttention's block mask, and with `covers` the blocks that a blockwise backend visits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .spec import Spec

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Index = Any  # an int or a tensor of ints, broadcast against the others


@dataclass(frozen=True)
class Span:
    """The places first..last, both included."""

    first: int
    last: int


@dataclass(frozen=True)
class Filter(Spec):
    """M(i), the keys that query i sees. A subclass defines `sees`; `covers` makes it fast."""

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        """Whether i sees j; `start` is the place of the first query, K - Q."""
        raise NotImplementedError

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        """True if all of i sees all of j, False if nothing sees anything, None if not known."""
        return None

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return False

    @property
    def batch(self) -> int | None:
        """The batch size it was made for; None fits all."""
        return None

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        """Raise where the filter does not fit these shapes."""

    def until(self, num_keys: int, start: int) -> Filter:
        """The filter of a whole sequence, seen when only its first keys are there (decoding)."""
        return self

    def to(self, device: torch.device) -> Filter:
        return self

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        """An equal filter of a simpler kind, where these lengths allow one."""
        last = num_keys - 1
        if num_queries and num_keys:
            start = num_keys - num_queries
            if self.covers(Span(start, last), Span(0, last), start) is True:
                return Full()
        return self

    def __and__(self, other: Filter) -> Filter:
        return And((self, other)) if isinstance(other, Filter) else NotImplemented

    def __or__(self, other: Filter) -> Filter:
        return Or((self, other)) if isinstance(other, Filter) else NotImplemented

    def mask(
        self, num_queries: int, num_keys: int, device: torch.device | str | None = None
    ) -> Tensor:
        """The dense mask, True = visible, [B or 1, 1, Q, K]."""
        start = num_keys - num_queries
        b = torch.arange(self.batch or 1, device=device)[:, None, None, None]
        i = torch.arange(start, num_keys, device=device)[:, None]
        j = torch.arange(num_keys, device=device)
        seen = torch.as_tensor(self.sees(b, i, j, start), device=device)
        return seen.expand(self.batch or 1, 1, num_queries, num_keys)

    def sdpa(
        self, num_queries: int, num_keys: int, device: torch.device | str | None = None
    ) -> dict[str, Any]:
        """`is_causal` and `attn_mask` for torch's scaled_dot_product_attention."""
        simple = self.simplify(num_queries, num_keys)
        if isinstance(simple, Full):
            return {"is_causal": False, "attn_mask": None}
        # SDPA aligns the first query with the first key, so its flag means the same only here.
        if isinstance(simple, Causal) and num_queries == num_keys:
            return {"is_causal": True, "attn_mask": None}
        return {"is_causal": False, "attn_mask": simple.narrow_mask(num_queries, num_keys, device)}

    def narrow_mask(
        self, num_queries: int, num_keys: int, device: torch.device | str | None
    ) -> Tensor:
        """The dense mask, with one row where all rows are equal."""
        return self.mask(num_queries, num_keys, device)

    def mask_mod(
        self, num_queries: int, num_keys: int
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """FlexAttention's mask function."""
        start = num_keys - num_queries

        def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            seen = self.sees(b, q_idx + start, kv_idx, start)
            return seen if isinstance(seen, Tensor) else torch.full_like(kv_idx, seen).bool()

        return visible

    def block_mask(
        self, num_queries: int, num_keys: int, device: torch.device | str = "cpu"
    ) -> BlockMask:
        """FlexAttention's block mask."""
        from torch.nn.attention.flex_attention import create_block_mask

        rule = self.mask_mod(num_queries, num_keys)
        return create_block_mask(rule, self.batch, None, num_queries, num_keys, device=str(device))


@dataclass(frozen=True)
class Full(Filter):
    """Every query sees every key."""

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return True

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        return True


@dataclass(frozen=True)
class Causal(Filter):
    """j <= i."""

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return j <= i

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        return True if j.last <= i.first else False if j.first > i.last else None

    @property
    def causal(self) -> bool:
        return True


@dataclass(frozen=True)
class Window(Filter):
    """i - left <= j <= i + right; -1 is open."""

    left: int
    right: int

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < -1:
                raise ValueError(
                    f"{name} must be a whole number >= 0, or -1 for open, "
                    f"but came as {getattr(self, name)}"
                )

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        left = j >= i - self.left if self.left >= 0 else True
        right = j <= i + self.right if self.right >= 0 else True
        return left & right

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        left, right = self.left, self.right
        if (left >= 0 and j.last < i.first - left) or (right >= 0 and j.first > i.last + right):
            return False
        all_left = left < 0 or j.first >= i.last - left
        all_right = right < 0 or j.last <= i.first + right
        return True if all_left and all_right else None

    @property
    def causal(self) -> bool:
        return self.right == 0

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        if self.right == 0 and (self.left < 0 or self.left >= num_keys - 1):
            return Causal().simplify(num_queries, num_keys)
        return super().simplify(num_queries, num_keys)


@dataclass(frozen=True)
class Memory(Filter):
    """Causal, and keys more than `length` before the segment's first query are hidden.

    The segment starts with the first query of the call, or at `start` where one is given.
    """

    length: int
    start: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.length, int) or self.length < 0:
            raise ValueError(f"length must be a whole number >= 0, but came as {self.length}")

    def oldest(self, start: int) -> int:
        return (start if self.start is None else self.start) - self.length

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return (j <= i) & (j >= self.oldest(start))

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        if j.first > i.last or j.last < self.oldest(start):
            return False
        return True if j.last <= i.first and j.first >= self.oldest(start) else None

    @property
    def causal(self) -> bool:
        return True

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        if self.oldest(num_keys - num_queries) <= 0:
            return Causal().simplify(num_queries, num_keys)
        return super().simplify(num_queries, num_keys)

    def until(self, num_keys: int, start: int) -> Filter:
        return Memory(self.length, start if self.start is None else self.start)


@dataclass(frozen=True)
class Strided(Filter):
    """Causal and (i - j < stride or (i - j) mod stride = 0): Sparse Transformer's first pattern."""

    stride: int

    def __post_init__(self) -> None:
        _check_stride(self.stride)

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return (j <= i) & ((i - j < self.stride) | ((i - j) % self.stride == 0))

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        near, far = i.first - j.last, i.last - j.first
        if far < 0:
            return False
        if near >= 0 and far < self.stride:
            return True
        multiple = near >= 0 and far // self.stride > (near - 1) // self.stride
        return None if near < self.stride or multiple else False

    @property
    def causal(self) -> bool:
        return True


@dataclass(frozen=True)
class Fixed(Filter):
    """Causal and (same block of `stride`, or j mod stride >= stride - summary)."""

    stride: int
    summary: int = 1

    def __post_init__(self) -> None:
        _check_stride(self.stride)
        if not isinstance(self.summary, int) or not 1 <= self.summary <= self.stride:
            raise ValueError(f"summary must be from 1 to {self.stride}, but came as {self.summary}")

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        same = i // self.stride == j // self.stride
        return (j <= i) & (same | (j % self.stride >= self.stride - self.summary))

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        if j.first > i.last:
            return False
        n = self.stride
        if j.last <= i.first and i.last // n == j.first // n:
            return True
        summary = self._summaries(j.last) > self._summaries(j.first - 1)
        same = j.last // n >= i.first // n and j.first // n <= i.last // n
        return None if summary or same else False

    def _summaries(self, last: int) -> int:
        """How many of the places 0..last are summaries."""
        blocks, rest = divmod(last + 1, self.stride)
        return blocks * self.summary + max(0, rest - (self.stride - self.summary))

    @property
    def causal(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class Padding(Filter):
    """j < lengths[b]."""

    lengths: Tensor  # [B]

    def __init__(self, lengths: Tensor | Sequence[int]) -> None:
        table = torch.as_tensor(lengths)
        whole = not table.is_floating_point() and table.dtype != torch.bool
        if table.dim() != 1 or not whole:
            raise ValueError(
                f"lengths must be whole numbers, one per sequence [B], but came as {lengths}"
            )
        object.__setattr__(self, "lengths", table)

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return j < self.lengths[b]

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        if torch.compiler.is_compiling():
            return None
        shortest, longest = self.extremes
        return True if j.last < shortest else False if j.first >= longest else None

    @cached_property
    def extremes(self) -> tuple[int, int]:
        if not self.lengths.numel():
            return 0, 0
        return int(self.lengths.min()), int(self.lengths.max())

    @property
    def batch(self) -> int | None:
        return self.lengths.shape[0]

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        _check_batch("Padding", self.lengths.shape[0], batch)
        if torch.compiler.is_compiling() or not batch:
            return
        shortest, longest = self.extremes
        if longest > num_keys or shortest < 0:
            raise ValueError(
                f"lengths must be from 0 to the {num_keys} keys there are, "
                f"but reach from {shortest} to {longest}"
            )

    def until(self, num_keys: int, start: int) -> Filter:
        return Padding(self.lengths.clamp(max=num_keys))

    def to(self, device: torch.device) -> Filter:
        return Padding(self.lengths.to(device)) if self.lengths.device != device else self

    def narrow_mask(
        self, num_queries: int, num_keys: int, device: torch.device | str | None
    ) -> Tensor:
        return self.mask(1, num_keys, device)

    def __repr__(self) -> str:
        return f"Padding({self.lengths.tolist()})"


@dataclass(frozen=True, eq=False)
class Documents(Filter):
    """ids[b, i] = ids[b, j]: sequences packed into one row do not see each other."""

    ids: Tensor  # [B, K]

    def __init__(self, ids: Tensor | Sequence[Sequence[int]]) -> None:
        table = torch.as_tensor(ids)
        table = table[None] if table.dim() == 1 else table
        if table.dim() != 2 or table.is_floating_point():
            raise ValueError(
                f"ids must be whole numbers [B, K], but came as {table.dtype} {list(table.shape)}"
            )
        object.__setattr__(self, "ids", table)

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        # A query before the first key (Q > K) belongs to no document.
        b = b if self.ids.shape[0] > 1 else 0
        same = self.ids[b, i.clamp(min=0) if isinstance(i, Tensor) else max(i, 0)] == self.ids[b, j]
        return same & (i >= 0)

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        if torch.compiler.is_compiling() or i.first < 0:
            return None
        queries, keys = self._range(i), self._range(j)
        apart = (queries[0] > keys[1]) | (keys[0] > queries[1])
        if bool(apart.all()):
            return False
        same = (queries[0] == queries[1]) & (keys[0] == keys[1]) & (queries[0] == keys[0])
        return True if bool(same.all()) else None

    @cached_property
    def _ranges(self) -> dict[Span, tuple[Tensor, Tensor]]:
        return {}

    def _range(self, span: Span) -> tuple[Tensor, Tensor]:
        """The smallest and largest id among these places, per sequence."""
        if span not in self._ranges:
            part = self.ids[:, span.first : span.last + 1]
            self._ranges[span] = part.amin(-1), part.amax(-1)
        return self._ranges[span]

    @property
    def batch(self) -> int | None:
        return self.ids.shape[0] if self.ids.shape[0] > 1 else None

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        if self.ids.shape[0] != 1:
            _check_batch("Documents", self.ids.shape[0], batch)
        if self.ids.shape[1] != num_keys:
            raise ValueError(
                f"Documents has ids for {self.ids.shape[1]} keys, but there are {num_keys}"
            )

    def until(self, num_keys: int, start: int) -> Filter:
        return Documents(self.ids[:, :num_keys])

    def to(self, device: torch.device) -> Filter:
        return Documents(self.ids.to(device)) if self.ids.device != device else self

    def __repr__(self) -> str:
        return f"Documents({list(self.ids.shape)})"


@dataclass(frozen=True)
class Joined(Filter):
    """Filters joined by one operation; nested ones of the same kind are flattened."""

    filters: tuple[Filter, ...]

    def __post_init__(self) -> None:
        flat: list[Filter] = []
        for filter in self.filters:
            flat.extend(filter.filters if type(filter) is type(self) else [filter])
        object.__setattr__(self, "filters", tuple(flat))

    @property
    def batch(self) -> int | None:
        sizes = [f.batch for f in self.filters if f.batch is not None]
        return max(sizes) if sizes else None

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        for filter in self.filters:
            filter.check(batch, num_queries, num_keys)

    def until(self, num_keys: int, start: int) -> Filter:
        return type(self)(tuple(f.until(num_keys, start) for f in self.filters))

    def to(self, device: torch.device) -> Filter:
        return type(self)(tuple(f.to(device) for f in self.filters))


@dataclass(frozen=True)
class And(Joined):
    """What all of them let through."""

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return reduce(and_, (f.sees(b, i, j, start) for f in self.filters))

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        each = [f.covers(i, j, start) for f in self.filters]
        return False if False in each else None if None in each else True

    @property
    def causal(self) -> bool:
        return any(f.causal for f in self.filters)

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        each = [f.simplify(num_queries, num_keys) for f in self.filters]
        kept = [f for f in each if not isinstance(f, Full)]
        return And(tuple(kept)) if len(kept) > 1 else kept[0] if kept else Full()

    def __repr__(self) -> str:
        return " & ".join(f"({f})" if isinstance(f, Or) else repr(f) for f in self.filters)


@dataclass(frozen=True)
class Or(Joined):
    """What any of them lets through."""

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return reduce(or_, (f.sees(b, i, j, start) for f in self.filters))

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        each = [f.covers(i, j, start) for f in self.filters]
        return True if True in each else None if None in each else False

    @property
    def causal(self) -> bool:
        return all(f.causal for f in self.filters)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.filters))


def _check_stride(stride: object) -> None:
    if not isinstance(stride, int) or stride < 1:
        raise ValueError(f"stride must be a whole number >= 1, but came as {stride}")


def _check_batch(name: str, came: int, batch: int) -> None:
    if came != batch:
        raise ValueError(f"{name} was made for {came} sequences, but the batch has {batch}")
