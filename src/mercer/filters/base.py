"""The set filter: which keys a query sees.

One definition, `sees`, elementwise in the batch index b, the query's place i and the key's place j
(both count from the first key; query n sits at n + K - Q), gives the dense mask, SDPA's arguments,
FlexAttention's block mask, and with `covers` the blocks that a blockwise backend visits. Where
places are said, `placed.py` moves the filter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..opaque.spec import Spec
from .blocks import block_mask
from .entry import Entry
from .places import Places

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Index = Any  # an int or a tensor of ints, broadcast against the others


@dataclass(frozen=True)
class Span:
    """The places first..last, both included."""

    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Filter(Spec):
    """M(i), the keys that query i sees. A subclass defines `sees`; `covers` makes it fast.

    Equality follows the fields: tensors by their contents, or by identity where reading them would
    synchronise with a device.
    """

    entry: ClassVar[Entry | None] = None

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        names = [field.name for field in fields(self)]
        return all(_equal(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        return hash((type(self), *(_contents(getattr(self, f.name)) for f in fields(self))))

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        """Whether i sees j; `start` is the place of the first query, K - Q."""
        raise NotImplementedError(f"{type(self).__name__} must define sees(b, i, j, start)")

    def shows(self, b: Index, h: Index, i: Index, j: Index, start: int) -> Index:
        """Whether i sees j in head h: as `sees`, unless the heads differ."""
        return self.sees(b, i, j, start)

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        """True: every i sees every j. False: no i sees any j. None: unknown."""
        return None

    def joins(self, b: Index, j: Index, m: Index) -> Index:
        """Whether keys j and m are of one sequence, so that j's token kernel may reach m."""
        return True

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return False

    @property
    def same_for_all(self) -> bool:
        """Whether all queries see the same keys."""
        return False

    @property
    def batch(self) -> int | None:
        """The batch size it was made for; None fits all."""
        return None

    @property
    def heads(self) -> int | None:
        """The number of heads it was made for, if they differ; None fits all."""
        return None

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        """Raise where the filter does not fit these shapes."""

    def until(self, num_keys: int, start: int) -> Filter:
        """The filter of a whole sequence while only its first keys exist (decoding)."""
        return self

    def by_rows(self, places: Places) -> Filter | None:
        """The same keys, where places are counted from the first key; None: no such filter."""
        return self if places.usual else None

    def to(self, device: torch.device) -> Filter:
        return self

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        """An equivalent simpler filter for these lengths, if there is one."""
        i, j = Span(num_keys - num_queries, num_keys - 1), Span(0, num_keys - 1)
        covered = num_queries and num_keys and self.covers(i, j, i.first)
        return Full() if covered is True else self

    def __and__(self, other: Filter) -> Filter:
        return And((self, other)) if isinstance(other, Filter) else NotImplemented

    def __or__(self, other: Filter) -> Filter:
        return Or((self, other)) if isinstance(other, Filter) else NotImplemented

    def mask(
        self, num_queries: int, num_keys: int, device: torch.device | str | None = None
    ) -> Tensor:
        """The dense mask, True = visible, [B or 1, H or 1, Q, K]."""
        start = num_keys - num_queries
        return self.mask_of_rows(torch.arange(start, num_keys, device=device), num_keys, start)

    def mask_of_rows(self, i: Tensor, num_keys: int, start: int) -> Tensor:
        """The rows of the dense mask for queries at the places i."""
        b, h, j = (torch.arange(n, device=i.device) for n in (*self.sizes, num_keys))
        places = b[:, None, None, None], h[:, None, None], i[:, None], j
        seen = torch.as_tensor(self.to(i.device).shows(*places, start), device=i.device)
        return seen.expand(*self.sizes, len(i), num_keys)

    @property
    def sizes(self) -> tuple[int, int]:
        """The batch and the heads of its dense mask; 1 where all are alike."""
        return self.batch or 1, self.heads or 1

    def sdpa(
        self, num_queries: int, num_keys: int, device: torch.device | str | None = None
    ) -> dict[str, Any]:
        """`is_causal` and `attn_mask` for torch's scaled_dot_product_attention."""
        simple = self.simplify(num_queries, num_keys)
        if isinstance(simple, Full):
            return {"is_causal": False, "attn_mask": None}
        # SDPA aligns the first query with the first key, so is_causal fits only Q = K.
        if isinstance(simple, Causal) and num_queries == num_keys:
            return {"is_causal": True, "attn_mask": None}
        return {"is_causal": False, "attn_mask": simple.narrow_mask(num_queries, num_keys, device)}

    def narrow_mask(
        self, num_queries: int, num_keys: int, device: torch.device | str | None
    ) -> Tensor:
        """The dense mask; a single row if all rows are equal."""
        return self.mask(1 if self.same_for_all else num_queries, num_keys, device)

    def mask_elements(self, num_queries: int, num_keys: int) -> int:
        """How many elements the mask of `sdpa` has, 0 where it needs none."""
        simple = self.simplify(num_queries, num_keys)
        square = num_queries == num_keys
        if isinstance(simple, Full) or (isinstance(simple, Causal) and square):
            return 0
        rows = 1 if simple.same_for_all else num_queries
        batch, heads = simple.sizes
        return batch * heads * rows * num_keys

    def mask_mod(
        self, num_queries: int, num_keys: int
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """FlexAttention's mask function."""

        def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            start = num_keys - num_queries
            seen = self.shows(b, h, q_idx + start, kv_idx, start)
            return seen if isinstance(seen, Tensor) else torch.full_like(kv_idx, seen).bool()

        return visible

    def block_mask(
        self, num_queries: int, num_keys: int, device: torch.device | str = "cpu"
    ) -> BlockMask:
        """FlexAttention's block mask."""
        return block_mask(self, num_queries, num_keys, device)


def can_read(x: Tensor) -> bool:
    """Whether the data may be read: not of a compiled graph, nor of a CUDA graph being captured."""
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _equal(a: object, b: object) -> bool:
    if a is b:
        return True
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
    readable = a.shape == b.shape and all(x.is_cpu and can_read(x) for x in (a, b))
    return readable and bool((a == b).all())


def _contents(x: object) -> object:
    """What the hash of a field is taken of."""
    if not isinstance(x, Tensor):
        return x
    readable = x.is_cpu and can_read(x)
    return (tuple(x.shape), tuple(x.flatten().tolist())) if readable else id(x)


@dataclass(frozen=True)
class Full(Filter):
    """Every query sees every key."""

    entry = Entry(examples={"full": lambda: Full()})

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return True

    def by_rows(self, places: Places) -> Filter | None:
        return self

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        return True

    @property
    def same_for_all(self) -> bool:
        return True


@dataclass(frozen=True)
class Causal(Filter):
    """j <= i."""

    entry = Entry(examples={"causal": lambda: Causal()})

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return j <= i

    def by_rows(self, places: Places) -> Filter | None:
        return self if places.shift == 0 else None

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        return True if j.last <= i.first else False if j.first > i.last else None

    @property
    def causal(self) -> bool:
        return True


@dataclass(frozen=True)
class Joined(Filter):
    """Filters joined by & or |; nested ones of the same kind are flattened."""

    filters: tuple[Filter, ...]

    def __post_init__(self) -> None:
        flat: list[Filter] = []
        for filter in self.filters:
            flat.extend(filter.filters if type(filter) is type(self) else [filter])
        object.__setattr__(self, "filters", tuple(flat))

    @property
    def batch(self) -> int | None:
        found = [f.batch for f in self.filters if f.batch is not None]
        return max(found) if found else None

    @property
    def heads(self) -> int | None:
        found = [f.heads for f in self.filters if f.heads is not None]
        return max(found) if found else None

    @property
    def same_for_all(self) -> bool:
        return all(f.same_for_all for f in self.filters)

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        for filter in self.filters:
            filter.check(batch, num_queries, num_keys)

    def until(self, num_keys: int, start: int) -> Filter:
        return type(self)(tuple(f.until(num_keys, start) for f in self.filters))

    def to(self, device: torch.device) -> Filter:
        return type(self)(tuple(f.to(device) for f in self.filters))


@dataclass(frozen=True)
class And(Joined):
    """A key is visible if all filters show it."""

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return reduce(and_, (f.sees(b, i, j, start) for f in self.filters))

    def shows(self, b: Index, h: Index, i: Index, j: Index, start: int) -> Index:
        return reduce(and_, (f.shows(b, h, i, j, start) for f in self.filters))

    def joins(self, b: Index, j: Index, m: Index) -> Index:
        return reduce(and_, (f.joins(b, j, m) for f in self.filters))

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
    """A key is visible if any filter shows it."""

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return reduce(or_, (f.sees(b, i, j, start) for f in self.filters))

    def shows(self, b: Index, h: Index, i: Index, j: Index, start: int) -> Index:
        return reduce(or_, (f.shows(b, h, i, j, start) for f in self.filters))

    def joins(self, b: Index, j: Index, m: Index) -> Index:
        return reduce(or_, (f.joins(b, j, m) for f in self.filters))

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        each = [f.covers(i, j, start) for f in self.filters]
        return True if True in each else None if None in each else False

    @property
    def causal(self) -> bool:
        return all(f.causal for f in self.filters)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.filters))
