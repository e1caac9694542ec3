"""A call of `vicinity` as a few near keys and all others.

Only the P keys nearest to a query have taps that it must not see. All other keys are one call of
`smooth` on keys and values that are convolved once. The nearest P are one block of P columns. Both
are mixed by their masses, so memory is linear in the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends.tokenwise.taps import Convolution
from ..dispatch.problem import Problem
from ..filters import And, Causal, Earlier, Filter, Full, Memory, Padding, Window
from ..filters.placed import place
from ..smoother import solve
from ..term.features import Features
from ..term.layout import repeat
from ..term.mix import Smoothed
from .nearest import Column, average, rows
from .ordered import Ordered
from .taps import convolve, cut, joined


@dataclass(frozen=True)
class Vicinity:
    """A checked call."""

    problem: Problem
    convolution: Convolution
    first: int = 0  # the place of the first key
    ordered: Ordered | None = None  # where places are said, other than consecutive to the last key

    def seen(self, away: int | None) -> Problem:
        """The problem with the keys and values that a query `away` places later sees."""
        key_taps, value_taps, *_ = self.convolution
        k, v = self.problem.k, self.problem.v
        if key_taps is not None:
            k = with_content(k, self._convolved(k.part("content"), key_taps, away))
        if value_taps is not None:
            v = self._convolved(v, value_taps, away)
        return replace(self.problem, k=k, v=v)

    def _convolved(self, x: Tensor, taps: Tensor, away: int | None) -> Tensor:
        _, _, normalize, boundary = self.convolution
        first, kernel = cut(taps, normalize, boundary, away)
        if self.ordered is not None:
            return self.ordered.convolve(in_heads(x, taps), first, kernel, self.problem.filter)
        joins = joined(self.problem.filter, self.first, x.shape[2], taps.shape[-1] // 2, x.device)
        return convolve(in_heads(x, taps), first, kernel, joins)

    def far(self, count: int, backend: str) -> Smoothed:
        """All keys but the nearest; all their taps are visible."""
        whole = replace(self.seen(None), log_mass=True)
        moved = self.moved(count)
        if moved is None:
            earlier: Filter = Earlier(count)
            if self.ordered is not None and whole.places is not None:
                earlier = place(earlier, whole.places, whole.v.device)
            return solve(replace(whole, filter=whole.filter & earlier), backend)
        first = slice(None, whole.k.length - count)
        short = replace(whole, k=sliced(whole.k, first), v=whole.v[:, :, first], filter=moved)
        return self.before(short, backend)

    def moved(self, count: int) -> Filter | None:
        """The filter without the nearest keys; queries align with the last key that they see."""
        whole = self.problem
        if whole.kernel.relative or self.ordered is not None:
            return None
        num_queries, num_keys = whole.q.length, whole.k.length
        return _moved(whole.filter.simplify(num_queries, num_keys), count, num_queries, num_keys)

    def before(self, short: Problem, backend: str) -> Smoothed:
        """The smoother of all keys but the last; the first queries may see none of them."""
        # Without the last keys, queries align with the last key that they see. So the filter is
        # causal again, which more backends support than a gap.
        blind = max(0, short.q.length - short.k.length)
        out, log_mass, sign = solve(replace(short, q=sliced(short.q, slice(blind, None))), backend)
        assert log_mass is not None
        return Smoothed(
            F.pad(out, (0, 0, blind, 0)),
            F.pad(log_mass, (blind, 0), value=-math.inf),
            None if sign is None else F.pad(sign, (blind, 0), value=1.0),
        )

    def _last(self, count: int) -> Vicinity:
        """The same call with the last keys only."""
        first = max(self.problem.k.length - count, 0)
        kept = slice(first, None)
        problem = replace(
            self.problem, k=sliced(self.problem.k, kept), v=self.problem.v[:, :, kept]
        )
        key_taps, value_taps = (None if x is None else x[:, kept] for x in self.convolution[:2])
        convolution = self.convolution._replace(key_taps=key_taps, value_taps=value_taps)
        return Vicinity(problem, convolution, self.first + first)

    def near(self, count: int) -> Smoothed | None:
        """The `count` nearest keys of each query; None if the kernel has no lowering."""
        whole, num_queries = self.problem, self.problem.q.length
        call = self if self.ordered is not None else self._last(num_queries + 2 * count)
        columns: list[Column] = []
        for away in range(count):
            here = call.seen(away)
            terms = here.kernel.terms(here.q, here.k)
            if not terms:
                return None
            resolved = [term.resolve(num_queries, here.k.length, causal=True) for term in terms]
            pick, seen = self._beside(away, call.first)
            value = torch.where(seen[..., None], pick(here.v), 0.0)
            columns += [Column(term, pick, away, seen, value) for term in resolved]
        return average(columns, count, whole)

    def _beside(self, away: int, first: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """The key `away` places before each query, as `rows` takes it, and whether it is seen."""
        filter, num_queries = self.problem.filter, self.problem.q.length
        start, device = self.first + self.problem.k.length - num_queries, self.problem.v.device
        here = torch.arange(start, start + num_queries, device=device)
        pick: Callable[[Tensor], Tensor]
        if self.ordered is None:
            pick = partial(rows, first=start - away - first, count=num_queries)
            keys, there = (here - away).clamp(min=0), here >= away
        else:
            pick, numbers, found = self.ordered.before(away)
            keys, there = numbers[:, None], found[:, None]
        b = torch.arange(filter.batch or 1, device=device)[:, None, None]
        return pick, torch.as_tensor(filter.sees(b, here, keys, start), device=device) & there


def _moved(filter: Filter, count: int, num_queries: int, num_keys: int) -> Filter | None:
    """The keys that a query sees without its `count` nearest, for queries moved back by `count`."""
    match filter:
        case Causal():
            return filter
        case Full() if num_queries <= 1:
            return filter
        case Window(left=left, right=0) if left < 0 or left >= count:
            return Causal() if left < 0 else Window(left - count, 0)
        case Memory(length=length, start=start):
            return Memory(length, num_keys - num_queries if start is None else start)
        case Padding():
            return filter.until(num_keys - count, 0)
        case And(filters=filters) if filter.causal:
            parts = [_moved(part, count, num_queries, num_keys) for part in filters]
            kept = [part for part in parts if part is not None]
            return And(tuple(kept)) if len(kept) == len(parts) else None
    return None


def with_content(k: Features, content: Tensor) -> Features:
    return Features(**dict(k.items()) | {"content": content}).at(k.places)


def in_heads(x: Tensor, taps: Tensor) -> Tensor:
    """x, with heads repeated if the taps have more."""
    fits = taps.shape[2] == 1 or taps.shape[2] == x.shape[1]
    return x if fits else repeat(x, x.shape[0], taps.shape[2])


def sliced(x: Features, places: slice) -> Features:
    return Features(**{name: part[:, :, places] for name, part in x.items()})
