"""A filter as an or of ands, as numbers for the fused kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ...filters import (
    And,
    Causal,
    Documents,
    Earlier,
    Filter,
    Fixed,
    Full,
    Memory,
    Or,
    Padding,
    Strided,
    Window,
)
from ...filters.placed import Placed

MAX_CLAUSES = 4
PATTERNS = frozenset({Full, Causal, Earlier, Window, Memory, Strided, Fixed})


class Clause(NamedTuple):
    """Conditions on a query i and a key j that must all hold. -1 and 0 mean: no such condition."""

    causal: bool = False
    left: int = -1
    right: int = -1
    memory: int = -1
    stride: int = 0
    fixed: int = 0
    summary: int = 0
    padding: bool = False
    documents: bool = False
    gap: int = 0

    def numbers(self) -> tuple[int, ...]:
        """The same for kernels, whose compile-time constants are plain tuples of numbers."""
        return tuple(map(int, self))


@dataclass(frozen=True)
class Clauses:
    """A filter: a query sees a key where one of the cases holds."""

    cases: tuple[Clause, ...]
    lengths: Tensor | None  # of the sequences, for padding
    ids: Tensor | None  # of documents
    first: int  # where the memory starts
    simple: bool  # each query sees one stretch of keys


def read(filter: Filter, num_queries: int, num_keys: int) -> Clauses | str:
    """The filter in clauses, or why it has none."""
    # A filter without data is a few numbers, mostly the same for all calls of a model: cached.
    if type(filter) in PATTERNS and not torch.compiler.is_compiling():
        return _remembered(filter, num_queries, num_keys)
    return _read(filter, num_queries, num_keys)


@lru_cache(maxsize=1024)
def _remembered(filter: Filter, num_queries: int, num_keys: int) -> Clauses | str:
    return _read(filter, num_queries, num_keys)


def _read(filter: Filter, num_queries: int, num_keys: int) -> Clauses | str:
    place = num_keys - num_queries
    data: dict[str, Tensor] = {}
    starts: set[int] = set()
    found = _clauses(filter.simplify(num_queries, num_keys), data, starts, place)
    if isinstance(found, str):
        return found
    if len(found) > MAX_CLAUSES:
        return f"its filter is an or of {len(found)} cases, more than {MAX_CLAUSES}"
    if len(starts) > 1:
        return "its filter has memories with different starts"
    simple = len(found) == 1 and not (found[0].stride or found[0].fixed or found[0].documents)
    first = next(iter(starts), place)
    return Clauses(tuple(found), data.get("lengths"), data.get("ids"), first, simple)


def _clauses(
    filter: Filter, data: dict[str, Tensor], starts: set[int], place: int
) -> list[Clause] | str:
    if isinstance(filter, Or | And):
        each = []
        for part in filter.filters:
            found = _clauses(part, data, starts, place)
            if isinstance(found, str):
                return found
            each.append(found)
        if isinstance(filter, Or):
            return [clause for clauses in each for clause in clauses]
        joined = []
        for parts in product(*each):
            clause: Clause | str = Clause()
            for part_clause in parts:
                if isinstance(clause, Clause):
                    clause = _both(clause, part_clause)
            if isinstance(clause, str):
                return clause
            joined.append(clause)
        return joined
    if isinstance(filter, Padding):
        return _with_data(Clause(padding=True), "lengths", filter.lengths, data)
    if isinstance(filter, Documents):
        if filter.queries is not None:
            return "its documents have ids for queries of their own"
        return _with_data(Clause(documents=True), "ids", filter.ids, data)
    if isinstance(filter, Memory):
        starts.add(place if filter.start is None else filter.start)
        return [Clause(causal=True, memory=filter.length)]
    match filter:
        case Full():
            return [Clause()]
        case Causal():
            return [Clause(causal=True)]
        case Earlier(gap=gap) if gap >= 0:
            return [Clause(causal=True, gap=gap)]
        case Window(left=left, right=right):
            return [Clause(left=left, right=right)]
        case Strided(stride=stride):
            return [Clause(causal=True, stride=stride)]
        case Fixed(stride=stride, summary=summary):
            return [Clause(causal=True, fixed=stride, summary=summary)]
    if isinstance(filter, Placed):
        return f"it does not support {filter!r}"
    return f"it does not support the filter {type(filter).__name__}"


def _with_data(
    clause: Clause, name: str, tensor: Tensor, data: dict[str, Tensor]
) -> list[Clause] | str:
    if name in data and data[name] is not tensor:
        return f"its filter reads two sets of {name}"
    data[name] = tensor
    return [clause]


def _both(a: Clause, b: Clause) -> Clause | str:
    """The clause of two clauses together."""
    if (a.stride and b.stride) or (a.fixed and b.fixed):
        return "its filter has two strides at once"
    kept = a if a.fixed else b
    return a._replace(
        causal=a.causal or b.causal,
        left=_narrower(a.left, b.left),
        right=_narrower(a.right, b.right),
        memory=_narrower(a.memory, b.memory),
        stride=a.stride or b.stride,
        fixed=kept.fixed,
        summary=kept.summary,
        padding=a.padding or b.padding,
        documents=a.documents or b.documents,
        gap=max(a.gap, b.gap),
    )


def _narrower(a: int, b: int) -> int:
    return max(a, b) if a < 0 or b < 0 else min(a, b)
